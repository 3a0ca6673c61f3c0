"""Unauthenticated traffic at the proxy's port: heads, framing, upgrades, idle connections, JSON, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import types
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.proxy.proxy_world import FAST, HOST, Exchange, World, decode, world
from vllm_kvoffload.proxy.chunks import ChunkError, Chunks
from vllm_kvoffload.proxy.cork import cork
from vllm_kvoffload.proxy.errors import HttpFailure
from vllm_kvoffload.proxy.jsontext import DEEPEST, decode_json
from vllm_kvoffload.proxy.settings import Deadlines, ProxyLimits

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MISSING = b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n"
JSON = b"content-type: application/json"
BODY = b'{"prompt": "a b c", "max_tokens": 2}'


def post(body: bytes = BODY, *fields: bytes, path: bytes = b"/v1/completions") -> bytes:
    head = b"".join(b"%b\r\n" % field for field in (b"host: x", JSON, *fields))
    return b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n%b" % (path, head, len(body), body)


def metaserver(w: World) -> bytes:
    return urlsplit(w.settings.metaserver).path.encode()


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    data = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\ntransfer-encoding: chunked\r\n\r\n" % JSON
    return head + data + b"0\r\n" + trailers + b"\r\n"


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


@contextlib.asynccontextmanager
async def connection(w: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(HOST, w.settings.port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One well-formed answer."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode()
    line, *rest = head.strip().split("\r\n")
    assert re.fullmatch(r"HTTP/1\.1 \d{3} [\w' -]*", line), line
    fields = dict(field.split(": ", 1) for field in rest)
    return int(line.split(" ")[1]), fields, await reader.readexactly(int(fields["content-length"]))


END = b"GET /end HTTP/1.1\r\nconnection: close\r\n\r\n"


async def talk(w: World, *parts: bytes, pause: float = 0.02, end: bool = True) -> list[int]:
    """The statuses of all answers, well-formed each; then 0 where the server ended the connection.

    ``end``: asks for the end after all parts; else there must be none of the client's making.
    """
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, (HOST, w.settings.port))
        with contextlib.suppress(ConnectionError):
            for part in (*parts, END) if end else parts:
                await loop.sock_sendall(client, part)
                await asyncio.sleep(pause if len(parts) > 1 else 0)
        raw, closed = b"", False
        with contextlib.suppress(ConnectionError, asyncio.TimeoutError):
            while data := await asyncio.wait_for(loop.sock_recv(client, 1 << 20), 10 if end else 1):
                raw += data
            closed = True
    made = statuses_of(raw)
    if end and made[-1:] == [END_STATUS]:
        return made[:-1]
    return [*made, 0] if closed or end else made


def statuses_of(raw: bytes) -> list[int]:
    """Fails for anything between or in answers that isn't HTTP."""
    made, at = [], 0
    while at < len(raw):
        found = ANSWER.match(raw, at)
        assert found is not None, raw[at : at + 200]
        status, end = int(found[1]), found.end()
        if b"/end here" in raw[end : end + int(found[2])]:
            status = END_STATUS
        at = end + int(found[2])
        assert at <= len(raw), "an answer was cut"
        made.append(status)
    return made


END_STATUS = 999
ANSWER = re.compile(
    rb"HTTP/1\.1 (\d{3}) [\w' -]*\r\n(?:[\w-]+: [^\r\n]*\r\n)*?content-length: (\d+)\r\n"
    rb"(?:[\w-]+: [^\r\n]*\r\n)*\r\n"
)
LARGE = b"a" * (70 << 10)


