"""The harness itself, without engines: its handling of messages and posts, and that it detects faults."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.faults.fault_client import Client
from tests.faults.fault_cluster import Census, proxy_port
from tests.faults.fault_hop import HOST, Hop
from tests.faults.fault_relay import Relay
from tests.faults.fault_report import Cell, Report
from tests.faults.fault_scene import wait_for
from tests.faults.fault_store import StoreFaults
from tests.faults.faulty_store import FILLER_BYTES, FaultyStore
from vllm_kvoffload.connectors.sfa_remote_d2h import wire
from vllm_kvoffload.store import (
    CopySpans,
    StoreError,
    StoreUnavailableError,
    WriteObject,
    WriteRefusal,
)
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.transfer.base import Region

zmq = pytest.importorskip("zmq")
SESSION = "p"
NBYTES = FILLER_BYTES
ONE, TWO = (wire.prompt_digest([n]) for n in (1, 2))


def publish(transfer, prompt):
    return wire.Publish(SESSION, transfer, "r", prompt, 1, 0, (wire.Chunk(0, (1,), 2),), False)


class Line:
    """Decode's ROUTER and prefill's DEALER with the relay between them."""

    def __init__(self):
        self.context = zmq.Context()
        self.decode = self.context.socket(zmq.ROUTER)
        self.relay = Relay(self.decode.bind_to_random_port("tcp://127.0.0.1"))
        self.relay.start()
        self.prefill = self.context.socket(zmq.DEALER)
        self.prefill.setsockopt(zmq.IDENTITY, SESSION.encode())
        self.prefill.connect(f"tcp://127.0.0.1:{self.relay.port}")

    def close(self):
        self.relay.stop()
        self.context.destroy(linger=0)

    def up(self, *messages):
        for message in messages:
            self.prefill.send(wire.encode(message))

    def down(self, message):
        self.decode.send_multipart([SESSION.encode(), wire.encode(message)])

    def at_decode(self, seconds=0.5):
        return self._all(self.decode, seconds)

    def at_prefill(self, seconds=0.5):
        return self._all(self.prefill, seconds)

    @staticmethod
    def _all(socket, seconds):
        got = []
        while socket.poll(1000 * seconds):
            got.append(socket.recv_multipart()[-1])
        return got


@pytest.fixture
def line():
    with closing(Line()) as made:
        made.up(publish(1, ONE), publish(2, TWO))
        assert len(made.at_decode()) == 2
        yield made


def test_a_rule_hits_one_request(line):
    line.relay.rule("dropped", "Publish", prompt=ONE, times=2)
    line.up(*[publish(1, ONE)] * 3, publish(2, TWO))
    got = [wire.decode_to_decode(frame) for frame in line.at_decode()]
    assert [message.transfer for message in got] == [1, 2]


def test_what_is_done_to_messages(line):
    whole = wire.encode(publish(1, ONE))
    for action, expected in [
        ("dropped", []),
        ("duplicated", [whole, whole]),
        ("truncated", [whole[: len(whole) // 2]]),
        ("delayed", [whole]),
    ]:
        line.relay.rule(action, "Publish", delay_s=0.8)
        line.up(publish(1, ONE))
        if action == "delayed":
            assert not line.at_decode(0.4)
        assert line.at_decode() == expected
    with pytest.raises(wire.WireError):
        wire.decode_to_decode(whole[: len(whole) // 2])


def test_of_a_heartbeat_only_the_entries_of_the_request(line):
    line.relay.rule("dropped", "Beat", prompt=ONE, times=None)
    line.relay.rule("dropped", "BeatAck", prompt=TWO, times=None)
    line.down(wire.Beat("d", SESSION, ((1, 1, 1), (2, 3, 3))))
    assert [wire.decode_to_prefill(f).entries for f in line.at_prefill()] == [((2, 3, 3),)]
    line.relay.rule("dropped", "Progress", prompt=ONE, times=None)
    line.down(wire.Progress("d", SESSION, ((1, 0, 3),)))
    line.down(wire.Progress("d", SESSION, ((2, 0, 3),)))
    assert [wire.decode_to_prefill(f).entries for f in line.at_prefill()] == [((2, 0, 3),)]
    line.up(wire.BeatAck(SESSION, (1, 2)))
    assert [wire.decode_to_decode(f).transfers for f in line.at_decode()] == [(1,)]


def test_a_watch_acts_once_before_the_message_goes_on(line):
    before = threading.Event()
    watch = line.relay.watch(lambda m: isinstance(m, wire.Finish), before.set)
    line.down(wire.Finish("d", SESSION, 1))
    assert line.at_prefill()
    assert before.is_set()
    assert watch.done.is_set()


def test_when_prefill_goes_away_so_does_its_connection_to_decode(line):
    line.prefill.close(linger=0)
    wait_for(lambda: not line.relay._backs, "the connection to decode is still there")
    with closing(line.context.socket(zmq.DEALER)) as other:
        other.setsockopt(zmq.IDENTITY, b"q")
        other.connect(f"tcp://127.0.0.1:{line.relay.port}")
        other.send(wire.encode(publish(9, TWO)))
        assert len(line.at_decode()) == 1


@pytest.fixture
def faulty(tmp_path):
    """A store with room for 64 objects, its faults, and registered memory of one object."""
    store, memory = LocalStore(tmp_path.name, 64 * NBYTES), np.zeros(NBYTES, dtype=np.uint8)
    store.register([Region(memory.ctypes.data, NBYTES)])
    with closing(FaultyStore(store, "owner", tmp_path)) as made:
        yield made, StoreFaults(None, tmp_path, "fail"), memory


def put(store, keys):
    granted = store.open_write(keys, NBYTES)
    return [isinstance(g, WriteObject) and store.finish_write([g], [True]) == [True] for g in granted]


def spans_of(object_, memory, count=2):
    size = NBYTES // count
    starts = np.arange(count, dtype=np.int64) * size
    sizes = np.full(count, size, dtype=np.int64)
    return CopySpans(object_.address + starts, memory.ctypes.data + starts, sizes)


def test_the_store_evicts_and_fills_when_told(faulty):
    store, faults, _ = faulty
    assert put(store, ["a", "b"]) == [True, True]
    (pinned,) = store.open_read(["b"], 60)
    evicted, full = faults.fault("evicted", 1), faults.fault("full")
    evicted.begin()
    assert store.lookup(["a", "b"]) == 2
    assert store.open_read(["a", "c"], 60) == [None, None]
    assert store.lookup(["b"]) == 1
    assert evicted.hits == 1
    full.begin()
    assert store.open_write(["d", "e"], NBYTES) == [WriteRefusal.FULL] * 2
    assert faults.held() == "open-owner: 1 objects to read"
    full.end()
    assert put(store, ["d"]) == [True]
    store.close_read([pinned])
    assert faults.held() == ""


def test_copies_fail_half_way_or_wait(faulty):
    store, faults, memory = faulty
    (written,) = store.open_write(["a"], NBYTES)
    memory[:] = 7
    store.copy(spans_of(written, memory), "save")
    store.finish_write([written], [True])
    (read,) = store.open_read(["a"], 60)
    memory[:] = 0
    fails, hangs = faults.fault("load_fails", 1), faults.fault("load_hangs", 1)
    fails.begin()
    with pytest.raises(StoreError, match="half-way"):
        store.copy(spans_of(read, memory), "load")
    assert (memory[: NBYTES // 2] == 7).all()
    assert not memory[NBYTES // 2 :].any()
    hangs.begin()
    copy = threading.Thread(target=store.copy, args=(spans_of(read, memory), "load"))
    copy.start()
    wait_for(lambda: hangs.hits == 1, "the copy did not come")
    assert not memory[NBYTES // 2 :].any()
    faults.end_all()
    copy.join(10)
    assert (memory == 7).all()
    store.close_read([read])


def test_a_store_that_is_down(faulty):
    store, faults, _ = faulty
    assert put(store, ["a"]) == [True]
    faults.fault("down").begin()
    assert store.lookup(["a"]) == 0
    with pytest.raises(StoreUnavailableError):
        store.open_read(["a"], 60)
    with pytest.raises(StoreUnavailableError):
        store.open_write(["b"], NBYTES)
    faults.end_all()
    assert store.lookup(["a"]) == 1


class Proxy(BaseHTTPRequestHandler):
    got: list[dict] = []  # noqa: RUF012

    def do_POST(self):
        self.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_args):
        pass


@pytest.fixture
def hop():
    port = proxy_port()
    Proxy.got.clear()
    server = ThreadingHTTPServer(("127.0.0.1", port), Proxy)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    made = Hop(port, 4711)
    with made.serve():
        yield made
    server.shutdown()
    server.server_close()


def post(hop, request_id):
    connection = http.client.HTTPConnection(HOST, hop._port, timeout=20)
    try:
        connection.request("POST", "/v1/metaserver", json.dumps({"request_id": request_id, "remote_port": 1}))
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def test_the_hop_sends_prefill_to_the_relay(hop):
    assert post(hop, "a") == 200
    assert Proxy.got == [{"request_id": "a", "remote_port": 4711}]


def test_the_hop_spoils_posts(hop):
    hop.plan(status=503)
    hop.plan(lose_answer=True)
    hop.plan(status=0)
    hop.plan(changes={"remote_port": 9})
    assert [post(hop, name) for name in ("a", "b", "b", "c", "d", "e")] == [503, 0, 200, 0, 200, 200]
    assert [m["remote_port"] for m in Proxy.got] == [4711, 4711, 9, 4711]


def test_the_hop_holds_posts(hop):
    plan = hop.plan(hold=True)
    got = []
    thread = threading.Thread(target=lambda: got.append(post(hop, "a")))
    thread.start()
    assert plan.arrived.wait(5)
    thread.join(0.3)
    assert not got
    plan.go.set()
    thread.join(5)
    assert got == [200]


def ended(tokens, *, complete=False, error="", aborted=False):
    client = Client(1, [1])
    client.tokens, client.complete, client.error, client.aborted = tokens, complete, error, aborted
    return client


def test_verdicts():
    reference = ["a", "b", "c"]
    assert ended(["a", "b", "c"], complete=True).verdict(reference) == "right"
    assert ended(["a", "b"], complete=True).verdict(reference) == "WRONG"
    assert ended(["a", "x", "c"], complete=True).verdict(reference) == "WRONG"
    assert ended(["a", "x"], error="broke").verdict(reference) == "WRONG"
    assert ended(["a", "b", "c", "d"], error="broke").verdict(reference) == "WRONG"
    assert ended(["a"], error="broke").verdict(reference) == "error"
    assert ended(["a"], error="broke", aborted=True).verdict(reference) == "gone"
    assert ended([], error="timeout").verdict(reference) == "HANGS"


def test_a_census_sees_threads_and_sockets():
    before = Census(os.getpid())
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with socket.socket():
        now = Census(os.getpid())
        assert now.counts == (before.counts[0] + 1, before.counts[1] + 1)
        assert "socket" in now.more_than(before)
    end.set()
    thread.join()


def test_the_table():
    report = Report()
    row = report.row("p killed")
    row.cells = {"pulling": Cell(["right", "error", "right"]), "waiting": Cell(["WRONG"])}
    report.row("d killed").cells = {"streaming": Cell(["right"])}
    report.row("d killed").passed = True
    bad, good = report.take_rows()
    assert bad["line"] == ["p killed", "", "WRONG", "2 right, error", "", "", "0", "-", "FAILED"]
    assert (bad["cells"], bad["good"]) == (2, 0)
    assert good["line"][-1] == "ok"
    assert (good["cells"], good["good"]) == (1, 1)
    assert not report.take_rows()
    assert len(bad["head"]) == len(bad["line"])
