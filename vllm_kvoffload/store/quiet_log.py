"""Warnings about what repeats with every request while something is down: one in a while says enough."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_kvoffload import log
from vllm_kvoffload.log import PERIOD_S

__all__ = ["PERIOD_S", "QuietLog"]


class QuietLog(log.QuietLog):
    """A `log.QuietLog` whose lines begin with "store" and their kind."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, clock, "store ")

    def warning(self, kind: str, message: str) -> None:
        """Logs `message`, unless one of its kind was logged lately."""
        super().warning(kind, f"{kind}: {message}")
