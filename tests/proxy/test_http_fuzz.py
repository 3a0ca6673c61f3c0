"""100,000 hostile HTTP requests: well-formed ones are answered in order, the others do no harm.

Each connection sends requests that have one right status each, in random segments, and then maybe a mutated
tail. ``KVOFFLOAD_FUZZ_REQUESTS`` sets how many requests, ``KVOFFLOAD_FUZZ_SEED`` where to begin; a failure
names the connection's seed, which is then kept in ``SEEDS``, and bytes that went wrong in ``FOUND``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import resource
import time
import traceback
from typing import Any

import pytest
import uvloop

from tests.proxy.proxy_world import HOST, Exchange, World, world
from tests.proxy.test_proxy_edge import ANSWER, BODY, CASES, END, chunked, post
from vllm_kvoffload.proxy.edge import Edge
from vllm_kvoffload.proxy.settings import Deadlines

REQUESTS = int(os.environ.get("KVOFFLOAD_FUZZ_REQUESTS", "100000"))
FIRST_SEED = int(os.environ.get("KVOFFLOAD_FUZZ_SEED", "1"))
SIDE_BY_SIDE = 48
CPU_SECONDS = 0.5  # of one call with bytes of one client; the largest take 5 ms
SEEDS = (7, 4711)  # connections that once failed, or whose kind did
FOUND = (
    b"POST / HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 9\r\n\r\nGET / HTT",
    b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nupgrade: x\r\n\r\nGET /",
    b"GET http:// HTTP/1.1\r\n\r\n",
    b"GET //[ HTTP/1.1\r\n\r\n",
    b"GET /%ff%0d%0a HTTP/1.1\r\nhost: \xff\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 18446744073709551615\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\ncontent-length: 18446744073709551616\r\n\r\n",
)
TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\x00", b"\r\n\r\n", b" ", b"\t", b":", b"0\r\n\r\n", b"\xff", b"%00"),
    *(b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"upgrade: h2c\r\n", b"\r\n folded"),
    *(b"HTTP/1.0", b"HTTP/2.0", b"CONNECT", b"expect: 100-continue\r\n", b"connection: close\r\n"),
    *(
        b"a: b\r\n" * 300,
        b"a" * 9000,
        b"fffffffff\r\n",
        b"-1",
        b"9" * 20,
        b"[" * 2000,
        b'"\\u0000"',
        b"1e999",
    ),
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIELDS = (
    b"accept: */*",
    b"Upgrade: h2c\r\nConnection: Upgrade",
    b"x: " + b"y" * 500,
    b"cookie: a=\xff",
    b"a:",
)
Part = tuple[bytes, int]  # a request and its status


def valid(rng: random.Random) -> Part:
    """A request with one right answer."""
    fields = [rng.choice(FIELDS) for _ in range(rng.randrange(3))]
    lines = b"".join(b"%b\r\n" % field for field in fields)
    kind = rng.randrange(30)  # few reach the engine, which costs ten times as much as the others
    if kind == 0:
        return post(rng.choice((b"[]", b"{", b'{"n": 0}', b"\xff" * 9)), *fields), 400
    if kind == 1:
        return post(BODY, *fields), 200
    if kind == 2:
        cut = rng.randrange(1, len(BODY))
        return chunked(BODY[:cut], BODY[cut:], trailers=lines), 200
    if kind == 3:
        return post(rng.randbytes(rng.randrange(300)), *fields, path=b"/v1/nothing"), 404
    if kind == 4:
        return b"GET http://any:1/health?a HTTP/1.1\r\n%b\r\n" % lines, 200
    path, status = rng.choice(
        (
            (b"/health", 200),
            (b"/none", 404),
            (b"/v1/metaserver", 404),
            (b"/v1/completions", 405),
            (b"/%0a", 404),
        )
    )
    return b"%bGET %b HTTP/1.1\r\n%b\r\n" % (rng.choice((b"", b"\r\n")), path, lines), status


def mutated(rng: random.Random) -> bytes:
    """Bytes that may be anything."""
    data = rng.choice(
        (valid(rng)[0], valid(rng)[0] + valid(rng)[0], rng.choice(FOUND), rng.choice(SMALL_CASES))
    )
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randrange(1, 9))
        kind = rng.randrange(5)
        middle = (
            b"",
            rng.choice(TOKENS),
            rng.randbytes(end - at),
            data[at:end] * 2,
            data[: rng.randrange(99)],
        )
        data = data[:at] + middle[kind] + data[at if kind == 1 else end :]
    return data


SMALL_CASES = [sent for sent, _ in CASES.values() if len(sent) < 4000]


class Client(asyncio.Protocol):
    """Keeps all that comes."""

    def __init__(self) -> None:
        self.raw = bytearray()
        self.closed = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.raw += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(exc)


def answers(raw: bytes, *, whole: bool) -> list[int]:
    """Statuses of well-formed answers; the last may be cut unless ``whole``."""
    made, at = [], 0
    while at < len(raw):
        if raw.startswith(CONTINUE, at):
            at += len(CONTINUE)
            continue
        found = ANSWER.match(raw, at)
        if found is None or found.end() + int(found[2]) > len(raw):
            assert not whole, bytes(raw[at : at + 300])
            break
        made.append(int(found[1]))
        at = found.end() + int(found[2])
    return made


async def one_connection(w: World, seed: int) -> int:
    """How many requests it had."""
    rng = random.Random(seed)
    parts = [valid(rng) for _ in range(rng.randrange(1, 40))]
    tail = mutated(rng) if rng.random() < 0.6 else b""
    data = b"".join(sent for sent, _ in parts) + tail + (b"" if tail and rng.random() < 0.5 else END)
    cuts = sorted(rng.randrange(len(data)) for _ in range(rng.choice((0, 1, 3, 20))))
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, HOST, w.settings.port)
    try:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if transport.is_closing():
                break
            transport.write(data[start:end])
            await asyncio.sleep(0)
        if not tail:
            await asyncio.wait_for(client.closed, 60)
        else:
            wanted = len(parts)
            for _ in range(1200):  # all of the good ones are answered, however long that takes
                if client.closed.done() or len(answers(client.raw, whole=False)) >= wanted:
                    break
                await asyncio.sleep(0.05)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.shield(client.closed), 2.0 if rng.random() < 0.02 else 0.02)
        made = answers(client.raw, whole=not tail)
    finally:
        transport.abort()
    expected = [status for _, status in parts]
    assert made[: len(parts)] == expected, f"seed {seed}: {made} for {expected}"
    assert len(made) <= len(parts) + tail.count(b"HTTP/") + 2, f"seed {seed}: more answers than requests"
    return len(parts) + 1


async def quick(exchange: Exchange) -> None:
    """An engine without a rendezvous."""
    await exchange.respond(200, exchange.shell([exchange.choice("x", "stop")]))


class Watch:
    """Fails for anything that a server must not do, whatever was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        self.wrong: list[str] = []
        received = Edge.data_received

        def timed(edge: Edge, data: bytes) -> None:
            began = time.thread_time()
            received(edge, data)
            self.longest = max(self.longest, time.thread_time() - began)

        monkeypatch.setattr(Edge, "data_received", timed)

    def exception(self, _loop: Any, context: dict[str, Any]) -> None:
        self.wrong.append(f"{context.get('message')}: {context.get('exception')!r}")

    def logged(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno >= logging.ERROR or record.exc_info or re.search(r"[\x00-\x1f\x7f]", message):
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.wrong.append(f"{message} {trace}".strip())


def use() -> tuple[int, int]:
    """Descriptors and resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return len(os.listdir("/proc/self/fd")), int(file.read().split()[1]) * resource.getpagesize()


async def fuzz(watch: Watch, requests: int) -> None:
    asyncio.get_running_loop().set_exception_handler(watch.exception)
    deadlines = Deadlines(head=10, request_body=10)  # the machine may be busy: nothing here depends on more
    async with world(deadlines=deadlines) as w:
        w.d.usual = quick
        seeds = iter([*SEEDS, *range(FIRST_SEED, FIRST_SEED + requests)])
        done, early = 0, (0, 0)

        async def worker() -> None:
            nonlocal done
            while done < requests:
                made = await one_connection(w, next(seeds))
                done += made

        async def healthy() -> None:
            while done < requests:
                assert (await w.client.get("/health")).status_code == 200
                w.d.exchanges.clear()  # the stand-in keeps them
                await asyncio.sleep(0.2)

        async def warmed_up() -> None:
            nonlocal early
            while done < requests // 2:
                await asyncio.sleep(0.1)
            early = use()

        await asyncio.gather(*(worker() for _ in range(SIDE_BY_SIDE)), healthy(), warmed_up())
        await w.client.aclose()
        for _ in range(100):
            if not w.app.running and use()[0] <= early[0]:
                break
            await asyncio.sleep(0.1)
        late = use()
        assert late[0] <= early[0], "descriptors"
        assert late[1] - early[1] < 48 << 20, f"{(late[1] - early[1]) >> 20} MiB more"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hostile_http(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    # Not caplog: pytest keeps every line for its report, also of loggers that don't propagate.
    monkeypatch.setattr(logging.Logger, "callHandlers", watch.logged)
    began = time.process_time()
    uvloop.run(fuzz(watch, REQUESTS))
    rate = REQUESTS / (time.process_time() - began)
    print(f"{rate:.0f} requests per second of CPU time, longest call {watch.longest:.4f} s")
    assert not watch.wrong, watch.wrong[:5]
    assert watch.longest < CPU_SECONDS
