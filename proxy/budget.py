"""Limits on bytes that are held at a time: refused beyond, or waited for. No I/O; for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class ByteBudget:
    """``take`` what will be held and ``give`` it back. ``limit`` in bytes."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # bytes held now
        self.refused = 0  # calls of ``take`` that found no room

    def take(self, size: int) -> bool:
        """Whether ``size`` bytes more may be held; then they count until they are given back."""
        if self.used + size > self.limit:
            self.refused += 1
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """``size`` bytes are held no longer."""
        self.used -= size


class Window:
    """At most ``limit`` bytes at a time, first come, first served; what is larger goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Holds ``size`` bytes inside, after those that came before."""
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
                    with contextlib.suppress(ValueError):  # passed over already, when another one ended
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
