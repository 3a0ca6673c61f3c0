"""Waiting for the other ranks of a tensor parallel group, with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch

DEADLINE_S = 60.0
"""Bound of a wait for another rank; ranks take milliseconds, so this only ends what is stuck."""


def rank_barrier(group: torch.distributed.ProcessGroup) -> Callable[[], None]:
    """A barrier of the TP ranks that ends: a rank that doesn't come is an error after the deadline."""
    timeout = timedelta(seconds=DEADLINE_S)

    def barrier() -> None:
        torch.distributed.monitored_barrier(group, timeout=timeout)

    return barrier
