"""Re-dispatch after "recomputed": the client sees one answer, without a gap and without a repetition."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from tests.proxy.proxy_world import Behaviour, Exchange, events, text_of, words, world


def run(scenario: Any) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def gives_up_after(count: int, *, last_word: bool = False) -> Behaviour:
    """A decode engine that makes ``count`` words and then gives the request up."""

    async def behaviour(exchange: Exchange) -> None:
        if not exchange.body.get("stream"):
            await exchange.rendezvous()
            choice = exchange.choice(words(exchange.words, count), "stop", "recomputed")
            if exchange.chat:
                choice["message"] = {"role": "assistant", **choice.pop("delta")}
            await exchange.respond(200, {**exchange.shell([choice]), "usage": exchange.usage(count)})
            return
        await exchange.start_stream()
        await exchange.rendezvous()
        plain = count - 1 if last_word else count
        for index in range(plain):
            await exchange.word(index)
        text = f" w{exchange.words + plain}" if last_word else ""
        await exchange.event(exchange.shell([exchange.choice(text, "stop", "recomputed")]))
        await exchange.end_stream(count)

    return behaviour


@pytest.mark.parametrize("last_word", [False, True])
@pytest.mark.parametrize("usage", [False, True])
def test_streamed_completion(last_word: bool, usage: bool) -> None:
    async def scenario() -> None:
        async with world(decoders=2) as w:
            w.d.behaviours.append(gives_up_after(3, last_word=last_word))
            w.decoders[1].behaviours.append(gives_up_after(2))
            options = {"stream_options": {"include_usage": True}} if usage else {}
            found = await w.stream(max_tokens=8, min_tokens=4, **options)
            assert text_of(found) == words(3, 8)
            assert len({e["id"] for e in found if "id" in e}) == 1
            finishes = [c["finish_reason"] for e in found for c in e.get("choices", ()) if c["finish_reason"]]
            assert finishes == ["length"]
            assert "recomputed" not in str(found)
            assert found[-1] == {"done": True}
            if usage:
                assert found[-2]["usage"]["prompt_tokens"] == 3
                assert found[-2]["usage"]["completion_tokens"] == 8
            last = max((e for d in w.decoders for e in d.exchanges), key=lambda e: e.words)
            assert (last.body["max_tokens"], last.body["min_tokens"]) == (3, 0)
            assert sum(len(p.exchanges) for p in w.prefillers) == 3, "prefill is dispatched for each"
            assert w.p.exchanges[-1].body["prompt"] == "a b c" + words(3, 5)

    run(scenario())


def test_text_offsets_of_a_stream_go_on() -> None:
    """Each engine counts the characters of its own output."""

    async def part(exchange: Exchange, count: int, *, gives_up: bool) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        for index in range(count):
            choice = exchange.choice("ab", None if gives_up or index < count - 1 else "length")
            choice["logprobs"] = {"tokens": ["ab"], "text_offset": [2 * index]}
            await exchange.event(exchange.shell([choice]))
        if gives_up:
            await exchange.event(exchange.shell([exchange.choice("", "stop", "recomputed")]))
        await exchange.end_stream(count)

    async def scenario() -> None:
        async with world() as w:
            for count, gives_up in ((2, True), (1, True), (2, False)):
                w.d.behaviours.append(partial(part, count=count, gives_up=gives_up))
            found = await w.stream(max_tokens=5, logprobs=0)
            offsets = [c["logprobs"]["text_offset"] for e in found for c in e.get("choices", ())]
            assert offsets == [[0], [2], [4], [6], [8]]

    run(scenario())


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_goes_on_in_the_last_turn(continues: bool, stream: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(gives_up_after(2))
            messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "a b"}]
            extra: dict[str, Any] = {}
            if continues:
                messages.append({"role": "assistant", "content": "so"})
                extra = {"continue_final_message": True, "add_generation_prompt": False}
            count = sum(len(m["content"].split()) for m in messages)
            path = "/v1/chat/completions"
            if stream:
                text = text_of(await w.stream(path, messages=messages, max_tokens=5, **extra))
            else:
                answer = (await w.complete(path, messages=messages, max_tokens=5, **extra)).json()
                text = answer["choices"][0]["message"]["content"]
                assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (count, 5)
            assert text == words(count, 5)
            sent = w.d.exchanges[1].body
            assert sent["messages"][:2] == messages[:2], "earlier turns stay as they are"
            if continues:
                assert sent["messages"][2] == {"role": "assistant", "content": "so" + words(count, 2)}
            else:
                assert sent["messages"][2] == {"role": "assistant", "content": words(count, 2)}
            assert sent["continue_final_message"] is True
            assert sent["add_generation_prompt"] is False

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_get_the_ids_of_the_text(stream: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(gives_up_after(2))
            if stream:
                text = text_of(await w.stream(prompt=[1, 2], max_tokens=4))
            else:
                text = (await w.complete(prompt=[1, 2], max_tokens=4)).json()["choices"][0]["text"]
            assert text == words(2, 4)
            assert w.d.exchanges[1].body["prompt"] == [1, 2, 9, 9]

    run(scenario())


def test_tool_calls_start_again_or_fail() -> None:
    async def tool_then_gives_up(exchange: Exchange) -> None:
        if exchange.body.get("stream"):
            await exchange.start_stream()
            await exchange.rendezvous()
            delta = {"tool_calls": [{"index": 0, "function": {"name": "f"}}]}
            await exchange.event(exchange.shell([{"index": 0, "delta": delta, "finish_reason": None}]))
            await asyncio.sleep(0.05)
            await exchange.event(exchange.shell([exchange.choice("", "stop", "recomputed")]))
            await exchange.end_stream(1)
            return
        await exchange.rendezvous()
        choice = {**exchange.choice("", "stop", "recomputed"), "message": {"tool_calls": [{"id": "1"}]}}
        await exchange.respond(200, exchange.shell([choice]))

    async def scenario() -> None:
        async with world() as w:
            messages = [{"role": "user", "content": "a b"}]
            path = "/v1/chat/completions"
            w.d.behaviours.append(tool_then_gives_up)
            answer = await w.complete(path, messages=messages, max_tokens=2)
            assert answer.json()["choices"][0]["message"]["content"] == words(2, 2), "from the start"
            assert w.d.exchanges[1].body["messages"] == messages
            w.d.behaviours.append(tool_then_gives_up)
            found = await w.stream(path, messages=messages, max_tokens=2)
            assert found[-1]["error"]["code"] == 502, "the client has seen half a call"

    run(scenario())


def test_the_word_in_a_text_means_nothing() -> None:
    async def says_it(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        await exchange.event(exchange.shell([exchange.choice('"stop_reason":"recomputed"', "stop")]))
        await exchange.end_stream(1)

    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(says_it)
            assert text_of(await w.stream()) == '"stop_reason":"recomputed"'
            assert len(w.d.exchanges) == 1

    run(scenario())


@pytest.mark.parametrize("stop", ["recomputed", ["x", "recomputed"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_clients_own_stop_string_is_no_giving_up(stop: Any, stream: bool) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.usual = gives_up_after(2)  # vLLM reports the stop string that it met as its stop_reason
            answer = await w.complete(stream=stream, stop=stop)
            assert answer.status_code == 200
            found = events(answer.text) if stream else [answer.json()]
            assert text_of(found) == words(3, 2)
            (reason,) = [c["stop_reason"] for e in found for c in e.get("choices", ()) if c["finish_reason"]]
            assert (reason, len(w.d.exchanges)) == ("recomputed", 1)
            many = await w.complete(stream=stream, stop=stop, n=3)
            assert (many.status_code, len(w.d.exchanges)) == (200, 4)

    run(scenario())


def test_a_continuation_before_its_first_output_goes_elsewhere() -> None:
    async def lost(exchange: Exchange) -> None:
        await exchange.start_stream()
        await exchange.rendezvous()
        exchange.abort()

    async def scenario() -> None:
        async with world(decoders=2) as w:
            for engine in w.decoders:
                engine.behaviours += [gives_up_after(2), lost] if engine is w.d else [lost]
            w.decoders[1].behaviours.clear()
            found = [await w.stream(max_tokens=6) for _ in range(3)]
            assert [text_of(one) for one in found] == [words(3, 6)] * 3
            assert not w.d.behaviours

    run(scenario())


def test_token_ids_come_from_another_engine_where_the_first_has_none() -> None:
    async def scenario() -> None:
        async with world(decoders=2) as w:
            w.d.behaviours.append(gives_up_after(2))
            w.d.tokenizes = False
            for _ in w.decoders:
                assert text_of(await w.stream(prompt=[1, 2], max_tokens=4)) == words(2, 4)
            assert not w.d.behaviours

    run(scenario())


def test_it_ends_at_some_time() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.usual = gives_up_after(0)
            assert (await w.complete(stream=True)).status_code == 503
            assert len(w.d.exchanges) == 1 + w.settings.max_recomputes

    run(scenario())


def test_fan_out_with_one_child_that_gives_up() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.d.behaviours.append(gives_up_after(2))
            found = await w.stream(
                prompt=["a b c", "a b c"], max_tokens=4, stream_options={"include_usage": True}
            )
            assert [text_of(found, i) for i in range(2)] == [words(3, 4)] * 2
            usage = found[-2]["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 8)

    run(scenario())
