"""The demo's client: event streams, answers, refusals, and the text of /metrics."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm_kvoffload.demo.client import (
    DemoAnswer,
    Request,
    RequestError,
    events,
    parse_metrics,
    read_metrics,
    send,
)

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that gives one fixed reply to everything; returns its port."""
    servers: list[ThreadingHTTPServer] = []

    def make(body: bytes, status: int = 200, pause_s: float = 0.0) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.end_headers()
                for part in body.splitlines(keepends=True):
                    time.sleep(pause_s)
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        self.wfile.write(part)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return int(servers[-1].server_address[1])

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def chunk(tokens: list[int], **more: object) -> bytes:
    choice = {"text": "x", "token_ids": tokens, "logprobs": {"token_logprobs": [-1.0] * len(tokens)}}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n".encode()


STREAMED = Request("streamed", "a prompt", 8, stream=True)
WHOLE = Request("whole", "a prompt", 8)
USAGE = {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}}


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"data: a\n\ndata: b\n\n", ["a", "b"]),
        (b"data:a\r\n\r\n", ["a"]),
        (b"data: a\ndata: b\n\n", ["a\nb"]),
        (b"data:  a\n\n", [" a"]),
        (b": comment\n\nevent: x\nid: 1\ndata: a\n\n\n\n", ["a"]),
        (b"data: a\n\ndata: cut", ["a"]),
        ("data: ä\n\n".encode(), ["ä"]),
        (b"", []),
    ],
)
def test_events(stream: bytes, expected: list[str]) -> None:
    assert list(events(stream.splitlines(keepends=True))) == expected


def test_streamed_answer(serve: Serve) -> None:
    last = b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\ndata: [DONE]\n\n'
    counts: list[int] = []
    answer = send(serve(chunk([5]) + chunk([6, 7]) + last), STREAMED, 30.0, counts.append)
    assert (answer.token_ids, answer.logprobs, answer.text) == ([5, 6, 7], [-1.0] * 3, "xx")
    assert (answer.prompt_tokens, answer.cached_tokens) == (7, 0)
    assert counts == [1, 3, 3]
    assert 0 < answer.first_s <= answer.total_s


def test_whole_answer(serve: Serve) -> None:
    answer = send(serve(chunk([5, 6], **USAGE)[6:]), WHOLE, 30.0)
    assert (answer.token_ids, answer.prompt_tokens, answer.cached_tokens, answer.first_s) == (
        [5, 6],
        7,
        4,
        0.0,
    )


@pytest.mark.parametrize(
    ("request_", "body", "status", "message"),
    [
        (STREAMED, chunk([1]), 200, "before its end mark"),
        (STREAMED, chunk([1]) + b'data: {"error": {"message": "engine dead"}}\n\n', 200, "engine dead"),
        (STREAMED, b"data: [DONE]\n\n", 200, "0 token ids"),
        (STREAMED, b"data: {broken\n\n", 200, "JSONDecodeError"),
        (WHOLE, b'{"choices": [{"text": "no ids", "logprobs": null}]}', 200, "0 token ids"),
        (WHOLE, b"too long a prompt", 400, "HTTP status 400: too long a prompt"),
    ],
)
def test_bad_answers(serve: Serve, request_: Request, body: bytes, status: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        send(serve(body, status), request_, 30.0)


def test_nobody_there() -> None:
    with pytest.raises(RequestError, match="whole: ConnectionRefusedError"):
        send(1, WHOLE, 5.0)
    with pytest.raises(RequestError, match="/metrics"):
        read_metrics(1, 5.0)


def test_deadline_covers_a_stream_that_never_pauses_for_long(serve: Serve) -> None:
    with pytest.raises(RequestError, match="not finished after 1 s"):
        send(serve(chunk([1]) * 100, pause_s=0.1), STREAMED, 0.6)


def test_chat_goes_to_the_chat_endpoint() -> None:
    request = Request("chat", [{"role": "user", "content": "hi"}], 4)
    assert request.path == "/v1/chat/completions"
    assert request.body()["logprobs"] is True
    assert WHOLE.path == "/v1/completions"
    assert WHOLE.body()["logprobs"] == 0
    answer = DemoAnswer()
    answer.take(
        {
            "choices": [
                {"message": {"content": "hi"}, "token_ids": [3], "logprobs": {"content": [{"logprob": -2.0}]}}
            ]
        }
    )
    assert (answer.text, answer.token_ids, answer.logprobs) == ("hi", [3], [-2.0])


def test_metrics(serve: Serve) -> None:
    text = '# TYPE a counter\na{x="1",y="q\\"{}"} 2.5e+06\na 1\nother:name_total 3.0\n\nbroken line here\n'
    found = parse_metrics(text)
    assert found.keys() == {"a", "other:name_total"}
    assert [sample.value for sample in found["a"]] == [2.5e6, 1.0]
    assert found["a"][0].labels["x"] == "1"
    assert read_metrics(serve(text.encode()), 30.0) == found
    with pytest.raises(RequestError, match="status 404"):
        read_metrics(serve(b"", 404), 30.0)