CASES: dict[str, tuple[bytes, list[int]]] = {
    "one header": (b"GET /none HTTP/1.1\r\na: " + LARGE + b"\r\n\r\n", [431, 0]),
    "fields": (b"GET /none HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n", [431, 0]),
    "199 fields": (b"GET /none HTTP/1.1\r\n" + b"a: b\r\n" * 199 + b"\r\n", [404]),
    "target": (b"GET /" + LARGE, [414, 0]),
    "whole target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", [414, 0]),
    "method": (b"G" * 9000, [414, 0]),
    "second of two": (MISSING + b"GET /" + LARGE, [404, 414, 0]),
    "after a body": (post() + b"GET / HTTP/1.1\r\na: " + LARGE, [200, 431, 0]),
    "trailers": (chunked(BODY, trailers=b"a: b\r\n" * 20000), [400, 0]),
    "trailer": (chunked(BODY, trailers=b"a: " + LARGE + b"\r\n"), [400, 0]),
    "extension": (chunked(BODY).replace(b"24\r\n", b"24;x=" + LARGE + b"\r\n"), [400, 0]),
    "chunks of a byte": (chunked(*[b" "] * 30000, BODY), [400, 0]),
    "chunked": (chunked(BODY[:7], BODY[7:], trailers=b"authorization: x\r\n"), [200]),
    "zeros, extension": (chunked(BODY).replace(b"24\r\n", b"00000024;a=b\r\n"), [200]),
    "chunked, then others": (chunked(BODY) + MISSING + chunked(BODY), [200, 404, 200]),
    "empty lines": (b"\r\n\r\n" + MISSING, [404]),
    "bare line ends": (b"GET /none HTTP/1.1\nhost: x\n\n", [400, 0]),
    "bare line end": (b"GET /none HTTP/1.1\r\na: b\n\r\n", [400, 0]),
    "NUL": (b"GET /none HTTP/1.1\r\na: \x00", [400, 0]),
    "folded": (b"GET /none HTTP/1.1\r\na: b\r\n c: d\r\n\r\n", [400, 0]),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400, 0]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [505, 0]),
    "HTTP/0.9": (b"GET /none HTTP/0.9\r\n\r\n", [505, 0]),
    "no version": (b"GET /none\r\n\r\n", [400, 0]),
    "HTTP/1.0": (b"GET /none HTTP/1.0\r\n\r\n" + MISSING, [404, 0]),
    "close": (MISSING.replace(b"host", b"connection: close\r\nhost") + MISSING, [404, 0]),
    "absolute": (MISSING.replace(b"/none", b"http://x/none"), [404]),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\n\r\n" + MISSING, [405, 0]),
    "star": (b"OPTIONS * HTTP/1.1\r\n\r\n", [404]),
    "unknown method": (b"FETCH / HTTP/1.1\r\n\r\n", [501, 0]),
    "lower case": (b"get / HTTP/1.1\r\n\r\n", [501, 0]),
    "TE and CL": (post(BODY, b"transfer-encoding: chunked") + MISSING, [400, 0]),
    "two lengths": (post(BODY, b"content-length: 5") + MISSING, [400, 0]),
    "TE in 1.0": (chunked(BODY).replace(b"HTTP/1.1", b"HTTP/1.0") + MISSING, [400, 0]),
    "gzip": (chunked(BODY).replace(b"chunked", b"gzip, chunked") + MISSING, [501, 0]),
    "gzip before chunked": (
        chunked(BODY).replace(b"transfer-encoding", b"transfer-encoding: gzip\r\ntransfer-encoding")
        + MISSING,
        [501, 0],
    ),
    "xchunked": (chunked(BODY).replace(b"chunked", b"xchunked") + MISSING, [501, 0]),
    "chunk size": (chunked(BODY).replace(b"24\r\n", b"+24\r\n") + MISSING, [400, 0]),
    "chunk's bare line end": (chunked(BODY).replace(b"24\r\n", b"24\n") + MISSING, [400, 0]),
    "chunk overflow": (chunked(BODY).replace(b"24\r\n", b"f" * 17 + b"\r\n"), [400, 0]),
    "short chunk": (chunked(BODY).replace(b"24\r\n", b"23\r\n") + MISSING, [400, 0]),
    "body not asked for": (post(path=b"/metrics") + MISSING, [405, 404]),
}


