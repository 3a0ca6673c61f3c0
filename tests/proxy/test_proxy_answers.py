"""Answers too large or never given: whose fault they are, and how many are held; options and their docs."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.proxy.proxy_world import FAST, HOST, Exchange, FakeEngine, World, decode, world
from vllm_kvoffload.cli.proxy import parser
from vllm_kvoffload.proxy import core
from vllm_kvoffload.proxy.balance import FAILURES_TO_EJECT
from vllm_kvoffload.proxy.settings import Deadlines

MB = 1 << 20
DOCS = Path(__file__).parents[2] / "docs"


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


async def huge(exchange: Exchange) -> None:
    await exchange.respond(200, {"tokens": [1] * MB})


def test_an_answer_too_large_is_the_requests_fault_not_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a few requests for long answers would take every engine out of service."""
    monkeypatch.setattr(core, "CONTROL_LIMIT", MB)

    async def scenario() -> None:
        async with world(decoders=2) as w:
            object.__setattr__(w.settings, "max_answer_bytes", MB)
            for engine in w.decoders:
                engine.tokens = engine.usual = huge
            for _ in range(2 * FAILURES_TO_EJECT):
                assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 502
                assert (await w.complete()).status_code == 502
            assert all((await w.client.get("/health")).json()["decode_instances"].values())
            for engine in w.decoders:
                engine.tokens, engine.usual = None, decode
            assert (await w.complete()).status_code == 200
            await w.settle()

    run(scenario())


async def never(_: Exchange) -> None:
    await asyncio.Event().wait()


async def drops(exchange: Exchange) -> None:
    exchange.abort()


@pytest.mark.parametrize("behaviour", [never, drops])
def test_a_forwarded_request_that_no_engine_answers_ejects_none(behaviour: Any) -> None:
    """Text that takes long to tokenize is asked of two engines at most, and takes none out of service."""

    async def scenario() -> None:
        deadlines = dataclasses.replace(FAST, control=0.2)
        async with world(decoders=3, deadlines=deadlines) as w:
            asked: list[FakeEngine] = []

            async def tokens(exchange: Exchange) -> None:
                asked.append(exchange.engine)
                await behaviour(exchange)

            for engine in w.decoders:
                engine.tokens = tokens
            for _ in range(2 * FAILURES_TO_EJECT):
                asked.clear()
                assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 502
                assert len(set(map(id, asked))) == 2
            health = (await w.client.get("/health")).json()
            assert all(health["decode_instances"].values())
            # One engine alone: another answers the same request.
            for engine in w.decoders[1:]:
                engine.tokens = None
            for _ in range(FAILURES_TO_EJECT):
                assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
            health = (await w.client.get("/health")).json()
            assert list(health["decode_instances"].values()) == [False, True, True]
            await w.settle()

    run(scenario())


LONG = 16 * MB  # more than the kernel buffers for a client that doesn't read


async def long(exchange: Exchange) -> None:
    await exchange.respond(200, {"text": "a" * LONG})


async def unread(w: World) -> socket.socket:
    """Asks for a long answer without reading it; returns once the proxy holds it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    held, loop = w.app.core.answers.used, asyncio.get_running_loop()
    await loop.sock_connect(client, (HOST, w.settings.port))
    head = (
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n"
    )
    await loop.sock_sendall(client, head + b'{"prompt":"a"}')
    for _ in range(500):
        if w.app.core.answers.used > held:
            return client
        await asyncio.sleep(0.02)
    raise AssertionError("no answer is held")


def test_forwarded_answers_are_held_within_a_budget() -> None:
    """A short request for a long answer that its client doesn't read is refused beyond the budget."""

    async def scenario() -> None:
        async with world(max_held_bytes=6 * LONG, deadlines=dataclasses.replace(FAST, control=10.0)) as w:
            w.d.tokens = long
            with await unread(w):
                refused = await w.client.post("/tokenize", json={"prompt": "a"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
                assert (await w.complete()).status_code == 200, "completions have a budget of their own"
            for _ in range(500):
                if not w.app.core.answers.used:
                    break
                await asyncio.sleep(0.02)
            assert (await w.client.post("/tokenize", json={"prompt": "a"})).status_code == 200
            await w.settle()
            assert not w.app.core.answers.used

    run(scenario())


def test_every_option_is_documented() -> None:
    proxy, hardening = ((DOCS / name).read_text() for name in ("proxy.md", "hardening.md"))
    flags = set(re.findall(r"--[a-z-]+[a-z]", parser().format_help())) - {"--help"}
    assert flags <= set(re.findall(r"--[a-z-]+[a-z]", proxy + hardening))
    for name, seconds in vars(Deadlines()).items():
        assert re.search(rf"\| `--{name.replace('_', '-')}-timeout` \| {seconds:g} \|", proxy), name
