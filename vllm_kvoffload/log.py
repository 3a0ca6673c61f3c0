"""Loggers that show up in a vLLM process: vLLM configures handlers below its own name only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 30.0
KINDS_KEPT = 256


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of ours, as a child of vLLM's."""
    return logging.getLogger(f"vllm.{name}")


class RateLimitedLog:
    """Logs each kind of message at most once a period, and says how many it left out.

    For lines that repeat with every request, or that an unauthenticated peer can cause at any rate.

    Args:
        subject: with it, each line begins with it and the kind of the message.
        period_s: seconds between two messages of a kind.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        subject: str = "",
        period_s: float = PERIOD_S,
    ) -> None:
        self._logger = get_logger(name)
        self._clock, self._subject, self._period_s = clock, subject, period_s
        self._next: dict[str, float] = {}
        self._dropped: dict[str, int] = {}

    def warning(self, kind: str, message: str) -> None:
        """Logs `message`, unless one of its kind was logged lately."""
        self._log(logging.WARNING, kind, message)

    def error(self, kind: str, message: str) -> None:
        """The same, as an error."""
        self._log(logging.ERROR, kind, message)

    def exception(self, kind: str, message: str) -> None:
        """The same, with the traceback of the exception being handled."""
        self._log(logging.ERROR, kind, message, exc_info=True)

    def _log(self, level: int, kind: str, message: str, exc_info: bool = False) -> None:
        now = self._clock()
        line = f"{self._subject} {kind}: {message}" if self._subject else message
        if len(self._next) >= KINDS_KEPT:
            known = list(self._next.items())  # one step of Python: other threads log here too
            self._next = {one: at for one, at in known if at > now}
            self._dropped = {one: n for one, n in list(self._dropped.items()) if one in self._next}
        if kind not in self._next and len(self._next) >= KINDS_KEPT:
            kind = "other"
        if now < self._next.get(kind, float("-inf")):
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        dropped = self._dropped.pop(kind, 0)
        self._next[kind] = now + self._period_s
        more = f" ({dropped} more since the last message)" if dropped else ""
        self._logger.log(level, "%s%s", line, more, exc_info=exc_info)