def test_heads_and_framing() -> None:
    """In one piece, in two, and byte by byte at the end."""

    async def case(w: World, name: str, sent: bytes, statuses: list[int]) -> None:
        half, tail = len(sent) // 2, [sent[-20:][i : i + 1] for i in range(20)]
        for parts in ((sent,), (sent[:half], sent[half:]), (sent[:-20], *tail)):
            assert await talk(w, *parts, pause=0.005) == statuses, name

    async def scenario() -> None:
        async with world(deadlines=Deadlines()) as w:
            await asyncio.gather(*(case(w, name, *wanted) for name, wanted in CASES.items()))

    run(scenario)


UPGRADE = (
    b"connection: Upgrade, HTTP2-Settings",
    b"upgrade: h2c",
    b"http2-settings: AAMAAABkAAQAoAAAAAIAAAAA",
)


@pytest.mark.parametrize("fields", [UPGRADE, (b"Connection: upgrade", b"UPGRADE: websocket")])
def test_an_upgrade_is_ignored_and_the_framing_kept(fields: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with world() as w:
            sent = post(BODY, *fields)
            assert await talk(w, sent + HEALTH) == [200, 200]
            head = sent[: -len(BODY)]
            assert await talk(w, head, BODY) == [200]
            # A body that looks like a request is a body.
            assert await talk(w, post(HEALTH, *fields)[: -len(HEALTH)], HEALTH) == [400]
            assert await talk(
                w, b"GET /health HTTP/1.1\r\n" + b"\r\n".join(fields) + b"\r\n\r\n", HEALTH
            ) == [
                200,
                200,
            ]
            assert await talk(w, chunked(BODY).replace(b"host: x", b"\r\n".join(fields)) + HEALTH) == [
                200,
                200,
            ]

    run(scenario)


@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1\r\nconnection: close"])
def test_a_last_answer_arrives_while_the_body_is_still_sent(version: bytes) -> None:
    """A reset caused by later data would discard it."""

    async def scenario() -> None:
        async with world(deadlines=Deadlines()) as w:
            for path, size, status in (
                (b"/v1/completions", 99999999, 413),
                (b"/none", 9999999, 404),
                (b"/health", 9999999, 405),
            ):
                async with connection(w) as (reader, writer):
                    writer.write(
                        b"POST %b %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                        % (path, version, size)
                    )
                    for _ in range(64):
                        writer.write(b"x" * 65536)
                        await writer.drain()
                        await asyncio.sleep(0.001)
                    assert (await answer(reader))[0] == status
                    assert await reader.read() == b"", "and the connection ends"

    run(scenario)


def test_expect_and_early_answers_keep_the_framing() -> None:
    async def scenario() -> None:
        async with world() as w:
            async with connection(w) as (reader, writer):
                writer.write(post(BODY, b"expect: 100-continue")[: -len(BODY)])
                assert await reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(BODY)
                assert (await answer(reader))[0] == 200
            big = post(b"", b"expect: 100-continue").replace(b"length: 0", b"length: 9999999999")
            assert await talk(w, big, end=False) == [413], "refused before it is read"
            assert await talk(w, post(b"x" * (1 << 20), path=metaserver(w)) + HEALTH) == [413, 200]

    run(scenario)


def test_a_refusal_in_the_same_segment_leaves_nothing_to_continue(caplog: pytest.LogCaptureFixture) -> None:
    """The refusal and the end of file are written before the application first asks for the body."""

    async def scenario() -> None:
        async with world() as w:
            expects = b"expect: 100-continue\r\ntransfer-encoding"
            for path in (b"/v1/completions", metaserver(w)):
                sent = chunked(BODY).replace(b"transfer-encoding", expects).replace(b"/v1/completions", path)
                assert await talk(w, sent.replace(b"24\r\n", b"x4\r\n"), end=False) == [400, 0]
            await w.settle()

    run(scenario)
    assert "Traceback" not in caplog.text


def test_a_trailer_is_no_header() -> None:
    async def scenario() -> None:
        async with world() as w:
            sent = chunked(BODY, trailers=b"authorization: Bearer smuggled\r\n")
            assert await talk(w, sent.replace(b"host: x", b"authorization: Bearer mine")) == [200]
            assert w.d.exchanges[0].headers["authorization"] == "Bearer mine"
            assert await talk(w, sent) == [200]
            assert "authorization" not in w.d.exchanges[1].headers

    run(scenario)


def test_a_pipelined_client_that_goes_away_ends_the_first_request() -> None:
    async def silent(_: Exchange) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = silent
            async with connection(w) as (_, writer):
                writer.write(post() + post())
                while not w.d.exchanges:
                    await asyncio.sleep(0.01)
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 2)
            await asyncio.sleep(0.1)
            assert len(w.d.exchanges) == 1, "the second was not begun"

    run(scenario)


