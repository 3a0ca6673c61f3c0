"""Loggers that show up in a vLLM process: vLLM configures handlers below its own name only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PERIOD_S = 30.0
KINDS_KEPT = 256
SHOWN = 80
"""Longest piece of foreign text in a message."""


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of ours, as a child of vLLM's."""
    return logging.getLogger(f"vllm.{name}")


class QuietLog:
    """Logs each kind of message at most once a period, and says how many it left out.

    For what repeats with every request, or as often as a stranger likes. `prefix` begins each line.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic, prefix: str = "") -> None:
        self._logger = get_logger(name)
        self._clock, self._prefix = clock, prefix
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
        if len(self._next) >= KINDS_KEPT:
            self._next = {known: at for known, at in self._next.items() if at > now}
        if kind not in self._next and len(self._next) >= KINDS_KEPT:
            kind = "other"
        if now < self._next.get(kind, 0.0):
            self._dropped[kind] = self._dropped.get(kind, 0) + 1
            return
        dropped = self._dropped.pop(kind, 0)
        self._next[kind] = now + PERIOD_S
        more = f" ({dropped} more since the last message)" if dropped else ""
        self._logger.log(level, "%s%s%s", self._prefix, message, more, exc_info=exc_info)


def shown(value: object) -> str:
    """A foreign value for a message: one line of ASCII, short, whatever it is."""
    if isinstance(value, str):
        text = ascii(value[:SHOWN])
        return text if len(value) <= SHOWN else f"{text}... ({len(value)} characters)"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
