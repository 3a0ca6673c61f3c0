"""Compact delivery: attention reads a contiguous copy of the top-k rows; the pool is refilled afterwards.

Exists to reproduce and compare published behaviour. A layer's rows, hits included, are gathered into a
selection buffer; while attention reads the buffer, a side stream installs the misses into the hot pool. With
the ``fifo`` policy and 16 ways the plan is exactly the published one (`ops.conformance`), which changes no
residency until the group's last layer has been served; otherwise it is this project's own plan.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from vllm_kvoffload import ops
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.ops import conformance
from vllm_kvoffload.runtime.base import Event, join_events
from vllm_kvoffload.sparse.delivery import DecodeParts, HostDelivery, count_plan
from vllm_kvoffload.sparse.hot_pool import GroupPool
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step import PoolSlots
from vllm_kvoffload.sparse.step_state import StepState

STREAM = "install"
BUFFERS = 2
"""Selections and plans in use at once: the next layer is gathered while the last one is installed."""


class Planner(Protocol):
    """Plans a group's step into buffers that stay valid until the next plan."""

    kinds: torch.Tensor
    miss_positions: torch.Tensor
    miss_slots: torch.Tensor
    miss_counts: torch.Tensor

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState, stats: OffloadStats) -> None: ...

    def reads_own_rows(self, step: StepState) -> bool:
        """Whether a miss may be a row written in this step."""

    def commit(self, pool: GroupPool, step: StepState, partitions: torch.Tensor) -> None:
        """Called after the group's last install. ``partitions``: int32 [N'], -1 where nothing is to
        change."""

    def new_slots(self) -> torch.Tensor | None:
        """int32 [T], slots of the step's new tokens; None when they are not kept."""

    @property
    def nbytes(self) -> int: ...


class OwnPlanner:
    """The in-place plan, extended by the location of each row for the gather."""

    def __init__(self, max_tokens: int, max_requests: int, topk: int, max_query_len: int) -> None:
        self._out = out = ops.PlanOut(max_tokens, max_requests, topk, max_query_len, compact=True)
        self._workspace = ops.Workspace()
        self.kinds, self.miss_positions = out.kinds, out.miss_positions
        self.miss_slots, self.miss_counts = out.miss_slots, out.miss_counts

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState, stats: OffloadStats) -> None:
        ops.dsa_plan(
            topk,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_partitions,
            pool.residency,
            self._out,
            self._workspace,
        )
        count_plan(stats, self._out)

    def reads_own_rows(self, step: StepState) -> bool:  # noqa: ARG002
        return False

    def commit(self, pool: GroupPool, step: StepState, partitions: torch.Tensor) -> None:
        pass  # the plan has already updated the residency

    def new_slots(self) -> torch.Tensor | None:
        return self._out.new_slots

    @property
    def nbytes(self) -> int:
        return self._out.nbytes


class PublishedPlanner:
    """The published plan. It keeps no new tokens, and treats token 0 as old even in the step that adds it."""

    def __init__(
        self, max_tokens: int, max_requests: int, topk: int, max_query_len: int, max_model_len: int
    ) -> None:
        self._out = out = conformance.ConformanceOut(max_tokens, max_requests, topk, max_query_len)
        self._id_range = max_model_len
        self.kinds, self.miss_positions = out.kinds, out.miss_positions
        self.miss_slots, self.miss_counts = out.miss_slots, out.miss_counts

    def plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState, stats: OffloadStats) -> None:
        conformance.plan(
            topk,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_partitions,
            pool.residency,
            self._id_range,
            self._out,
        )
        self._replay(pool, step, step.decode_partitions, metadata_update=False)
        kinds, numbers = self.kinds[: len(topk)].unbind(-1)
        slots = (numbers + step.token_partitions.long().unsqueeze(1) * pool.residency.tags[0].numel())[
            kinds == ops.Kind.POOL_HIT
        ]
        stats.hits += np.unique(slots.numpy()).size  # each row counts once, as in the other plans
        stats.misses += int(self.miss_counts[: len(step.decode_partitions)].sum())

    def reads_own_rows(self, step: StepState) -> bool:
        lengths = step.decode_start_loc.diff()
        return bool((step.decode_seq_lens == lengths).any())

    def commit(self, pool: GroupPool, step: StepState, partitions: torch.Tensor) -> None:
        self._replay(pool, step, partitions, metadata_update=True)

    def new_slots(self) -> torch.Tensor | None:
        return None

    def _replay(
        self, pool: GroupPool, step: StepState, partitions: torch.Tensor, *, metadata_update: bool
    ) -> None:
        conformance.install_slots(
            step.decode_start_loc,
            partitions,
            pool.residency,
            self._id_range,
            self._out,
            metadata_update=metadata_update,
        )

    @property
    def nbytes(self) -> int:
        return self._out.nbytes


