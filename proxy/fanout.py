"""Several children of one call side by side: prompt lists and ``n`` choices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from vllm_kvoffload.proxy.calls import Child
from vllm_kvoffload.proxy.errors import HttpFailure
from vllm_kvoffload.proxy.generation import Generation
from vllm_kvoffload.proxy.merge import StreamMerger, merged_answer

Pairs = Sequence[tuple[Child, Generation]]
PIECES_AHEAD = 256  # of all children together, for a client that reads slowly


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Their results; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole_child(generation: Generation) -> dict[str, Any]:
    await generation.start()
    answer = msgspec.json.decode(await generation.answer())
    if not isinstance(answer, dict):
        raise HttpFailure.of(502, "decode answered no JSON object", kind="UpstreamError")
    return answer


async def whole(children: Pairs) -> bytes:
    """The merged answer. Raises ``HttpFailure`` of the first child that fails, after ending the others."""
    try:
        answers = await _all([_whole_child(generation) for _, generation in children])
        return msgspec.json.encode(merged_answer([child for child, _ in children], answers))
    finally:
        for _, generation in children:
            generation.close()


async def stream(children: Pairs, write: Callable[[bytes], Awaitable[None]]) -> None:
    """Writes the merged stream with its end. Raises ``HttpFailure`` like :func:`whole`."""
    queue: asyncio.Queue[tuple[Child, bytes] | None] = asyncio.Queue(PIECES_AHEAD)

    async def pump(child: Child, generation: Generation) -> None:
        while data := await generation.read():
            await queue.put((child, data))

    async def pump_all() -> None:
        await _all([pump(child, generation) for child, generation in children])
        await queue.put(None)

    async def merge() -> None:
        merger = StreamMerger()
        while (item := await queue.get()) is not None:
            if data := merger.events(*item):
                await write(data)
        await write(merger.end())

    try:
        await _all([generation.start() for _, generation in children])
        await _all([pump_all(), merge()])
    finally:
        for _, generation in children:
            generation.close()
