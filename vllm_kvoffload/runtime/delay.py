"""Random-delay mode: seeded delays around every task make streams overtake each other, as on a device.

A missing wait then shows up as wrong data on CPU (I-17). Order within a stream and order imposed by events
never change, so a correct program gives the same result for every seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DELAY_ENV = "KVOFFLOAD_RUNTIME_DELAY"
DEFAULT_MAX_MS = 5.0
LIMIT_MS = 1000.0

# Drawn per seed and stream. Independent delays average out over a long queue; a stream falls many tasks
# behind another only if it is slow as a whole.
_STREAM_PACES = (0.0, 0.2, 1.0)


@dataclass(frozen=True)
class DelayPlan:
    """Delays as a pure function of (seed, stream, task number, edge): the same in every run."""

    seed: int
    max_ms: float = DEFAULT_MAX_MS

    def __post_init__(self) -> None:
        if not 0 < self.max_ms <= LIMIT_MS:
            raise ValueError(f"max_ms={self.max_ms}: expected 0 < max_ms <= {LIMIT_MS:g}")

    @classmethod
    def parse(cls, text: str) -> DelayPlan:
        """Parse `seed[:max_ms]`. Raises ValueError naming the variable, the value and the rule."""
        seed, colon, max_ms = text.partition(":")
        try:
            return cls(int(seed), float(max_ms) if colon else DEFAULT_MAX_MS)
        except ValueError as error:
            raise ValueError(
                f"{DELAY_ENV}={text!r}: expected seed[:max_ms], as in 7:20, max_ms <= {LIMIT_MS:g} ({error})"
            ) from error

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> DelayPlan | None:
        """The plan given by KVOFFLOAD_RUNTIME_DELAY, or None when it is unset or empty."""
        text = environ.get(DELAY_ENV, "")
        return cls.parse(text) if text else None

    def delay_s(self, stream: str, index: int, edge: Literal["before", "after"]) -> float:
        """Seconds to sleep before or after task number `index` of `stream`; half the draws are 0."""
        pace = _STREAM_PACES[self._draw(stream) % len(_STREAM_PACES)]
        draw = self._draw(f"{stream}/{index}/{edge}")
        if draw & 1:
            return 0.0
        return pace * self.max_ms / 1000 * (draw >> 11) / 2**53

    def _draw(self, what: str) -> int:
        digest = hashlib.blake2b(f"{self.seed}/{what}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")
