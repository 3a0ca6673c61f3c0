"""Warnings about what repeats with every request while something is down: one in a while says enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_kvoffload.log import get_logger

PERIOD_S = 30.0


class QuietLog:
    """Logs each kind of message at most once a period, and says how many it left out."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = get_logger(name)
        self._clock = clock
        self._next: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        """Logs `message`, unless one of its kind was logged lately."""
        now = self._clock()
        if now < self._next.get(kind, 0.0):
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        dropped = self._dropped.pop(kind, 0)
        self._next[kind] = now + PERIOD_S
        more = f" ({dropped} more since the last message)" if dropped else ""
        self._logger.warning("store %s: %s%s", kind, message, more)
