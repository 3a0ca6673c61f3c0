"""Faults: every request ends with an error or the right text, and nothing is left behind (see ``world``)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from tests.proxy.proxy_world import FAST, Exchange, events, text_of, words, world
from vllm_kvoffload.proxy.settings import Deadlines


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


async def refuse(exchange: Exchange) -> None:
    await exchange.respond(400, {"error": {"message": "too long", "code": 400}})


async def overloaded(exchange: Exchange) -> None:
    await exchange.respond(503, {"error": {"message": "busy", "code": 503}})


async def reset(exchange: Exchange) -> None:
    exchange.abort()


async def silent(_: Exchange) -> None:
    await asyncio.Event().wait()


async def breaks_mid_stream(exchange: Exchange) -> None:
    await exchange.start_stream()
    await exchange.rendezvous()
    await exchange.word(0)
    await exchange.word(1)
    await asyncio.sleep(0.1)
    exchange.abort()


async def breaks_before_output(exchange: Exchange) -> None:
    if exchange.body.get("stream"):
        await exchange.start_stream()
    await exchange.rendezvous()
    exchange.abort()


async def error_event_first(exchange: Exchange) -> None:
    await exchange.start_stream()
    await exchange.event({"error": {"message": "KV load failed", "type": "InternalServerError", "code": 500}})
    await exchange.raw(b"data: [DONE]\n\n")
    exchange.writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("behaviour", "status", "text"), [(refuse, 400, "too long"), (overloaded, 503, "busy")]
)
def test_decode_errors_pass_through(stream: bool, behaviour: Any, status: int, text: str) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(behaviour)
            answer = await w.complete(stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, text)
            assert not w.p.exchanges
            assert (await w.complete(prompt=["a", "b"], stream=stream)).status_code == 200
            w.d.behaviours.append(behaviour)
            assert (await w.complete(prompt=["a", "b"], stream=stream)).status_code == status, "of one child"

    run(scenario())


def test_error_event_before_output_becomes_a_status() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(error_event_first)
            answer = await w.complete(stream=True)
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "KV load failed"

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behaviour", [reset, breaks_before_output])
def test_decode_lost_before_output_is_retried_elsewhere(stream: bool, behaviour: Any) -> None:
    async def scenario() -> None:
        async with world(decoders=2) as w:
            for engine in w.decoders:
                engine.behaviours.append(behaviour)
                while engine.behaviours:
                    answer = await w.complete(stream=stream, max_tokens=3)
                    assert answer.status_code == 200, answer.text
                    text = text_of(events(answer.text)) if stream else answer.json()["choices"][0]["text"]
                    assert text == words(3, 3)
            ids = [e.external_id for engine in w.decoders for e in engine.exchanges]
            assert len(set(ids)) == len(ids), "a new rendezvous each time"

    run(scenario())


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("behaviour", [reset, breaks_before_output])
def test_a_request_that_kills_engines_is_not_passed_around(behaviour: Any, warm: bool) -> None:
    """Also on connections that were used before, which might have closed by themselves."""

    async def scenario() -> None:
        async with world(decoders=4) as w:
            if warm:
                await asyncio.gather(*(w.complete(max_tokens=1) for _ in range(8)))
            before = sum(len(engine.exchanges) for engine in w.decoders)
            for engine in w.decoders:
                engine.usual = behaviour
            answer = await w.complete(stream=True)
            assert answer.status_code == 502
            assert sum(len(engine.exchanges) for engine in w.decoders) == before + 2

    run(scenario())


@pytest.mark.parametrize("prompts", ["a b c", ["a b c", "a b c"]])
def test_a_break_mid_stream_repeats_nothing(prompts: Any) -> None:
    async def scenario() -> None:
        async with world(decoders=2) as w:
            for engine in w.decoders:
                engine.usual = breaks_mid_stream
            found = await w.stream(prompt=prompts, max_tokens=5)
            assert text_of(found) == words(3, 2)
            assert found[-1]["error"]["code"] == 502
            assert sum(len(engine.exchanges) for engine in w.decoders) == (
                1 if isinstance(prompts, str) else 2
            )

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_errors_reach_the_client_and_end_decode(stream: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.p.behaviours.append(refuse)
            posted: list[int] = []

            async def posts(exchange: Exchange) -> None:
                posted.append(await exchange.post())
                await silent(exchange)

            w.d.behaviours.append(posts)
            answer = await w.complete(stream=stream)
            assert (answer.status_code, answer.json()["error"]["message"]) == (400, "too long")
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 2)
            assert posted in ([], [502]), "the post is answered, if decode still listens"

    run(scenario())


def test_a_post_is_answered_when_its_prefill_ended() -> None:
    async def scenario() -> None:
        async with world() as w:
            gate = asyncio.Event()
            posts: list[asyncio.Task[int]] = []

            async def gated(exchange: Exchange) -> None:
                await gate.wait()
                await exchange.engine.usual(exchange)

            async def twice(exchange: Exchange) -> None:
                posts.append(asyncio.create_task(exchange.post()))
                posts.append(asyncio.create_task(exchange.post()))
                await asyncio.gather(*posts)
                await exchange.start_stream()
                await exchange.end_stream(0)

            w.p.behaviours.append(gated)
            w.d.behaviours.append(twice)
            request = asyncio.create_task(w.stream())
            while not w.p.exchanges:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert not any(post.done() for post in posts)
            gate.set()
            await request
            assert [post.result() for post in posts] == [200, 200]
            assert len(w.p.exchanges) == 1

            w.p.behaviours.append(silent)
            w.d.behaviours.append(twice)
            posts.clear()
            leaving = asyncio.create_task(w.complete(stream=True))
            while len(w.p.exchanges) < 2:
                await asyncio.sleep(0.01)
            leaving.cancel()
            await w.settle()

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_prefill_lost_leads_to_a_new_rendezvous(stream: bool) -> None:
    async def scenario() -> None:
        async with world(prefillers=2) as w:
            for engine in w.prefillers:
                engine.behaviours.append(reset)
            answer = await w.complete(stream=stream, max_tokens=2)
            tried = sum(len(engine.exchanges) for engine in w.prefillers)
            assert (answer.status_code, tried) == (502, 2), "both may have worked on it"
            answer = await w.complete(stream=stream, max_tokens=2)
            assert answer.status_code == 200, answer.text
            w.prefillers[0].behaviours.append(reset)
            w.prefillers[1].behaviours.clear()
            answers = [await w.complete(stream=stream, max_tokens=2) for _ in range(2)]
            assert [a.status_code for a in answers] == [200, 200]

    run(scenario())


def test_dead_prefillers_are_passed_over_within_one_rendezvous() -> None:
    async def scenario() -> None:
        async with world(prefillers=3) as w:
            for engine in w.prefillers[:2]:
                await engine.die()
            answers = [await w.complete(max_tokens=2) for _ in range(4)]
            assert [a.json()["choices"][0]["text"] for a in answers] == [words(3, 2)] * 4
            assert len(w.d.exchanges) == 4
            await w.prefillers[2].die()
            assert (await w.complete(max_tokens=2)).status_code == 503
            asked = len(w.d.exchanges)
            for stream in (False, True):
                answer = await w.complete(max_tokens=2, stream=stream)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
                assert "no prefill engine" in answer.json()["error"]["message"]
            assert len(w.d.exchanges) == asked, "decode would wait in vain"
            await w.prefillers[0].start()
            assert (await w.complete(max_tokens=2)).status_code == 200, "it accepts connections again"

    run(scenario())


def test_instance_death_and_recovery() -> None:
    async def scenario() -> None:
        async with world(probe_interval=0.1) as w:
            assert (await w.complete()).status_code == 200
            await w.d.die()
            for _ in range(60):
                if (await w.client.get("/health")).status_code == 503:
                    break
                await asyncio.sleep(0.05)
            answer = await w.complete()
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (await w.client.get("/v1/models")).status_code == 503
            await w.d.start()
            for _ in range(100):
                if (await w.client.get("/health")).status_code == 200:
                    break
                await asyncio.sleep(0.05)
            assert (await w.complete(max_tokens=2)).json()["choices"][0]["text"] == words(3, 2)

    run(scenario())


async def leave(w: Any, when: Any, **body: Any) -> None:
    """A client that closes its connection as soon as ``when`` says so."""
    request = asyncio.create_task(w.complete(**body))
    for _ in range(200):
        if when():
            break
        await asyncio.sleep(0.01)
    assert when()
    request.cancel()
    with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
        await request


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", ["a b c", ["a b c", "a b c"]])
def test_client_leaves_before_the_rendezvous(stream: bool, prompts: Any) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.usual = silent
            await leave(w, lambda: w.d.exchanges, stream=stream, prompt=prompts)
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 2)
            assert not w.p.exchanges

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_client_leaves_during_prefill(stream: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.p.usual = silent
            await leave(w, lambda: w.p.exchanges, stream=stream)
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 2)
            await asyncio.wait_for(w.p.exchanges[0].gone.wait(), 2)

    run(scenario())


def test_client_leaves_mid_stream() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        for index in range(10**6):
            await exchange.word(index)
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = endless
            for prompt in ("a b c", ["a b c", "a b c"]):
                body = {"prompt": prompt, "stream": True}
                async with w.client.stream("POST", "/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        break
                await asyncio.wait_for(w.d.exchanges[-1].gone.wait(), 2)
                await w.settle()

    run(scenario())


def test_client_that_stops_reading_is_cut_off() -> None:
    async def flood(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        while True:
            await exchange.event(exchange.shell([exchange.choice("x" * 50000)]))

    async def scenario() -> None:
        async with world() as w:
            w.d.usual = flood
            _, writer = await asyncio.open_connection("127.0.0.1", w.settings.port, limit=1024)
            body = b'{"prompt": "a b c", "stream": true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
                b"host: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            for _ in range(100):
                if w.d.exchanges:
                    break
                await asyncio.sleep(0.02)
            await asyncio.wait_for(w.d.exchanges[0].gone.wait(), 8)
            writer.transport.abort()

    run(scenario())


@pytest.mark.parametrize(
    ("role", "deadlines", "status"),
    [
        ("decode", {"first_output": 0.4, "answer": 0.4}, 504),
        ("prefill", {"prefill": 0.4}, 504),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_silent_engines_meet_deadlines(role: str, deadlines: Any, status: int, stream: bool) -> None:
    async def scenario() -> None:
        async with world(deadlines=Deadlines(**{**vars(FAST), **deadlines})) as w:
            engine = w.d if role == "decode" else w.p
            engine.usual = silent
            answer = await asyncio.wait_for(w.complete(stream=stream), 3)
            assert answer.status_code == status

    run(scenario())


def test_a_stream_that_stalls_ends() -> None:
    async def stalls(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        await exchange.word(0)
        await silent(exchange)

    async def scenario() -> None:
        async with world(deadlines=Deadlines(**{**vars(FAST), "idle": 0.4})) as w:
            w.d.usual = stalls
            found = await asyncio.wait_for(w.stream(), 3)
            assert text_of(found) == words(3, 1)
            assert found[-1]["error"]["code"] == 504

    run(scenario())


def test_slow_sub_requests_hold_up_no_other() -> None:
    async def slow(exchange: Exchange) -> None:
        await gate.wait()
        await exchange.engine.usual(exchange)

    gate = asyncio.Event()

    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours += [slow] * 3
            many = asyncio.create_task(w.complete(prompt=["a"] * 6, max_tokens=1))
            for _ in range(100):
                if len(w.p.exchanges) == 3:
                    break
                await asyncio.sleep(0.02)
            assert len(w.p.exchanges) == 3, "three children are prefilled while their siblings wait"
            gate.set()
            assert (await many).status_code == 200

    run(scenario())


def test_drain() -> None:
    async def scenario() -> None:
        async with world() as w:
            gate = asyncio.Event()

            async def gated(exchange: Exchange) -> None:
                await gate.wait()
                await w_decode(exchange)

            w_decode = w.d.usual
            w.d.behaviours.append(gated)
            under_way = asyncio.create_task(w.complete(max_tokens=2))
            while not w.d.exchanges:
                await asyncio.sleep(0.01)
            w.app.drain()
            assert (await w.complete()).status_code == 503
            assert (await w.client.get("/health")).status_code == 503
            assert not w.app.idle
            gate.set()
            assert (await under_way).json()["choices"][0]["text"] == words(3, 2), "its rendezvous still works"
            await w.settle()
            assert w.app.idle

    run(scenario())


# connections that several requests use one after another


async def prefill_fails_late(exchange: Exchange) -> None:
    """Decode has its KV, and all of its answer, long before."""
    exchange.engine.world.kv.setdefault(exchange.external_id, asyncio.Event()).set()
    await asyncio.sleep(0.3)
    await exchange.respond(500, {"error": {"message": "late"}})


async def asks_and_answers(exchange: Exchange) -> None:
    """Doesn't wait for its post's answer."""
    exchange.engine.world.kv.setdefault(exchange.external_id, asyncio.Event())
    posting = asyncio.create_task(exchange.post())
    await exchange.engine.world.kv[exchange.external_id].wait()
    await exchange.respond(200, exchange.shell([exchange.choice(" x", "length")]))
    await asyncio.wait([posting], timeout=0)


async def slow_words(exchange: Exchange) -> None:
    await exchange.start_stream()
    for index in range(8):
        await exchange.word(index, "length" if index == 7 else None)
        await asyncio.sleep(0.1)
    await exchange.end_stream(8)


def test_a_late_prefill_failure_does_not_reach_the_next_request() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours, w.p.behaviours = [asks_and_answers, slow_words], [prefill_fails_late]
            assert (await w.complete()).status_code == 200
            assert text_of(await w.stream()) == words(3, 8)
            assert len({e.writer for e in w.d.exchanges}) == 1, "both on one connection"

    run(scenario())


def test_a_dispatch_that_is_repeated_does_not_end_the_next_request() -> None:
    """Its connection is another request's by the time it is dispatched again."""

    async def fails(exchange: Exchange) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(exchange.post(), 1)
        await exchange.notice("prefill")
        await exchange.respond(500, {"error": {"message": "Internal server error", "code": 500}})
        failed.set()

    async def scenario() -> None:
        nonlocal failed
        failed = asyncio.Event()
        async with world() as w:
            w.d.behaviours = [fails, slow_words]
            first = asyncio.create_task(w.complete(max_tokens=2))
            await failed.wait()
            while w.app.core.client.connections[1] < 1:
                await asyncio.sleep(0)
            assert text_of(await w.stream()) == words(3, 8)
            assert (await first).status_code == 200

    failed: asyncio.Event
    run(scenario())
