"""Limits on bytes held at a time, by refusal or by waiting. No I/O; for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class ByteBudget:
    """A counter of held bytes: ``take`` before holding, ``give`` after. ``limit`` in bytes."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # bytes held now

    def take(self, size: int) -> bool:
        """Reserves ``size`` bytes; returns False if they exceed the limit."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Returns ``size`` bytes to the budget."""
        self.used -= size


class Window:
    """Admits at most ``limit`` bytes at a time in arrival order; a larger item is admitted alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Holds ``size`` bytes inside the context, after earlier arrivals."""
        size = min(size, self._limit)
        if self._queue or self._used + size > self._limit:
            turn = asyncio.get_running_loop().create_future()
            self._queue.append((size, turn))
            try:
                await turn
            except BaseException:
                if turn.done() and not turn.cancelled():
                    self._give(size)
                else:
                    with contextlib.suppress(ValueError):  # already passed over, between its end and now
                        self._queue.remove((size, turn))
                    self._next()
                raise
        else:
            self._used += size
        try:
            yield
        finally:
            self._give(size)

    def _give(self, size: int) -> None:
        self._used -= size
        self._next()

    def _next(self) -> None:
        while self._queue and self._used + self._queue[0][0] <= self._limit:
            size, turn = self._queue[0]
            self._queue.popleft()
            if not turn.done():
                self._used += size
                turn.set_result(None)