@pytest.mark.parametrize("size", [10, 200_000])  # where much comes at once, uvicorn stops reading
@pytest.mark.parametrize("answering", [False, True])
def test_a_client_that_goes_away_ends_its_request(size: int, answering: bool) -> None:
    async def silent(exchange: Exchange) -> None:
        if answering:
            await exchange.start_stream()
            await exchange.word(0)
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = silent
            async with connection(w) as (reader, writer):
                body = {"prompt": "a" * size, "stream": answering}
                head, _, rest = post(json.dumps(body).encode()).partition(b"\r\n\r\n")
                writer.write(head + b"\r\n\r\n")
                await asyncio.sleep(0.1)
                writer.write(rest)
                while not w.d.exchanges:
                    await asyncio.sleep(0.01)
                if answering:
                    await reader.readuntil(b"data: ")
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 2)
            await w.settle()

    run(scenario)


class FakeTransport:
    """The attributes that an answer of uvicorn's needs."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.writes.append(b"".join(pieces))

    def close(self) -> None:
        self.writes.append(b"closed")


def test_a_head_goes_out_with_the_first_piece_of_its_body() -> None:
    def sent(method: str, *steps: bytes) -> list[bytes]:
        transport = FakeTransport()
        cycle = types.SimpleNamespace(scope={"method": method}, transport=transport, response_started=False)
        cork(cycle, transport)  # type: ignore[arg-type]
        for step in steps:
            if step == b"close":
                cycle.transport.close()
                continue
            cycle.response_started |= step == b"head"
            cycle.transport.write(step)
        return transport.writes

    assert sent("POST", b"continue", b"head", b"one", b"two") == [b"continue", b"headone", b"two"]
    assert sent("POST", b"head", b"", b"two") == [b"head", b"two"]
    assert sent("POST", b"head", b"close") == [b"head", b"closed"]
    assert sent("POST", b"close") == [b"closed"]
    assert sent("HEAD", b"head") == [b"head"], "no body comes"

    async def scenario() -> None:
        async with world() as w, connection(w) as (reader, writer):
            writer.write(HEALTH.replace(b"GET", b"HEAD") + HEALTH)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert head.startswith(b"HTTP/1.1 405 ")
            assert (await answer(reader))[0] == 200

    run(scenario)


def test_half_sent_heads_and_bodies_end() -> None:
    deadlines = Deadlines(**{**vars(FAST), "head": 0.5, "request_body": 0.5})

    async def scenario() -> None:
        async with world(deadlines=deadlines) as w:

            async def trickle(first: bytes, rest: bytes) -> list[int]:
                rests = [rest[i : i + 1] for i in range(len(rest))]
                return await talk(w, first, *rests, pause=0.05, end=False)

            made = await asyncio.gather(
                talk(w, end=False),
                trickle(b"GET /health HTTP/1.1\r\n", b"a: bbbbbbbbbbbbbbbbbbbbbbb"),
                trickle(b"", b"\r\n" * 20),
                trickle(HEALTH, b"GET / HTTP/1.1\r\nab: cde"),
                trickle(post()[:-9], b""),
                trickle(post(b" " * 999)[:-900], b" " * 30),
            )
            assert made == [[0], [408, 0], [0], [200, 408, 0], [408], [408]]

    run(scenario)


def test_a_full_house_closes_idle_connections_and_keeps_a_reserve() -> None:
    async def silent(_: Exchange) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with world(limits=ProxyLimits(connections=8)) as w, contextlib.AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(connection(w)) for _ in range(20)]
            assert await talk(w, HEALTH) == [200]
            assert await asyncio.wait_for(idle[0][0].read(), 2) == b"", "the oldest idle one made room"
            w.d.usual = silent
            busy = [await stack.enter_async_context(connection(w)) for _ in range(8)]
            for _, writer in busy:
                writer.write(post())
            while len(w.d.exchanges) < 8:
                await asyncio.sleep(0.01)
            assert await talk(w, HEALTH) == [200, 0]
            assert await talk(w, post(b"{}", path=metaserver(w))) == [404, 0]
            assert await talk(w, post()) == [503, 0]
            assert len(w.d.exchanges) == 8

    run(scenario)


def test_clients_that_do_not_read_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kvoffload.proxy.edge.STALL_SLACK", 0.0)

    async def scenario() -> None:
        async with world(deadlines=Deadlines(**{**vars(FAST), "client_stall": 0.3})) as w:
            async with connection(w) as (reader, writer):
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                with contextlib.suppress(ConnectionError):
                    while not writer.transport.is_closing():
                        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n" * 1000)
                        await asyncio.wait_for(writer.drain(), 5)
            await w.settle()

    run(scenario)


def test_bodies_share_a_budget() -> None:
    async def scenario() -> None:
        async with world(max_held_bytes=1 << 20) as w:
            large = b'{"prompt": "' + b"a " * 320_000 + b'", "max_tokens": 1}'
            async with connection(w) as (_, writer):
                writer.write(post(large)[:-9])
                while not w.app.core.held.used:
                    await asyncio.sleep(0.01)
                async with connection(w) as (reader, second):
                    second.write(post(large))
                    status, fields, _ = await answer(reader)
                    assert (status, fields["retry-after"]) == (503, "1")
                assert await talk(w, post()) == [200], "short ones get through"
            await w.settle()
            assert await talk(w, post(large)) == [200]
            lists = b'{"prompt": [' + b"[]," * 30_000 + b"[]]}"
            assert await talk(w, post(lists)) == [413], "what becomes 20 times as large"
            assert w.app.core.held.used == 0

    run(scenario)


@pytest.mark.parametrize("depth", [DEEPEST + 1, 2000, 200_000])
@pytest.mark.parametrize("shape", [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_json_is_refused(
    depth: int, shape: tuple[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    deep = shape[0] * depth + b"1" + shape[1] * depth

    async def answers_deep(exchange: Exchange) -> None:
        await exchange.rendezvous()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        raw = b'{"cached_tokens":' + deep + b"}"
        exchange.writer.write(head % len(raw) + raw)
        await exchange.writer.drain()

    async def scenario() -> None:
        async with world(admin_token="t") as w:
            assert await talk(w, post(b'{"prompt": "a", "x": ' + deep + b"}")) == [400]
            assert await talk(w, post(deep, path=b"/v1/chat/completions")) == [400]
            raw = b'{"request_id": ' + deep + b"}"
            assert await talk(w, post(deep, path=metaserver(w))) in ([400], [413])
            assert await talk(w, post(raw, b"authorization: Bearer t", path=b"/admin/instances/add")) in (
                [400],
                [413],
            )
            for engine, body in ((w.d, BODY), (w.d, b'{"prompt": ["a", "b"]}'), (w.p, BODY)):
                engine.usual, usual = answers_deep if engine is w.d else prefill_deep, engine.usual
                assert await talk(w, post(body)) == [502]
                engine.usual = usual

    async def prefill_deep(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(deep) + deep)
        await exchange.writer.drain()

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text


def test_api_keys() -> None:
    async def scenario() -> None:
        async with world(api_keys=("one", "two")) as w:
            assert await talk(w, post()) == [401]
            assert await talk(w, post(BODY, b"authorization: Bearer three")) == [401]
            assert await talk(w, post(BODY, b"authorization: Basic one")) == [401]
            assert await talk(w, post(BODY, "authorization: Bearer \xe9".encode("latin-1"))) == [401]
            assert await talk(w, post(BODY, b"authorization: bearer two")) == [200]
            assert await talk(w, b"GET /v1/models HTTP/1.1\r\n\r\n" + HEALTH) == [401, 200]
            assert await talk(w, post(path=b"/tokenize") + HEALTH) == [401, 200]
            assert await talk(w, post(b"{}", path=metaserver(w))) == [404]

    run(scenario)


def test_a_client_that_goes_away_during_writes_is_no_crash(caplog: pytest.LogCaptureFixture) -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        while True:
            await exchange.event(exchange.shell([exchange.choice("x" * 100)]))

    async def scenario() -> None:
        async with world(deadlines=Deadlines()) as w:
            for reads in range(6):
                w.d.behaviours.append(flood)
                async with connection(w) as (reader, writer):
                    writer.write(post(b'{"prompt": "a b c", "stream": true}') + HEALTH)
                    await reader.read(1 + reads * 40_000)
                    for server in w.app.running.copy() if reads % 3 == 0 else ():
                        server._send.__self__.transport.abort()  # type: ignore[attr-defined]
                await w.settle()
            w.d.behaviours.append(decode)
            assert await talk(w, post()) == [200]

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert "Traceback" not in caplog.text
    assert "crash" not in caplog.text


def test_chunks_end_where_they_end() -> None:
    body = b"5;a=b\r\nhello\r\n00A\r\n0123456789\r\n0\r\nx: y\r\n\r\n"
    for step in range(1, len(body)):
        chunks, buffer, taken, ended = Chunks(100), bytearray(), 0, False
        for start in range(0, len(body), step):
            buffer += body[start : start + step]
            size, ended = chunks.take(buffer)
            del buffer[:size]
            taken += size
        assert ended
        assert taken == len(body)
    assert Chunks(100).take(bytearray(body + b"GET")) == (len(body), True)
    for wrong in (
        b"\r\n",
        b" 5\r\n",
        b"5 \r\n",
        b"0x5\r\n",
        b"-1\r\n",
        b"5\n",
        b"1" * 17 + b"\r\n",
        b"1" * 5000,
    ):
        with pytest.raises(ChunkError):
            Chunks(9999).take(bytearray(wrong))


def test_depth_is_counted_over_all_values() -> None:
    assert decode_json(json.dumps({"a": [{}] * 5000}).encode()) == {"a": [{}] * 5000}
    assert decode_json(b"[" * DEEPEST + b"]" * DEEPEST)


class FakeCycle:
    """uvicorn's, as far as :func:`transport_of` looks."""

    def __init__(self, *, closing: bool, started: bool = False) -> None:
        self.transport = self
        self.statuses: list[int] = []
        self._closing = closing
        self._started = started

    def is_closing(self) -> bool:
        return self._closing

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if self._started:
                raise RuntimeError("Unexpected ASGI message")
            self.statuses.append(message["status"])


def test_what_ends_a_request_is_no_crash() -> None:
    """uvicorn prints whatever leaves the application, with a traceback."""

    async def scenario() -> None:
        app = World().app

        async def ends(error: BaseException, cycle: FakeCycle) -> list[int]:
            async def endpoint(*_: Any) -> None:
                raise error

            await app.guarded(endpoint, {}, cycle.send, cycle.send)  # type: ignore[arg-type]
            return cycle.statuses

        shutdown = asyncio.CancelledError()
        assert await ends(shutdown, FakeCycle(closing=False)) == [503]
        assert await ends(shutdown, FakeCycle(closing=False, started=True)) == []
        for error in (RuntimeError("the handler is closed"), ConnectionResetError(), BrokenPipeError()):
            assert await ends(error, FakeCycle(closing=True)) == []
            with pytest.raises(type(error)):
                await ends(error, FakeCycle(closing=False))
        # also while a refusal is being answered
        refusal = HttpFailure.of(400, "no")
        assert await ends(refusal, FakeCycle(closing=False)) == [400]
        assert await ends(refusal, FakeCycle(closing=True, started=True)) == []
        with pytest.raises(RuntimeError):
            await ends(refusal, FakeCycle(closing=False, started=True))

    run(scenario)
