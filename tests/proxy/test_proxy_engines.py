"""Engines that freeze, mismatch, or answer without limit; loops that continue after any error."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from tests.proxy.proxy_world import FAST, Exchange, World, decode, events, text_of, words, world
from vllm_kvoffload.proxy import fanout, sse
from vllm_kvoffload.proxy.asgi import Guard
from vllm_kvoffload.proxy.budget import ByteBudget, Window
from vllm_kvoffload.proxy.calls import SubRequest, sub_request_of
from vllm_kvoffload.proxy.errors import UpstreamError
from vllm_kvoffload.proxy.health import Prober
from vllm_kvoffload.proxy.http_client import Client
from vllm_kvoffload.proxy.settings import PROBE_JITTER, Address, Deadlines, ProxySettings

PROBED = {
    "probe_interval": 0.2,
    "deadlines": Deadlines(**{**vars(FAST), "probe": 0.6, "first_output": 20, "answer": 20, "prefill": 20}),
}
CHAT = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "a b c"}]}


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 40))


def text(answer: Any, stream: bool) -> str:
    assert answer.status_code == 200, answer.text
    if stream:
        return text_of(events(answer.text))
    return "".join(c.get("text") or c["message"]["content"] for c in answer.json()["choices"])


async def until(true: Any) -> None:
    for _ in range(400):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


def role(exchange: Exchange) -> dict[str, Any]:
    return exchange.shell(
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    )


# frozen


def test_a_frozen_engine_is_found_within_the_lease_of_a_transfer() -> None:
    """By the defaults, between the last good probe and the second that failed; the lease is 15 s."""
    settings = ProxySettings("h", 1, Address("h", 1), (), ())
    longest = PROBE_JITTER * settings.probe_interval + 2 * settings.deadlines.probe + settings.probe_again
    assert longest <= 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_requests_of_a_frozen_engine_go_elsewhere(which: str, stream: bool) -> None:
    async def scenario() -> None:
        async with world(prefillers=2, decoders=2, **PROBED) as w:
            engines = w.prefillers if which == "prefill" else w.decoders
            first = w.app.core.pools[which == "decode"].instances[engines[0].address]
            await until(lambda: not first.health.failed_probes)
            engines[0].frozen = True
            began = time.monotonic()
            work = [w.complete(max_tokens=3, stream=stream, **more) for more in ({}, {}, CHAT, {"n": 4})]
            answers = await asyncio.gather(*work)
            assert [text(a, stream) for a in answers[:3]] == [words(3, 3)] * 3
            assert answers[3].status_code == 200
            took = time.monotonic() - began
            assert 0.5 < took < 10, "found by probes, not by a deadline"
            before = len(engines[1].exchanges)
            assert text(await w.complete(max_tokens=3, stream=stream), stream) == words(3, 3)
            assert len(engines[1].exchanges) == before + 1
            engines[0].frozen = False  # SIGCONT: requests from before come to nothing
            await until(lambda: not first.health.failed_probes)
            for _ in range(4):
                assert text(await w.complete(max_tokens=3, stream=stream), stream) == words(3, 3)

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_without_another_engine_a_frozen_one_is_an_error_at_once(stream: bool) -> None:
    async def scenario() -> None:
        async with world(**PROBED) as w:
            prefill = w.app.core.prefillers.instances[w.p.address]
            await until(lambda: not prefill.health.failed_probes)
            w.p.frozen = True
            answer = await asyncio.wait_for(w.complete(stream=stream), 8)
            assert answer.status_code in (502, 503)
            asked = len(w.d.exchanges)
            assert (await w.complete(stream=stream)).status_code == 503
            assert len(w.d.exchanges) == asked, "decode isn't asked while no prefill engine is there"

    run(scenario())


def test_a_stream_of_a_frozen_engine_ends_with_an_error() -> None:
    async def freezes(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        await exchange.word(0)
        exchange.engine.frozen = True
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with world(
            decoders=2, **{**PROBED, "deadlines": Deadlines(**{**vars(PROBED["deadlines"]), "idle": 20})}
        ) as w:
            for engine in w.decoders:
                engine.usual = freezes
            found = await asyncio.wait_for(w.stream(max_tokens=5), 8)
            assert text_of(found) == words(3, 1)
            assert "is down" in found[-1]["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("order", ["frozen first", "dying first"])
def test_a_frozen_engine_and_then_a_dying_one(order: str) -> None:
    async def dies(exchange: Exchange) -> None:
        if exchange.engine.behaviours is not None:
            exchange.abort()

    async def freezes(exchange: Exchange) -> None:
        exchange.engine.frozen = True
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with world(prefillers=3, **PROBED) as w:
            faults = [freezes, dies] if order == "frozen first" else [dies, freezes]

            async def faulty(exchange: Exchange) -> None:
                await (faults.pop(0) if faults else usual)(exchange)

            usual = w.p.usual
            for engine in w.prefillers:
                engine.usual = faulty
            assert text(await w.complete(max_tokens=3), stream=False) == words(3, 3)
            assert not faults

    run(scenario())


def test_an_engine_that_works_is_not_taken_for_frozen() -> None:
    """Its /health answers too late or not at all, but tokens come."""

    async def slowly(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        exchange.engine.frozen = True  # for requests from now on
        for index in range(60):
            await exchange.word(index, "length" if index == 59 else None)
            await asyncio.sleep(0.05)
        exchange.engine.frozen = False
        await exchange.end_stream(60)

    async def scenario() -> None:
        deadlines = Deadlines(**{**vars(PROBED["deadlines"]), "control": 0.4})
        async with world(**{**PROBED, "deadlines": deadlines}) as w:
            w.d.behaviours.append(slowly)
            assert text_of(await w.stream(max_tokens=60)) == words(3, 60)

    run(scenario())


def test_a_slow_engine_delays_no_others_probe() -> None:
    async def scenario() -> None:
        deadlines = Deadlines(**{**vars(FAST), "probe": 5})
        async with world(prefillers=2, decoders=1, probe_interval=0.1, deadlines=deadlines) as w:
            await asyncio.sleep(0.3)
            w.p.frozen = True
            await asyncio.sleep(0.2)
            await w.prefillers[1].die()
            other = w.app.core.prefillers.instances[w.prefillers[1].address]
            await until(lambda: other.health.down)
            assert not w.app.core.prefillers.instances[w.p.address].health.down
            w.p.frozen = False

    run(scenario())


# loops


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "☃", "a\0b", "no-such-host.invalid"])
def test_hosts_that_can_not_be_resolved(host: str) -> None:
    """They are refused where they are given; a resolver that meets one all the same ends no loop."""

    async def scenario() -> None:
        async with world(probe_interval=0.1, admin_token="t", **{"deadlines": PROBED["deadlines"]}) as w:
            body = {"role": "prefill", "host": host, "port": 1}
            auth = {"authorization": "Bearer t"}
            added = await w.client.post("/admin/instances/add", json=body, headers=auth)
            assert added.status_code == (200 if "invalid" in host else 400)
            address = Address(host, 1)
            instance = w.app.core.prefillers.add(address)
            with pytest.raises(UpstreamError):
                await w.app.core.client.request(address, "GET", "/", first=1, idle=1)
            await until(lambda: instance.health.failed_probes >= 3)
            await w.d.die()
            await until(lambda: w.app.core.decoders.instances[w.d.address].health.down)
            w.app.core.prefillers.remove(address)
            await w.d.start()
            await until(lambda: not w.app.core.decoders.instances[w.d.address].health.down)

    run(scenario())


def test_loops_go_on_after_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Prober.probe

    async def sometimes(self: Prober, instance: Any) -> bool:
        if instance.role == "prefill":
            raise RuntimeError("a probe that can't be made")
        return await broken(self, instance)

    monkeypatch.setattr(Prober, "probe", sometimes)

    async def scenario() -> None:
        async with world(probe_interval=0.05) as w:
            ticks: list[float] = []
            core = w.app.core
            core.client.on_tick(lambda _: 1 // 0)
            core.client.on_tick(ticks.append)
            await until(lambda: len(ticks) >= 3 and core.metrics.loop_errors._value.get() >= 3)
            assert core.client.tick_errors >= 3
            assert (await w.complete(max_tokens=1)).status_code == 200

    run(scenario())


# notices and layouts


def fails_receiving(failure: str, *, late: bool, silent: bool = False, **more: Any) -> Any:
    """A decode engine that gets a prefill, but not its KV. vLLM hides the reason."""

    async def behaviour(exchange: Exchange) -> None:
        hidden = {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}
        if exchange.body.get("stream"):
            await exchange.start_stream()
        await exchange.rendezvous(remote_layout="d0")

        async def tell() -> None:
            if not silent:
                await asyncio.sleep(0.2 if late else 0)
                await exchange.notice(failure, f"because of {failure}", **more)

        telling = asyncio.create_task(tell())
        if not late:
            await telling
        if exchange.body.get("stream"):
            if exchange.chat:
                await exchange.event(role(exchange))
                await asyncio.sleep(0.02)
            await exchange.event(hidden)
            await exchange.raw(b"data: [DONE]\n\n")
            exchange.writer.write(b"0\r\n\r\n")
        else:
            await exchange.respond(500, hidden)
        await telling

    return behaviour


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_gets_the_reason_of_a_failed_transfer(stream: bool, chat: bool, late: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.usual = fails_receiving("aborted", late=late)
            answer = await w.complete(stream=stream, **(CHAT if chat else {}))
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (502, "KVTransferError")
            assert "because of aborted" in error["message"]
            w.d.usual = fails_receiving("read", late=False, silent=True)
            answer = await w.complete(stream=stream, **(CHAT if chat else {}))
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, "Internal server error")

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "dispatches"),
    [("prefill", 2), ("read", 2), ("deadline", 2), ("rendezvous", 2), ("aborted", 1), ("?", 1)],
)
def test_which_failed_transfers_are_tried_again(failure: str, dispatches: int, stream: bool) -> None:
    async def scenario() -> None:
        async with world(prefillers=2) as w:
            w.d.usual = fails_receiving(failure, late=False)
            answer = await w.complete(stream=stream, **CHAT)
            assert (answer.status_code, len(w.d.exchanges)) == (502, dispatches)
            assert f"because of {failure}" in answer.json()["error"]["message"]
            assert {len(p.exchanges) for p in w.prefillers} == ({1} if dispatches == 2 else {0, 1})
            w.d.behaviours = [fails_receiving(failure, late=False)]
            w.d.usual = decode
            answer = await w.complete(stream=stream, max_tokens=3)
            assert answer.status_code == (200 if dispatches == 2 else 502)
            page = w.app.core.metrics.page().decode()
            name = failure if failure != "?" else "other"
            assert f'receive_failures_total{{failure="{name}"}} {dispatches + 1}.0' in page

    run(scenario())


def layouts(decoders: dict[str, str], prefillers: dict[str, str], *, named: bool = True) -> Any:
    """Decode engines that refuse a prefill engine of another layout. By port."""

    async def behaviour(exchange: Exchange) -> None:
        layout = decoders[str(exchange.engine.port)]
        if exchange.body.get("stream"):
            await exchange.start_stream()
        changes = {"remote_layout": layout} if named else {}
        await exchange.post(**changes)
        (other,) = [
            prefillers[str(p.port)]
            for p in exchange.engine.world.prefillers
            if any(e.headers["x-request-id"] == exchange.headers["x-request-id"] for e in p.exchanges)
        ]
        if other == layout:
            await decode_after(exchange)
            return
        await exchange.notice("mismatch", "the dtype differs", **({"prefill_layout": other} if named else {}))
        await exchange.respond(500, {"error": {"message": "Internal server error", "code": 500}})

    return behaviour


async def decode_after(exchange: Exchange) -> None:
    choice = exchange.choice(words(exchange.words, 2), "length")
    await exchange.respond(200, {**exchange.shell([choice]), "usage": exchange.usage(2)})


def mixed(w: World, decoders: list[str], prefillers: list[str], *, named: bool = True) -> None:
    d = {str(e.port): layout for e, layout in zip(w.decoders, decoders, strict=True)}
    p = {str(e.port): layout for e, layout in zip(w.prefillers, prefillers, strict=True)}
    for engine in w.decoders:
        engine.usual = layouts(d, p, named=named)


@pytest.mark.parametrize("named", [True, False])
def test_only_engines_that_fit_are_paired(named: bool) -> None:
    async def scenario() -> None:
        async with world(prefillers=2, decoders=2) as w:
            mixed(w, ["aa", "bb"], ["bb", "aa"], named=named)  # whose turns fall together
            for _ in range(8):
                answer = await w.complete(max_tokens=2)
                assert text(answer, stream=False) == words(3, 2)
            asked = len(w.d.exchanges) + len(w.decoders[1].exchanges)
            for _ in range(8):
                await w.complete(max_tokens=2)
            assert len(w.d.exchanges) + len(w.decoders[1].exchanges) == asked + 8, "they are known by now"
            health = (await w.client.get("/health")).json()
            pairs = {(p["prefill"], p["decode"]) for p in health["unfit_pairs"]}
            assert (str(w.p.address), str(w.d.address)) in pairs
            assert (str(w.p.address), str(w.decoders[1].address)) not in pairs
            if named:
                assert health["layouts"][str(w.d.address)] == "aa"

    run(scenario())


def test_a_mismatch_without_another_engine() -> None:
    async def scenario() -> None:
        async with world(probe_interval=0.1) as w:
            mixed(w, ["aa"], ["bb"])
            answer = await w.complete(max_tokens=2)
            assert (answer.status_code, answer.json()["error"]["type"]) == (502, "KVTransferError")
            assert "the dtype differs" in answer.json()["error"]["message"], "said to the first"
            for stream in (False, True):
                answer = await w.complete(max_tokens=2, stream=stream)
                assert answer.status_code == 503
                assert "fits" in answer.json()["error"]["message"]
            assert len(w.d.exchanges) == 1
            assert (await w.client.get("/health")).status_code == 503
            await w.p.die()  # and comes back with another configuration
            instance = w.app.core.prefillers.instances[w.p.address]
            await until(lambda: instance.health.down)
            mixed(w, ["aa"], ["aa"])
            await w.p.start()
            await until(lambda: not instance.health.down)
            assert (await w.complete(max_tokens=2)).status_code == 200

    run(scenario())


# answers without measure


def raw_answer(*pieces: bytes, forever: bytes = b"") -> Any:
    async def behaviour(exchange: Exchange) -> None:
        for piece in pieces:
            exchange.writer.write(piece)
        while True:
            await exchange.writer.drain()
            await asyncio.sleep(0)
            if not forever:
                return
            exchange.writer.write(forever)

    return behaviour


OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
X = b"x" * 32768


def whole(body: bytes) -> bytes:
    return OK + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "behaviour",
    [
        raw_answer(OK + b"a: ", forever=X),
        raw_answer(OK, forever=b"a: b\r\n" * 5000),
        raw_answer(forever=b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        raw_answer(CHUNKED + b"3\r\n[1]\r\n0\r\n", forever=b"a: b\r\n" * 5000),
        raw_answer(CHUNKED + b"3;x=", forever=X),
        raw_answer(CHUNKED, forever=b"8000\r\n" + X + b"\r\n"),
        raw_answer(
            whole(b'{"choices": ' + b"[" * 3000 + b"]" * 3000 + b', "cached_tokens": "cached_tokens"}')
        ),
    ],
    ids=["header", "headers", "continues", "trailers", "extension", "endless", "deep"],
)
def test_what_an_engine_sends_is_bounded(
    behaviour: Any, stream: bool, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EVENT_LIMIT", 1 << 20)

    async def scenario() -> None:
        async with world() as w:
            object.__setattr__(w.settings, "max_answer_bytes", 1 << 20)
            w.d.usual = behaviour
            answer = await asyncio.wait_for(w.complete(stream=stream, n=n), 15)
            assert answer.status_code == 502 or (stream and answer.status_code == 200)

    run(scenario())


def test_sub_requests_ahead_of_a_slow_client_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "BYTES_AHEAD", 100)
    read = 0

    class Endless:
        async def start(self) -> None: ...

        async def read(self) -> bytes:
            nonlocal read
            await asyncio.sleep(0)
            read += 50
            return sse.event({"choices": [{"index": 0, "text": "x" * 20}]})

        def close(self) -> None: ...

    async def never(_: bytes) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        child: SubRequest = sub_request_of("completion", {"prompt": "a"})
        children: Any = [(child, Endless()) for _ in range(5)]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fanout.stream(children, never), 0.3)
        assert read <= 500, "one piece of each child at most beyond the bound"

    run(scenario())


# budgets


def test_budget_and_window() -> None:
    budget = ByteBudget(10)
    assert [budget.take(6), budget.take(5), budget.take(4)] == [True, False, True]
    budget.give(6)
    assert budget.used == 4

    async def scenario() -> None:
        window, order = Window(10), []

        async def one(name: str, size: int) -> None:
            async with window.hold(size):
                order.append(name)
                await asyncio.sleep(0.01)

        work = [
            asyncio.create_task(one(name, size)) for name, size in (("a", 6), ("b", 99), ("c", 4), ("d", 6))
        ]
        await asyncio.sleep(0)
        assert order == ["a"], "the small one doesn't overtake the large one for ever"
        work[1].cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert order == ["a", "c", "d"]
        async with window.hold(10):
            pass
        # All at once, as when a client goes away: each ends by its cancellation and nothing else.
        work = [asyncio.create_task(one("e", 8)) for _ in range(4)]
        await asyncio.sleep(0)
        for task in work:
            task.cancel()
        assert {type(e) for e in await asyncio.gather(*work, return_exceptions=True)} == {
            asyncio.CancelledError
        }
        async with window.hold(10):
            pass

    run(scenario())


def test_large_events_are_searched_once() -> None:
    buffer = sse.EventBuffer()
    pieces = [b"data: " + b"x" * 1000] + [b"y" * 1000 + b"\n"] * 500 + [b"\ndata: z\n\n"]
    assert b"".join(buffer.feed(piece) for piece in pieces) == b"".join(pieces)
    with pytest.raises(sse.EventTooLarge):
        all(buffer.feed(b"x" * 65536) == b"" for _ in range(sse.EVENT_LIMIT // 65536 + 2))


def test_a_client_waits_for_no_engine_that_went_away() -> None:
    """The frozen engine's connections are ended also while a large request is still being written."""

    async def scenario() -> None:
        server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0, limit=1024)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        client = Client(1.0)
        client.open()
        sending = asyncio.create_task(
            client.request(address, "POST", "/", body=b"x" * (64 << 20), first=30, idle=30)
        )
        await until(lambda: client.connections[0])
        await asyncio.sleep(0.1)
        assert not sending.done()
        assert client.fail(address, "it is down") == 1
        connection = await asyncio.wait_for(sending, 2)
        with pytest.raises(UpstreamError, match="down") as failure:
            await connection.start()
        assert failure.value.down
        connection.close()
        client.close()
        server.close()

    run(scenario())


