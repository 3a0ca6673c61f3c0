"""Runs the sub-requests of one call concurrently: prompt lists and ``n`` choices."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from vllm_kvoffload.proxy.calls import SubRequest
from vllm_kvoffload.proxy.errors import HttpFailure
from vllm_kvoffload.proxy.generation import Generation, decoded_answer
from vllm_kvoffload.proxy.merge import StreamMerger, merged_answer

Pairs = Sequence[tuple[SubRequest, Generation]]
BYTES_AHEAD = 1 << 20  # bytes buffered for all sub-requests when the client reads slowly


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Returns all results; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Answers:
    """Collects the sub-requests' answers, up to ``limit`` bytes in total."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Returns one sub-request's answer."""
        await generation.start()
        raw = await generation.answer()
        self._size += len(raw)
        if self._size > self._limit:
            message = f"the choices of the answer have more than {self._limit} bytes"
            raise HttpFailure.of(502, message, kind="UpstreamError")
        return decoded_answer(raw)


async def whole(sub_requests: Pairs, limit: int) -> bytes:
    """Returns the merged answer. Raises ``HttpFailure`` of the first failing sub-request, after ending the
    others."""
    answers = _Answers(limit)
    try:
        found = await _all([answers.whole(generation) for _, generation in sub_requests])
        return msgspec.json.encode(merged_answer([sub_request for sub_request, _ in sub_requests], found))
    finally:
        for _, generation in sub_requests:
            generation.close()


class _Ahead:
    """Buffers sub-requests' output until the client takes it, up to ``BYTES_AHEAD``."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[SubRequest, bytes]] = deque()
        self._size = 0
        self._ended = False
        self._room = asyncio.Event()
        self._room.set()
        self._some = asyncio.Event()

    async def room(self) -> None:
        """Waits until a sub-request may read on. Call before reading, so that data stays in its
        connection."""
        while self._size >= BYTES_AHEAD:
            self._room.clear()
            await self._room.wait()

    def put(self, sub_request: SubRequest, data: bytes) -> None:
        """Adds a sub-request's events."""
        self._pieces.append((sub_request, data))
        self._size += len(data)
        self._some.set()

    def end(self) -> None:
        """Marks the end of all output."""
        self._ended = True
        self._some.set()

    async def get(self) -> tuple[SubRequest, bytes] | None:
        """Returns the next events; None at the end."""
        while not self._pieces:
            if self._ended:
                return None
            self._some.clear()
            await self._some.wait()
        sub_request, data = self._pieces.popleft()
        self._size -= len(data)
        if self._size < BYTES_AHEAD:
            self._room.set()
        return sub_request, data


async def stream(sub_requests: Pairs, write: Callable[[bytes], Awaitable[None]]) -> None:
    """Writes the merged stream to its end. Raises ``HttpFailure`` like :func:`whole`."""
    ahead = _Ahead()

    async def pump(sub_request: SubRequest, generation: Generation) -> None:
        await ahead.room()
        while data := await generation.read():
            ahead.put(sub_request, data)
            await ahead.room()

    async def pump_all() -> None:
        await _all([pump(sub_request, generation) for sub_request, generation in sub_requests])
        ahead.end()

    async def merge() -> None:
        merger = StreamMerger()
        while (item := await ahead.get()) is not None:
            if data := merger.events(*item):
                await write(data)
        await write(merger.end())

    try:
        await _all([generation.start() for _, generation in sub_requests])
        await _all([pump_all(), merge()])
    finally:
        for _, generation in sub_requests:
            generation.close()