class CompactDelivery(HostDelivery):
    """Gathers a layer's top-k rows into a selection buffer, from which attention reads.

    Args:
        parts: pools and streams.
        geometry: layers and row bytes.
        max_query_len: query tokens of a request in a step. max_model_len: longest request, tokens.
        published: use the published plan.
    """

    def __init__(
        self,
        parts: DecodeParts,
        geometry: KVGeometry,
        *,
        max_query_len: int,
        max_model_len: int,
        published: bool,
    ) -> None:
        super().__init__(parts)
        requests, topk = parts.partitions.total, geometry.index_topk
        shape = (requests * max_query_len, requests, topk, max_query_len)
        self._planners: list[Planner] = [
            PublishedPlanner(*shape, max_model_len) if published else OwnPlanner(*shape)
            for _ in range(BUFFERS)
        ]
        self._selections = [
            torch.zeros((requests * max_query_len, topk, geometry.main_row_bytes), dtype=torch.uint8)
            for _ in range(BUFFERS)
        ]
        self._compute = parts.runtime.current_stream()
        self._stream = parts.runtime.stream(STREAM)
        self._installed: dict[int, Event] = {}  # by layer
        self._plan_users: list[list[int]] = [[] for _ in range(BUFFERS)]  # layers being installed from a plan
        self._selection_user: list[int | None] = [None] * BUFFERS
        self._plan_number = self._selection_number = 0

    def _plan(self, pool: GroupPool, topk: torch.Tensor, step: StepState) -> PoolSlots:
        self._plan_number = (self._plan_number + 1) % BUFFERS
        users = self._plan_users[self._plan_number]
        for layer in users:
            self._await(layer)
        users.clear()
        planner = self._planners[self._plan_number]
        planner.plan(pool, topk, step, self._parts.stats)
        kinds = planner.kinds[: len(topk), :, 0]
        found = (kinds >= ops.Kind.POOL_HIT) & (kinds <= ops.Kind.DECODE_WINDOW)
        # The selection has a partition for each query token, with its rows in the order of its top-k ids.
        places = torch.arange(kinds.shape[1]).expand_as(kinds)
        partitions = torch.arange(len(topk), dtype=torch.int32)
        return PoolSlots(places.masked_fill(~found, -1), partitions, kinds.shape[1])

    def _serve(self, layer: int, pool: GroupPool, new_rows: torch.Tensor, step: StepState) -> torch.Tensor:
        planner, host_rows = self._planners[self._plan_number], self._parts.host_rows
        if step.decode_prefix_in_step or planner.reads_own_rows(step):
            host_rows.await_layer(layer)
        self._await(layer)
        fresh = host_rows.row_ops.take(new_rows, step.decode_tokens)
        selection = self._take_selection(layer)[: len(fresh)]
        self._parts.stats.fetched_bytes += ops.dsa_serve_compact(
            planner.kinds,
            step.decode_start_loc,
            step.decode_seq_lens,
            host_rows.layers[layer],
            self._parts.hot.layers[layer],
            step.decode_block_table,
            step.decode_partitions,
            fresh,
            selection,
        )
        self._stream.wait_event(self._compute.record("selection"))
        self._stream.submit(
            self._install, layer, planner, pool, step, selection, fresh, label=f"install layer {layer}"
        )
        self._installed[layer] = self._stream.record(f"installed rows of layer {layer}")
        self._plan_users[self._plan_number].append(layer)
        return selection

    def _join(self) -> bool:
        complete = join_events(self._installed.values(), self._stream, self._parts.deadline_s)
        self._installed.clear()
        return complete

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self._selections) + sum(p.nbytes for p in self._planners)

    def _await(self, layer: int) -> None:
        """Waits for a layer's last install, after which its pool, plan and selection are free."""
        event = self._installed.get(layer)
        if event is not None:
            event.wait(self._parts.deadline_s)
            del self._installed[layer]

    def _take_selection(self, layer: int) -> torch.Tensor:
        number = self._selection_number = (self._selection_number + 1) % BUFFERS
        user = self._selection_user[number]
        if user is not None:
            self._await(user)
        self._selection_user[number] = layer
        return self._selections[number]

    def _install(
        self,
        layer: int,
        planner: Planner,
        pool: GroupPool,
        step: StepState,
        selection: torch.Tensor,
        new_rows: torch.Tensor,
    ) -> None:
        hot, starts = self._parts.hot.layers[layer], step.decode_start_loc
        partitions = self._parts.partitions.still_leased(step.decode_partitions, step.leases)
        ops.dsa_install(
            selection,
            starts,
            partitions,
            planner.miss_positions,
            planner.miss_slots,
            planner.miss_counts,
            hot,
        )
        slots = planner.new_slots()
        if slots is not None:
            slots = slots[: len(new_rows)]
            if partitions is not step.decode_partitions:
                slots = slots.masked_fill(partitions.repeat_interleave(starts.diff()) < 0, -1)
            ops.write_rows(hot, step.token_partitions, new_rows, slots)
        if layer == pool.group.layers[-1]:
            planner.commit(pool, step, partitions)
