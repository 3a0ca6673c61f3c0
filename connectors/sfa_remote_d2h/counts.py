"""Counters of the two state machines, by the keys of their field sets. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm_kvoffload.metrics.fields import ReceiveFailure, TransferEnd, receive_seconds
from vllm_kvoffload.metrics.layout import Histogram


@dataclass
class TransferCounts:
    """Prefill: counts of transfers since the start."""

    opened: int = 0
    closed: Counter[TransferEnd] = field(default_factory=Counter)

    def values(self) -> dict[str, int]:
        """Counters by key of `metrics.PREFILL`."""
        closed = {f"transfers_closed.{end.value}": self.closed[end] for end in TransferEnd}
        return {"transfers_opened": self.opened, **closed}


@dataclass
class ReceiveCounts:
    """Decode: counts of requests since the start. seconds: of received ones, from allocation to the last
    answer."""

    started: int = 0
    done: int = 0
    retries: int = 0
    failed: Counter[ReceiveFailure] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=receive_seconds)

    def received(self, seconds: float) -> None:
        """Counts a complete request, `seconds` after its blocks were allocated."""
        self.done += 1
        self.seconds.observe(seconds)

    def values(self) -> dict[str, int]:
        """Counters by key of `metrics.DECODE`."""
        failed = {f"receives_failed.{why.value}": self.failed[why] for why in ReceiveFailure}
        counts = {"receives_started": self.started, "receives_done": self.done}
        return {**counts, "receive_retries": self.retries, **failed, **self.seconds.values()}
