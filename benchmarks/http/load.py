"""Load generator: a fixed number of connections, each sending its next request when the last one has
ended."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

import uvloop

STAMP = re.compile(rb"@(\d{19})")
PATH = "/v1/completions"


@dataclass
class Result:
    """Result of one run; times in seconds: ``delays`` of tokens in transit, ``firsts`` until the first
    token."""

    seconds: float = 0.0
    requests: int = 0
    errors: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, request: bytes, count: int, *, stream: bool, result: Result) -> None:
        self.request, self.left, self.stream, self.result = request, count, stream, result
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class is none of asyncio's
        self._next()

    def connection_lost(self, _exc: Exception | None) -> None:
        if not self.finished.done():
            self.result.errors += self.left
            self.finished.set_result(None)

    def _next(self) -> None:
        if not self.left:
            if not self.finished.done():
                self.finished.set_result(None)
            self.transport.close()
            return
        self.left -= 1
        self.buffer = b""
        self.first = True
        self.began = time.monotonic()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        stamps = STAMP.findall(data)
        if stamps:
            if self.first:
                self.first = False
                self.result.firsts.append(now / 1e9 - self.began)
            self.result.tokens += len(stamps)
            self.result.delays += [(now - int(stamp)) / 1e9 for stamp in stamps]
        self.buffer = self.buffer[-65536:] + data
        if self._complete():
            self.result.requests += 1
            self.result.wholes.append(time.monotonic() - self.began)
            if not (self.stream or b" 200 " in self.buffer[:16]):
                self.result.errors += 1
            self._next()

    def _complete(self) -> bool:
        if self.buffer.endswith(b"0\r\n\r\n"):
            return True
        if self.stream:
            return False
        head, _, body = self.buffer.partition(b"\r\n\r\n")
        size = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        return size is not None and len(body) >= int(size.group(1))


async def _load(port: int, *, connections: int, each: int, tokens: int, stream: bool) -> Result:
    body = json.dumps(
        {"model": "bench", "prompt": "Once upon a time " * 32, "max_tokens": tokens, "stream": stream}
    ).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    result = Result()
    loop = asyncio.get_running_loop()
    began = time.monotonic()
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(
            lambda: Client(request, each, stream=stream, result=result), "127.0.0.1", port
        )
        clients.append(client.finished)
    await asyncio.wait_for(asyncio.gather(*clients), 300)
    result.seconds = time.monotonic() - began
    return result


def load(port: int, *, connections: int, each: int, tokens: int, stream: bool) -> Result:
    """``connections`` times ``each`` requests of ``tokens`` tokens. Raises ``TimeoutError`` after 300 s."""
    return uvloop.run(_load(port, connections=connections, each=each, tokens=tokens, stream=stream))
