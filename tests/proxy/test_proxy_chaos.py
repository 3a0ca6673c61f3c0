"""Many concurrent requests with random faults, and engines that die and come back."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.proxy.proxy_world import FAST, Behaviour, Exchange, World, events, text_of, words, world
from vllm_kvoffload.proxy.balance import Demand
from vllm_kvoffload.proxy.settings import Deadlines


def faulty(random_: random.Random, usual: Behaviour) -> Behaviour:
    """An engine that often does something wrong at a random place."""

    async def behaviour(exchange: Exchange) -> None:
        fault = random_.choice(["none"] * 4 + ["reset", "refuse", "late", "break", "repeat", "give up"])
        decode = "metaserver" in str(exchange.body.get("kv_transfer_params"))
        if fault == "reset":
            exchange.abort()
        elif fault == "refuse":
            await exchange.respond(400, {"error": {"message": "no", "code": 400}})
        elif fault == "late":
            await asyncio.sleep(random_.random() / 2)
            await usual(exchange)
        elif fault in ("break", "give up") and decode and exchange.body.get("stream"):
            await exchange.start_stream()
            await exchange.rendezvous()
            await exchange.word(0)
            if fault == "break" or exchange.body["max_tokens"] == 1:
                exchange.abort()
                return
            await exchange.event(exchange.shell([exchange.choice("", "stop", "recomputed")]))
            await exchange.end_stream(1)
        elif fault == "repeat" and decode:
            await asyncio.gather(exchange.post(), exchange.post(), usual(exchange))
        else:
            await usual(exchange)

    return behaviour


async def client(w: World, random_: random.Random) -> str:
    """One request; says how it ended. Wrong words fail."""
    count = random_.randint(1, 4)
    prompts = random_.choice(["a b c", ["a b c"] * 3])
    stream = random_.random() < 0.7
    patience = random_.choice([20.0, 20.0, 20.0, random_.random()])
    try:
        answer = await asyncio.wait_for(w.complete(prompt=prompts, max_tokens=count, stream=stream), patience)
    except (asyncio.TimeoutError, httpx.TimeoutException):
        return "left"
    children = 1 if isinstance(prompts, str) else 3
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
        return "refused"
    if stream:
        found = events(answer.text)
        texts = [text_of(found, i) for i in range(children)]
        if "error" in found[-1]:
            assert all(words(3, count).startswith(text) for text in texts)
            return "broken"
    else:
        texts = [choice["text"] for choice in answer.json()["choices"]]
    assert texts == [words(3, count)] * children
    return "right"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chaos(seed: int) -> None:
    async def scenario() -> None:
        random_ = random.Random(seed)
        deadlines = Deadlines(**{**vars(FAST), "first_output": 8, "answer": 8, "idle": 8, "prefill": 6})
        async with world(2, 2, deadlines=deadlines, probe_interval=0.3) as w:
            for engine in (*w.prefillers, *w.decoders):
                engine.usual = faulty(random_, engine.usual)

            async def restart(engine: Any) -> None:
                await engine.die()
                await asyncio.sleep(0.2)
                await engine.start()

            async def after(delay: float) -> str:
                await asyncio.sleep(delay)
                return await client(w, random_)

            work = [after(2 * random_.random()) for _ in range(40)]
            ends = asyncio.gather(*work)
            for engine in (w.d, w.prefillers[1]):
                await asyncio.sleep(0.7)
                await restart(engine)
            found = await ends
            assert found.count("right") >= 5, found

    asyncio.run(asyncio.wait_for(scenario(), 90))


@pytest.mark.slow
def test_control_a_leak_is_seen() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.app.core.decoders.acquire(Demand(5), 0.0)

    with pytest.raises(AssertionError, match=r"left behind: .*5, 1, 0, 0"):
        asyncio.run(asyncio.wait_for(scenario(), 30))
