"""Log lines that strangers can cause: in one line, and not more than a few a minute."""

from __future__ import annotations

import logging
import re
import time

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
TEXT_LIMIT = 500  # characters of text that came from outside


def one_line(text: str, limit: int = TEXT_LIMIT) -> str:
    """``text`` for a log: control characters and line ends escaped, cut after ``limit`` characters."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", cut)


class Seldom:
    """A log line at most every ``seconds``; the next one says how many were left out."""

    def __init__(self, logger: logging.Logger, seconds: float = 10.0) -> None:
        self._logger = logger
        self._seconds = seconds
        self._next = float("-inf")
        self.left_out = 0

    def warning(self, text: str, *arguments: object) -> None:
        """Logs or counts."""
        now = time.monotonic()
        if now < self._next:
            self.left_out += 1
            return
        self._next = now + self._seconds
        more = f" (and {self.left_out} more like it)" if self.left_out else ""
        self.left_out = 0
        self._logger.warning(text + "%s", *arguments, more)