# engines at work


def test_short_answers_show_that_an_engine_is_at_work() -> None:
    """A prefill engine's answers begin and end within one tick; its /health is slow all the while."""

    async def scenario() -> None:
        async with world(**PROBED) as w:
            respond = Exchange.respond

            async def slowly(exchange: Exchange, status: int, value: object) -> None:
                if exchange.method == "GET" and exchange.engine is w.p:
                    await asyncio.sleep(5)
                await respond(exchange, status, value)

            prefill = w.app.core.prefillers.instances[w.p.address]
            await until(lambda: not prefill.health.failed_probes)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Exchange, "respond", slowly)
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    assert (await w.complete(max_tokens=1)).status_code == 200
                    await asyncio.sleep(0.05)
                assert not prefill.health.down

    run(scenario())


def test_what_waited_for_a_slow_reader_does_not_show_it() -> None:
    """Data read now was sent before the engine froze."""

    async def sends(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n" + b"x" * (4 << 20))
        await asyncio.sleep(60)

    async def scenario() -> None:
        server = await asyncio.start_server(sends, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        client = Client(1.0, tick=0.05)
        client.open()
        connection = await client.request(address, "GET", "/", first=30, idle=30)
        await connection.start()
        await asyncio.sleep(0.3)  # it is frozen by now, and the data it sent waits in the sockets
        began = asyncio.get_running_loop().time()
        for _ in range(4):
            assert await connection.read()
            await asyncio.sleep(0.1)
        assert not client.heard_since(address, began)
        connection.close()
        client.close()
        server.close()

    run(scenario())


def test_one_decode_engine_can_not_part_the_others_from_their_prefill() -> None:
    """It says of every prefill engine that its layout is another one, each time."""

    async def lies(exchange: Exchange) -> None:
        await exchange.post(remote_layout="bb")
        await exchange.notice("mismatch", "?", prefill_layout=f"{len(exchange.engine.exchanges):04x}")
        await exchange.respond(500, {"error": {"message": "Internal server error", "code": 500}})

    async def tells(exchange: Exchange) -> None:
        await exchange.rendezvous(remote_layout="aa")
        await decode_after(exchange)

    async def scenario() -> None:
        async with world(prefillers=2, decoders=2) as w:
            good, bad = w.decoders
            good.usual = bad.usual = tells
            for _ in range(8):
                assert (await w.complete(max_tokens=2)).status_code == 200
            bad.usual = lies
            for _ in range(8):
                assert (await w.complete(max_tokens=2)).status_code == 200
            assert (await w.client.get("/health")).status_code == 200

    run(scenario())


def test_a_client_that_is_gone_ends_its_request_though_a_cancellation_was_lost() -> None:
    """asyncio.wait_for swallows one that comes in the moment its own work is done (before Python 3.12)."""

    async def gone() -> dict[str, Any]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None: ...

    async def scenario() -> None:
        async with Guard(gone, send, 60) as guard:
            asyncio.get_running_loop().call_later(0.2, guard.tick, 0.0)
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
            await asyncio.sleep(5)
            raise AssertionError("it goes on")
        assert guard.reason == "client gone"
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 3))
