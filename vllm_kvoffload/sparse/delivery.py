"""How the rows that a plan names get to attention.

``in_place``: attention reads the hot pool itself; only misses and the step's new rows are copied.
``compact``: see :mod:`vllm_kvoffload.sparse.compact`.
"""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True)
class Delivered:
    """Rows for the attention of the T' decoding query tokens, and what :class:`AttendPart` says of them.

    Attributes:
        rows: [R, P] as bytes, or what stands for a pool.
        indices: int [T', K], flat number of the row of every chosen position, -1 for none.
        tokens: int [T'], query tokens of the step.
        pool_rows: int32 [T'], the pool's row that a token's indices lie in.
        row_slots: P.
    """

    rows: Rows
    indices: torch.Tensor
    tokens: torch.Tensor
    pool_rows: torch.Tensor
    row_slots: int


class Delivery(Protocol):
    """Decode's way from choice to rows, for all layers of one worker."""

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> None:
        """Plans a group's step. ``topk``: int32 [T, K], the choices of all query tokens."""

    def deliver(self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState) -> Delivered:
        """What attention of the layer reads. ``new_rows``: [T] as bytes, which nobody changes any more.

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


@dataclass(frozen=True)
class DevicePlanning:
    """Plans that a platform makes on its device instead of the host.

    device: where residencies are kept. delivery: makes the delivery that plans there.
    """

    device: torch.device
    delivery: Callable[[DecodeParts], Delivery]


def decoders_choice(topk: torch.Tensor, step: StepState) -> torch.Tensor:
    """int32 [T', K] in host memory, the choices of the decoding query tokens."""
    return topk.index_select(0, step.decode_tokens.to(topk.device)).cpu()


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
        chosen = decoders_choice(topk, step)
        ops.dsa_plan(
            chosen,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_rows,
            pool.residency,
            self._plan,
            self._workspace,
        )
        slots = self._plan.slots[: len(chosen)]
        self._indices = (slots + step.first_slots).masked_fill_(slots < 0, -1)
        self._misses = count_plan(self._parts.stats, self._plan)

    def deliver(self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState) -> Delivered:
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
        rows, row_ops = hot.layers[layer], store.row_ops
        fresh = row_ops.take(new_rows, step.decode_tokens)
        row_ops.write_rows(rows, step.token_rows, fresh, plan.new_slots[: len(step.token_rows)])
        pool.unserved -= 1
        return Delivered(rows, self._indices, step.decode_tokens, step.token_rows, hot.num_slots)

    def join(self) -> bool:
        self._prefetch.join()
        return True

    @property
    def nbytes(self) -> int:
        return self._plan.nbytes
