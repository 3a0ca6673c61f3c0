"""How the rows that a plan names get to attention.

``in_place``: attention reads the hot pool itself; only misses and the step's new rows are copied.
``compact``: see :mod:`vllm_kvoffload.sparse.compact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.sparse.host_store import HostStore
from vllm_kvoffload.sparse.hot_pool import GroupPool, HotPool
from vllm_kvoffload.sparse.prefetch import FollowerPrefetch, fetch_misses
from vllm_kvoffload.sparse.row_ops import Rows
from vllm_kvoffload.sparse.rows import RowTable
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step_state import StepState


@dataclass(frozen=True)
class DecodeParts:
    """What a delivery works on."""

    store: HostStore
    hot: HotPool
    rows: RowTable
    runtime: Runtime
    stats: OffloadStats
    deadline_s: float


class Delivery(Protocol):
    """Decode's way from choice to rows, for all layers of one worker."""

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> None:
        """Plans a group's step. ``topk``: int32 [T', K], the choices of the decoding query tokens."""

    def deliver(
        self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState
    ) -> tuple[Rows, torch.Tensor]:
        """Rows for attention, as bytes, and where in them every chosen position is, int64 [T', K] of flat
        numbers, -1 for none. ``new_rows``: [T'] as bytes, which nobody changes any more.

        Raises:
            TaskFailedError, WaitTimeoutError: rows are missing.
        """

    def join(self) -> bool:
        """Waits for all copies in flight. False when rows of the hot pools are not what residency says.

        Raises:
            WaitTimeoutError: a copy is stuck.
        """

    @property
    def nbytes(self) -> int:
        """Device bytes of buffers of its own."""


def count_plan(stats: OffloadStats, plan: ops.PlanOut) -> int:
    """Adds a plan to the totals; returns its misses."""
    hits, misses, new, displaced = plan.stats[:4].tolist()
    stats.hits += hits
    stats.misses += misses
    stats.new_rows += new
    stats.displaced += displaced
    return int(misses)


class InPlaceDelivery:
    """A :class:`Delivery` that copies misses and new rows only, followers' misses ahead of time."""

    def __init__(self, parts: DecodeParts, index_topk: int, max_query_len: int) -> None:
        self._parts = parts
        rows = parts.rows.num_rows
        # A plan is consumed by the layers of its group before the next group plans: one output serves all.
        self._plan = ops.PlanOut(rows * max_query_len, rows, index_topk, max_query_len)
        self._workspace = ops.Workspace()
        self._prefetch = FollowerPrefetch(parts.store, parts.hot, parts.rows, parts.runtime, parts.deadline_s)
        self._indices = torch.empty(0)
        self._misses = 0  # of the plan

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> None:
        ops.dsa_plan(
            topk,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_rows,
            pool.residency,
            self._plan,
            self._workspace,
        )
        slots = self._plan.slots[: len(topk)]
        self._indices = (slots + step.first_slots).masked_fill_(slots < 0, -1)
        self._misses = count_plan(self._parts.stats, self._plan)

    def deliver(
        self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState
    ) -> tuple[Rows, torch.Tensor]:
        store, hot, plan = self._parts.store, self._parts.hot, self._plan
        fetched = self._prefetch.take(layer)
        if fetched is None:
            if step.decode_late:
                store.await_layer(layer)
            fetched = fetch_misses(store, hot, layer, step, plan, step.decode_rows)
        self._parts.stats.fetched_bytes += fetched
        # A late prefix isn't in the host pool yet. With nothing to fetch, waking a thread is all it would do.
        if layer == pool.group.owner and self._misses and not step.decode_late:
            self._prefetch.start(pool.group.layers[1:], plan, step)
        rows = hot.layers[layer]
        store.row_ops.write_rows(rows, step.token_rows, new_rows, plan.new_slots[: len(step.token_rows)])
        pool.unserved -= 1
        return rows, self._indices

    def join(self) -> bool:
        self._prefetch.join()
        return True

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes
