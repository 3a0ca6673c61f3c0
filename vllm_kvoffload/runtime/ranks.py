"""A barrier of the ranks of a tensor parallel group, with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

DEADLINE_S = 60.0
"""Limit of a wait for another rank. Ranks take milliseconds, so only a stuck rank reaches it."""


def rank_barrier(group: torch.distributed.ProcessGroup) -> Callable[[], None]:
    """A bounded barrier of the TP ranks: a missing rank raises RuntimeError after the deadline."""
    timeout = timedelta(seconds=DEADLINE_S)

    def barrier() -> None:
        torch.distributed.monitored_barrier(group, timeout=timeout)

    return barrier
