"""Deliveries: bring the rows named by a plan to attention.

``in_place``: attention reads the hot pool itself; only misses and the step's new rows are copied.
``compact``: see :mod:`vllm_kvoffload.sparse.compact`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.hot_pool import GroupPool, HotPool
from vllm_kvoffload.sparse.partitions import PartitionLease, PartitionTable
from vllm_kvoffload.sparse.prefetch import FollowerPrefetch, fetch_misses
from vllm_kvoffload.sparse.row_ops import Rows
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step import AttendPart, PoolSlots
from vllm_kvoffload.sparse.step_state import StepState
from vllm_kvoffload.trace.recorder import TraceRecorder


@dataclass(frozen=True)
class DecodeParts:
    """Dependencies of a delivery. recorder: gets the decoding requests' top-k ids, None for no trace."""

    host_rows: HostRows
    hot: HotPool
    partitions: PartitionTable
    runtime: Runtime
    stats: OffloadStats
    deadline_s: float
    recorder: TraceRecorder | None = None


class Delivery(ABC):
    """Turns top-k ids into rows for decode, for all layers of one worker.

    Owns the life of an index group within a step: the owner layer plans it, and every layer of the group is
    served from that plan. If the step fails in between, the partitions in the plan are reset.
    """

    def __init__(self, parts: DecodeParts) -> None:
        self._parts = parts
        self._group: GroupPool | None = None  # whose plan is in use
        self._pool_slots: PoolSlots | None = None  # of that plan
        self._layers_to_serve: dict[int, int] = {}  # by planned group: layers still without its rows

    def deliver(self, layer: int, topk: torch.Tensor, new_rows: Rows, step: StepState) -> AttendPart:
        """Delivers one layer's rows for the decoding query tokens, planning first if it owns its group.

        Args:
            topk: int32 [T, K], top-k ids of all query tokens. new_rows: the step's rows of the layer, [T];
                the caller must not change them afterwards.

        Raises:
            RuntimeError: the layer is a follower and its group isn't the last one planned in this step.
            TaskFailedError, WaitTimeoutError: rows could not be fetched.
        """
        pool, row_ops = self._parts.hot.pool_of(layer), self._parts.host_rows.row_ops
        if layer == pool.group.owner:
            self._begin_group(pool, topk, step)
        elif self._group is not pool:
            raise RuntimeError(
                f"layer {layer} runs, but layer {pool.group.owner} has not planned for it in this step"
            )
        rows = self._serve(layer, pool, row_ops.as_bytes(new_rows), step)
        self._layers_to_serve[pool.group.index] -= 1
        assert self._pool_slots is not None
        return AttendPart(self._tokens(step), row_ops.attended(rows, new_rows), self._pool_slots)

    def _begin_group(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> None:
        decode_topk, recorder = self._decode_topk(topk, step), self._parts.recorder
        if recorder is not None:
            lengths = step.decode_start_loc, step.decode_seq_lens
            recorder.record(pool.group.index, decode_topk.cpu(), *lengths, step.decode_ids)
        self._pool_slots = self._plan(pool, decode_topk, step)
        self._layers_to_serve[pool.group.index] = len(pool.group.layers)
        self._group = pool

    @property
    def partly_served(self) -> set[int]:
        """Groups that are planned but not yet served in all layers."""
        return {group for group, layers in self._layers_to_serve.items() if layers}

    def begin_graph(self, layers: Sequence[int]) -> None:
        """Called before a graph of these layers is launched or captured."""
        for pool in self._parts.hot.groups:
            if pool.group.owner in layers:
                self._layers_to_serve[pool.group.index] = len(pool.group.layers)

    def end_graph(self) -> None:
        """Called after the launch: marks every layer as served."""
        self._layers_to_serve.clear()

    def settle(self, leases: Sequence[PartitionLease]) -> None:
        """Called between steps: waits for all copies in flight and cleans up after a failed step.

        A plan marks rows as resident before the group's layers have fetched them. Where a fetch is missing,
        this resets the residency of the leases' partitions.

        Raises:
            WaitTimeoutError: a copy is stuck.
        """
        complete = self._join()
        partly_served = self.partly_served
        for pool in self._parts.hot.groups:
            if pool.group.index in partly_served or not complete:
                for lease in leases:
                    pool.residency.reset_partition(lease.partition)
        self._layers_to_serve.clear()
        self._group = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device bytes of the delivery's own buffers."""

    @abstractmethod
    def _decode_topk(self, topk: torch.Tensor, step: StepState) -> torch.Tensor:
        """int32 [T', K], top-k ids of the decoding query tokens, on the device that plans."""

    @abstractmethod
    def _plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> PoolSlots:
        """Plans a group's step. The result is valid until the next plan."""

    @abstractmethod
    def _serve(self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState) -> Rows:
        """Copies a layer's rows to their planned slots; returns the plan's pool, as bytes."""

    @abstractmethod
    def _tokens(self, step: StepState) -> torch.Tensor:
        """int [T'], the decoding query tokens of the step, on attention's device."""

    @abstractmethod
    def _join(self) -> bool:
        """Waits for all copies in flight. False if the hot pools may disagree with their residencies.

        Raises:
            WaitTimeoutError: a copy is stuck.
        """


class HostDelivery(Delivery):
    """A delivery that plans on the host."""

    def _decode_topk(self, topk: torch.Tensor, step: StepState) -> torch.Tensor:
        return topk.index_select(0, step.decode_tokens.to(topk.device)).cpu()

    def _tokens(self, step: StepState) -> torch.Tensor:
        return step.decode_tokens


@dataclass(frozen=True)
class DevicePlanning:
    """Makes a platform plan on its device instead of the host.

    device: holds the residencies. delivery: factory of the delivery that plans there.
    """

    device: torch.device
    delivery: Callable[[DecodeParts], Delivery]


def count_plan(stats: OffloadStats, plan: ops.PlanOut) -> int:
    """Adds a plan to the totals; returns its misses."""
    hits, misses, new, displaced = plan.stats[:4].tolist()
    stats.hits += hits
    stats.misses += misses
    stats.new_rows += new
    stats.displaced += displaced
    return int(misses)


class InPlaceDelivery(HostDelivery):
    """Attention reads the hot pool directly. Copies misses and new rows; prefetches the followers' misses."""

    def __init__(self, parts: DecodeParts, index_topk: int, max_query_len: int) -> None:
        super().__init__(parts)
        requests = parts.partitions.total
        # A plan is consumed by the layers of its group before the next group plans: one output serves all.
        self._out = ops.PlanOut(requests * max_query_len, requests, index_topk, max_query_len)
        self._workspace = ops.Workspace()
        self._prefetch = FollowerPrefetch(
            parts.host_rows, parts.hot, parts.partitions, parts.runtime, parts.deadline_s
        )
        self._misses = 0  # of the current plan

    def _plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> PoolSlots:
        ops.dsa_plan(
            topk,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_partitions,
            pool.residency,
            self._out,
            self._workspace,
        )
        self._misses = count_plan(self._parts.stats, self._out)
        return PoolSlots(self._out.slots[: len(topk)], step.token_partitions, self._parts.hot.num_slots)

    def _serve(self, layer: int, pool: GroupPool, new_rows: Rows, step: StepState) -> Rows:
        host_rows, hot, plan = self._parts.host_rows, self._parts.hot, self._out
        fetched = self._prefetch.take(layer)
        if fetched is None:
            if step.decode_prefix_in_step:
                host_rows.await_layer(layer)
            fetched = fetch_misses(host_rows, hot, layer, step, plan, step.decode_partitions)
        self._parts.stats.fetched_bytes += fetched
        # A prefix computed in this step isn't in the host pool yet. Without misses, a prefetch would
        # only wake a thread.
        if layer == pool.group.owner and self._misses and not step.decode_prefix_in_step:
            self._prefetch.start(pool.group.layers[1:], plan, step)
        rows, row_ops = hot.layers[layer], host_rows.row_ops
        fresh = row_ops.take(new_rows, step.decode_tokens)
        row_ops.write_rows(rows, step.token_partitions, fresh, plan.new_slots[: len(step.token_partitions)])
        return rows

    def _join(self) -> bool:
        self._prefetch.join()
        return True

    @property
    def nbytes(self) -> int:
        return self._out.nbytes
