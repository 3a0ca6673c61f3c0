"""Engines whose answers are HTTP, but not those of vLLM: early, doubled, with odd statuses, with secrets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.proxy.proxy_world import Exchange, decode, words, world

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 7\r\n\r\n"


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def writes(*pieces: bytes, pause: float = 0.0) -> Any:
    async def behaviour(exchange: Exchange) -> None:
        for piece in pieces:
            exchange.writer.write(piece)
            await exchange.writer.drain()
            await asyncio.sleep(pause)

    return behaviour


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 200])
def test_an_answer_before_the_request_was_read(status: int, stream: bool) -> None:
    """The engine reads no more than the head, and keeps the connection."""
    answer = OK.replace(b"200", b"%d" % status) + b'{"a":1}'

    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await gate.wait()
        writer.close()

    async def scenario() -> None:
        nonlocal gate
        gate = asyncio.Event()
        async with world() as w:
            await w.d.die()
            server = await asyncio.start_server(early, "127.0.0.1", w.d.port)
            for _ in range(2):
                got = await asyncio.wait_for(w.complete(stream=stream, prompt="a" * (16 << 20)), 10)
                assert (got.status_code, got.content) == (status, b'{"a":1}')
            assert w.app.core.client.connections == (0, 0), "a connection with half a request on it"
            gate.set()
            server.close()

    gate: asyncio.Event
    run(scenario())


@pytest.mark.parametrize("second", [b"junk", OK + b'{"b":2}', OK.replace(b"200", b"500") + b'{"b":2}'])
@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_what_follows_an_answer_is_no_answer(second: bytes, pause: float) -> None:
    async def scenario() -> None:
        async with world() as w:
            whole = [OK + b'{"a":1}', second]
            w.d.usual = writes(*(whole if pause else [b"".join(whole)]), pause=pause)
            for _ in range(3):
                got = await asyncio.wait_for(w.complete(), 3)
                assert (got.status_code, got.content) == (200, b'{"a":1}')
                await asyncio.sleep(2 * pause)
            w.d.usual = decode
            assert (await w.complete(max_tokens=2)).json()["choices"][0]["text"] == words(3, 2)

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [201, 204, 302, 304, 600, 999])
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_statuses_that_are_no_answer(role: str, status: int, stream: bool) -> None:
    odd = writes(OK.replace(b"200", b"%d" % status) + (b"" if status in (204, 304) else b'{"a":1}'))

    async def scenario() -> None:
        async with world() as w:
            (w.d if role == "decode" else w.p).usual = odd
            got = await asyncio.wait_for(w.complete(stream=stream), 5)
            assert (got.status_code, got.json()["error"]["type"]) == (502, "UpstreamError")
            assert str(status) in got.json()["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("status", [204, 302, 999])
def test_models_of_an_odd_engine(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with world() as w:

            async def odd(*_: Any, **__: Any) -> tuple[int, bytes, bytes]:
                return status, b"x", b""

            monkeypatch.setattr(w.app.core, "control", odd)
            assert (await w.client.get("/v1/models")).status_code == 502

    run(scenario())


SECRET = "5ec2e7" * 8


@pytest.mark.parametrize(
    ("role", "stream"),
    [
        *((role, stream) for role in ("decode", "prefill", "notice") for stream in (False, True)),
        ("event", True),
    ],
)
def test_secrets_of_a_request_do_not_come_back(
    role: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's validation quotes the whole body in its answer, in some versions."""

    async def quotes(exchange: Exchange) -> None:
        error = {"error": {"message": f"1 validation error: {exchange.body}\nINJECTED", "code": 400}}
        if role == "decode":
            await exchange.respond(400, error)
        elif role == "event":
            await exchange.start_stream()
            await exchange.event(error)
            await exchange.end_stream(0)
        elif role == "notice" and exchange.engine is exchange.engine.world.d:
            await exchange.post(remote_secret=SECRET)
            await exchange.notice("aborted", f"{exchange.body} {SECRET}\nINJECTED")
            await exchange.respond(500, {"error": {"message": "Internal server error"}})
        elif exchange.engine is exchange.engine.world.d:
            await exchange.rendezvous(remote_secret=SECRET)
        else:
            await exchange.respond(400, error)

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = quotes
            if role == "prefill":
                w.p.usual = quotes
            for prompt in ("a b c", ["a", "b"]):
                got = await w.complete(stream=stream, prompt=prompt)
                assert got.status_code >= 400
                for text in (got.text, caplog.text):
                    assert w.settings.metaserver_token not in text
                    assert SECRET not in text
            assert "\nINJECTED" not in caplog.text

    run(scenario())


@pytest.mark.parametrize(
    "written", ['"kv_transfer_params":{', '"kv_transfer_params": {', '"kv_transfer_params" :\n[']
)
def test_the_engines_own_parameters_are_left_out(written: str) -> None:
    end = "}" if written.endswith("{") else "]"
    body = f'{{"id": "x", "choices": [], {written} {end}}}'.encode()

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = writes(OK.replace(b"7", b"%d" % len(body), 1) + body)
            assert (await w.complete()).json() == {"id": "x", "choices": []}

    run(scenario())
