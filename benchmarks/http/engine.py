"""A trivial SSE engine: python -m benchmarks.http.engine --port P [--step-ms S] [--rendezvous].

It answers like ``vllm serve`` as far as a relay can see, and does no work. Every ``--step-ms`` it writes one
token to each running stream, as a batch of decode steps does; 0 writes as fast as the sockets take it. A
token's text is the monotonic clock in nanoseconds, so that a client sees how long the token was under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any, cast
from urllib.parse import urlsplit

import uvloop

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
TOKEN = (
    'data: {"id":"cmpl-5b1d0cf2a4b84d6f8a3d6f2f8f5a1c11-0","object":"text_completion","created":1764460800,'
    '"model":"bench","choices":[{"index":0,"text":"@%019d","logprobs":null,"finish_reason":null,'
    '"stop_reason":null}]}\n\n'
)
LAST = (
    b'data: {"id":"cmpl-5b1d0cf2a4b84d6f8a3d6f2f8f5a1c11-0","object":"text_completion","created":1764460800,'
    b'"model":"bench","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"length",'
    b'"stop_reason":null}]}\n\ndata: [DONE]\n\n'
)
MODELS = {"object": "list", "data": [{"id": "bench", "object": "model"}]}


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def whole(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


class Engine:
    """The running streams and their step clock."""

    def __init__(self, step_ms: float, *, rendezvous: bool) -> None:
        self.step = step_ms / 1000
        self.rendezvous = rendezvous
        self.running: dict[Connection, int] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.step, loop.time())
            await asyncio.sleep(due - loop.time())
            token = chunk((TOKEN % time.monotonic_ns()).encode())
            for connection, left in list(self.running.items()):
                if connection.paused:
                    continue
                connection.write(token)
                if left > 1:
                    self.running[connection] = left - 1
                else:
                    del self.running[connection]
                    connection.write(chunk(LAST) + b"0\r\n\r\n")

    def start(self, connection: Connection, body: dict[str, Any]) -> None:
        params = body.get("kv_transfer_params") or {}
        if self.rendezvous and params.get("metaserver"):
            task = asyncio.create_task(self.meet(connection, body, params["metaserver"]))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self.answer(connection, body)

    def answer(self, connection: Connection, body: dict[str, Any]) -> None:
        tokens = int(body.get("max_tokens") or 16)
        if body.get("stream"):
            connection.write(HEAD)
            self.running[connection] = tokens
            return
        usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
        choice = {"index": 0, "text": "x" * 4 * tokens, "finish_reason": "length", "stop_reason": None}
        connection.write(whole({"id": "cmpl-1", "model": "bench", "choices": [choice], "usage": usage}))

    async def meet(self, connection: Connection, body: dict[str, Any], metaserver: str) -> None:
        """Performs decode's part of the rendezvous, then answers."""
        url = urlsplit(metaserver)
        message = {
            "request_id": f"cmpl-{connection.request_id}-0",
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": "bench",
            "remote_host": "127.0.0.1",
            "remote_port": 20050,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }
        content = json.dumps(message).encode()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = "POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write((head % (url.path, len(content))).encode() + content)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        self.answer(connection, body)


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after another and have a content-length."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffer = b""
        self.paused = False
        self.request_id = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's
        self.write = self.transport.write

    def connection_lost(self, _exc: Exception | None) -> None:
        self.engine.running.pop(self, None)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head, *fields = self.buffer[:end].decode("latin-1").split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (field.partition(":") for field in fields)}
            size = int(headers.get("content-length", 0))
            if len(self.buffer) < end + 4 + size:
                return
            body = self.buffer[end + 4 : end + 4 + size]
            self.buffer = self.buffer[end + 4 + size :]
            self.request_id = headers.get("x-request-id", "")
            if head.startswith("POST"):
                self.engine.start(self, json.loads(body))
            else:
                self.write(whole(MODELS))


async def serve(port: int, step_ms: float, *, rendezvous: bool) -> None:
    engine = Engine(step_ms, rendezvous=rendezvous)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1024)
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--rendezvous", action="store_true")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.step_ms, rendezvous=arguments.rendezvous))


if __name__ == "__main__":
    main()
