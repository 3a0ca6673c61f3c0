"""Posts to the metaserver."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("aiohttp")

from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import Rendezvous


class MetaServer(ThreadingHTTPServer):
    """Answers `status` once `gate` is set; the first `dropped` connections are closed without an answer."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.status, self.dropped = [], 200, 0
        self.gate = threading.Event()
        self.gate.set()
        self.url = f"http://127.0.0.1:{self.server_port}/v1/metaserver"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.dropped:
            self.server.dropped -= 1
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.server.bodies.append(body)
        self.server.gate.wait(20)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_args):
        pass


@pytest.fixture
def server():
    made = MetaServer()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.gate.set()
    made.shutdown()
    made.server_close()


@pytest.fixture
def rendezvous():
    made = Rendezvous(deadline_s=8.0)
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "kvoffload-rendezvous"]


def answers(rendezvous, count=1, seconds=10.0):
    got, end = [], time.monotonic() + seconds
    while len(got) < count:
        assert time.monotonic() < end
        got += rendezvous.take_answers()
        time.sleep(0.01)
    return got


def test_the_body_arrives_and_the_answer_comes_back(server, rendezvous):
    rendezvous.post("r", server.url, {"request_id": "cmpl-1", "remote_port": 5})
    assert answers(rendezvous) == [("r", "")]
    assert server.bodies == [{"request_id": "cmpl-1", "remote_port": 5}]
    assert not rendezvous.take_answers()
    assert not rendezvous.num_posts


def test_a_hundred_posts_wait_at_once(server, rendezvous):
    """The proxy answers when prefill is through; with a pool of threads most would not even be sent."""
    server.gate.clear()
    for number in range(100):
        rendezvous.post(f"r{number}", server.url, {"request_id": str(number)})
    end = time.monotonic() + 10
    while len(server.bodies) < 100:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not rendezvous.take_answers()
    server.gate.set()
    assert {error for _, error in answers(rendezvous, 100)} == {""}


@pytest.mark.parametrize("status", [404, 502, 302])
def test_a_refusal_is_an_error_and_not_repeated(server, rendezvous, status):
    server.status = status
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", f"the metaserver answered {status}")]
    assert len(server.bodies) == 1


def test_a_broken_connection_is_tried_again(server, rendezvous):
    server.dropped = 2
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", "")]
    assert len(server.bodies) == 1


def test_nobody_there(rendezvous):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rendezvous.post("r", f"http://127.0.0.1:{port}/v1/metaserver", {})
    ((_, error),) = answers(rendezvous)
    assert "can't be reached" in error


def test_a_deadline(server):
    server.gate.clear()
    rendezvous = Rendezvous(deadline_s=0.3)
    rendezvous.post("r", server.url, {})
    assert answers(rendezvous) == [("r", "the metaserver did not answer within 0.3 s")]
    rendezvous.close()


def test_a_cancelled_post_is_forgotten(server, rendezvous):
    server.gate.clear()
    rendezvous.post("r", server.url, {})
    rendezvous.cancel("r")
    rendezvous.cancel("r")
    server.gate.set()
    time.sleep(0.3)
    assert not rendezvous.take_answers()
    assert not rendezvous.num_posts
