"""Counters of the sparse decode offload."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class OffloadStats:
    """Totals since the engine started.

    ``hits``, ``misses``, ``new_rows`` and ``displaced`` count rows over all index groups, ``*_bytes`` over
    all layers. ``fetched_bytes``: misses copied from the host pool; ``prefill_bytes``: prefixes streamed from
    it; ``written_bytes``: new rows written to it.
    """

    decode_steps: int = 0
    hits: int = 0
    misses: int = 0
    new_rows: int = 0
    displaced: int = 0
    fetched_bytes: int = 0
    prefill_bytes: int = 0
    written_bytes: int = 0

    @property
    def hit_ratio(self) -> float:
        """Share of the top-k rows found in the hot pool, excluding rows new in their step; 0 before any."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "hit_ratio": self.hit_ratio}
