"""Decode by the AscendC kernels: plans, fetches and new rows are queued on the device; no layer waits for
them.

The deliveries of `vllm_kvoffload.sparse` plan on the host, so each index group's top-k indices must be
copied there first. Here top-k indices, plan and lists of misses stay on the device. Results are
bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.ascend.kernels import (
    DeviceBatch,
    DeviceCounters,
    RowKernels,
    StepBuffers,
)
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV, library_path
from vllm_kvoffload.platforms.ascend.rows import SplitRows
from vllm_kvoffload.runtime.npu import NPURuntime
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.delivery import DecodeParts, Delivery, DevicePlanning
from vllm_kvoffload.sparse.hot_pool import GroupPool
from vllm_kvoffload.sparse.step import PoolSlots
from vllm_kvoffload.sparse.step_state import StepState

BUFFERS = 2
"""Selections and plans of compact delivery: the next layer is gathered while the previous one is
installed."""


class _KernelDelivery(Delivery):
    """Common part of both deliveries: the plan, and the step's batch on the device."""

    def __init__(
        self,
        parts: DecodeParts,
        kernels: Any,
        device: torch.device,
        topk: int,
        max_query_len: int,
        table_width: int,
    ) -> None:
        super().__init__(parts)
        requests = parts.partitions.total
        assert isinstance(parts.runtime, NPURuntime)
        self._kernels = kernels
        self._device = device
        self._shape = (requests * max_query_len, requests, topk, max_query_len)
        self._moves = RowKernels(kernels, requests, parts.host_rows.row_ops.zeros(0), device)
        self._counters = DeviceCounters(parts.stats, device, parts.runtime.current_stream().record)
        self._lane = parts.runtime.lane()
        self._buffers = StepBuffers(requests * max_query_len, requests, table_width, device)
        self._step: StepState | None = None
        self._batch: DeviceBatch | None = None

    def _on(self, step: StepState) -> DeviceBatch:
        if self._batch is None or step is not self._step:
            self._step, self._batch = step, self._buffers.fill(step)
        return self._batch

    def _decode_topk(self, topk: torch.Tensor, step: StepState) -> torch.Tensor:
        return topk.index_select(0, self._on(step).tokens)

    def _tokens(self, step: StepState) -> torch.Tensor:
        return self._on(step).tokens

    def _plan_group(
        self, pool: GroupPool, decode_topk: torch.Tensor, on: DeviceBatch, out: ops.PlanOut
    ) -> None:
        kept = pool.residency
        self._kernels.dsa_plan(
            decode_topk,
            on.start_loc,
            on.seq_lens,
            on.partitions,
            kept.tags,
            kept.ages,
            kept.hands,
            kept.high,
            kept.policy,
            *out.buffers,
        )

    def _taken(self, new_rows: SplitRows, on: DeviceBatch) -> SplitRows:
        rows: SplitRows = self._parts.host_rows.row_ops.take(new_rows, on.tokens)
        return rows

    def _try(self, out: ops.PlanOut, serve: Callable[[DeviceBatch], object]) -> None:
        """Plans and serves the largest step without any request, so that the kernels report sizes they
        cannot handle.

        Raises ConfigError.
        """
        tokens, requests, topk, queries = self._shape
        dummy = self._on(StepState.dummy(requests, queries))
        decode_topk = torch.full((tokens, topk), -1, dtype=torch.int32, device=self._device)
        try:
            self._plan_group(self._parts.hot.groups[0], decode_topk, dummy, out)
            serve(dummy)
        except ValueError as error:
            rule, fix = f"its kernels can't serve this engine: {error}", "change that, or do without them"
            raise ConfigError(KERNELS_ENV, library_path(), rule, fix) from error


class KernelDelivery(_KernelDelivery):
    """In-place :class:`Delivery`: attention reads the hot pool directly.

    Followers' misses are fetched on a separate stream as soon as the owner has its rows.

    Args:
        parts: of an `NPURuntime`, with residencies on the device.
        kernels: torch.ops.kvoffload with the AscendC library.
        topk: K. max_query_len: query tokens per request and step. table_width: blocks of the longest
        request.

    Raises ConfigError if the kernels do not support these sizes.
    """

    def __init__(
        self,
        parts: DecodeParts,
        kernels: Any,
        device: torch.device,
        *,
        topk: int,
        max_query_len: int,
        table_width: int,
    ) -> None:
        super().__init__(parts, kernels, device, topk, max_query_len, table_width)
        self._out = ops.PlanOut(*self._shape, device=device)
        self._fetches: dict[int, Any] = {}  # events, by layer
        self._try(self._out, self._serve_dummy)

    def _serve_dummy(self, on: DeviceBatch) -> None:
        host_rows = self._parts.host_rows
        self._fetch(0, on, None, misses=True)
        self._moves.write_host(host_rows.layers[0], host_rows.row_ops.zeros(len(on.tokens)), on.slots)

    def _plan(self, pool: GroupPool, decode_topk: torch.Tensor, step: StepState) -> PoolSlots:
        on = self._on(step)
        self._plan_group(pool, decode_topk, on, self._out)
        self._counters.count_plan(self._out)
        return PoolSlots(self._out.slots[: len(decode_topk)], on.token_partitions, self._parts.hot.num_slots)

    def _serve(self, layer: int, pool: GroupPool, new_rows: SplitRows, step: StepState) -> SplitRows:
        on, host_rows, hot = self._on(step), self._parts.host_rows, self._parts.hot
        fetch = self._fetches.pop(layer, None)
        if fetch is not None:
            self._lane.join(fetch)
        elif step.decode_prefix_in_step:
            host_rows.await_layer(layer)
        fresh = self._taken(new_rows, on)
        self._counters.count_fetch(self._fetch(layer, on, fresh, misses=fetch is None))
        if step.in_graph and host_rows.writer:
            self._counters.check_copies(self._moves.write_host(host_rows.layers[layer], fresh, on.slots))
        if layer == pool.group.owner and not step.decode_prefix_in_step:
            for follower in pool.group.layers[1:]:
                self._fetches[follower] = self._lane.submit(self._prefetch, follower, on)
        rows: SplitRows = hot.layers[layer]
        return rows

    def place(self, step: StepState) -> DeviceBatch:
        """Copies a step to the device before a graph replays it or is captured from its layers."""
        self._counters.add_up()  # only the graph's own reports are to be added up in it
        return self._on(step)

    def end_step(self) -> None:
        """All layers of a step in a graph have been queued: ends the graph's work."""
        self._counters.add_up()

    def replayed(self) -> None:
        """A graph has run all layers of the step on the device."""
        self._counters.replayed()

    def _prefetch(self, layer: int, on: DeviceBatch) -> None:
        self._counters.count_fetch(self._fetch(layer, on, None, misses=True))

    def _fetch(
        self, layer: int, on: DeviceBatch, new_rows: SplitRows | None, *, misses: bool
    ) -> torch.Tensor:
        host, hot = self._parts.host_rows.layers[layer], self._parts.hot.layers[layer]
        return self._moves.fetch(host, hot, on, self._out, new_rows, misses=misses)

    def _join(self) -> bool:
        for fetch in self._fetches.values():
            self._lane.join(fetch)
        self._fetches.clear()
        self._counters.advance()
        return True

    @property
    def nbytes(self) -> int:
        return self._out.nbytes


class KernelCompactDelivery(_KernelDelivery):
    """Compact :class:`Delivery` (see `vllm_kvoffload.sparse.compact`) with our own plan.

    Attention reads a layer's selected rows from a selection; meanwhile a separate stream installs them in
    the pool, before the next step joins. Arguments and errors: see :class:`KernelDelivery`.
    """

    def __init__(
        self,
        parts: DecodeParts,
        kernels: Any,
        device: torch.device,
        *,
        topk: int,
        max_query_len: int,
        table_width: int,
    ) -> None:
        super().__init__(parts, kernels, device, topk, max_query_len, table_width)
        zeros, tokens = parts.host_rows.row_ops.zeros, self._shape[0]
        self._plans = [ops.PlanOut(*self._shape, compact=True, device=device) for _ in range(BUFFERS)]
        self._selections: list[SplitRows] = [zeros(tokens, topk) for _ in range(BUFFERS)]
        self._plan_number = self._selection_number = 0
        self._plan_users: list[list[int]] = [[] for _ in range(BUFFERS)]
        self._selection_users: list[int | None] = [None] * BUFFERS
        # By layer: the event of its install, and the tensors it reads besides the buffers.
        self._installs: dict[int, tuple[Any, SplitRows]] = {}
        self._owners = torch.arange(tokens, dtype=torch.int32, device=device)
        self._try(self._plans[0], self._serve_dummy)

    def _serve_dummy(self, on: DeviceBatch) -> None:
        plan, selection = self._plans[0], self._selections[0]
        host, hot = self._parts.host_rows.layers[0], self._parts.hot.layers[0]
        rows = self._parts.host_rows.row_ops.zeros(len(on.tokens))
        self._moves.gather(host, hot, on, plan, rows, selection)
        self._moves.install(selection, hot, on, plan)
        self._moves.fetch(host, hot, on, plan, rows, misses=False)

    def _plan(self, pool: GroupPool, decode_topk: torch.Tensor, step: StepState) -> PoolSlots:
        number = self._plan_number = (self._plan_number + 1) % BUFFERS
        for layer in self._plan_users[number]:
            self._await(layer)
        self._plan_users[number].clear()
        on, plan = self._on(step), self._plans[number]
        self._plan_group(pool, decode_topk, on, plan)
        self._counters.count_plan(plan)
        kinds = plan.kinds[: len(decode_topk), :, 0]
        found = (kinds >= ops.Kind.POOL_HIT) & (kinds <= ops.Kind.DECODE_WINDOW)
        places = torch.arange(decode_topk.shape[1], dtype=torch.int32, device=self._device).expand(
            decode_topk.shape
        )
        return PoolSlots(
            places.masked_fill(~found, -1), self._owners[: len(decode_topk)], decode_topk.shape[1]
        )

    def _serve(self, layer: int, pool: GroupPool, new_rows: SplitRows, step: StepState) -> SplitRows:
        on, host_rows, hot = self._on(step), self._parts.host_rows, self._parts.hot.layers[layer]
        plan = self._plans[self._plan_number]
        if step.decode_prefix_in_step:
            host_rows.await_layer(layer)
        selection, fresh = self._take_selection(layer), self._taken(new_rows, on)
        host = host_rows.layers[layer]
        self._counters.count_fetch(self._moves.gather(host, hot, on, plan, fresh, selection))
        event = self._lane.submit(self._install, layer, on, plan, fresh, selection)
        self._installs[layer] = (event, fresh)
        self._plan_users[self._plan_number].append(layer)
        count = len(on.tokens)
        return SplitRows([part[:count] for part in selection.parts])

    def _install(
        self, layer: int, on: DeviceBatch, plan: ops.PlanOut, new_rows: SplitRows, selection: SplitRows
    ) -> None:
        host, hot = self._parts.host_rows.layers[layer], self._parts.hot.layers[layer]
        self._counters.check_copies(self._moves.install(selection, hot, on, plan))
        self._counters.check_copies(self._moves.fetch(host, hot, on, plan, new_rows, misses=False))

    def _await(self, layer: int) -> None:
        """Makes the compute stream wait for a layer's last install, which frees its plan and selection."""
        install = self._installs.pop(layer, None)
        if install is not None:
            self._lane.join(install[0])

    def _take_selection(self, layer: int) -> SplitRows:
        number = self._selection_number = (self._selection_number + 1) % BUFFERS
        user = self._selection_users[number]
        if user is not None:
            self._await(user)
        self._selection_users[number] = layer
        return self._selections[number]

    def _join(self) -> bool:
        for layer in list(self._installs):
            self._await(layer)
        self._counters.advance()
        return True

    @property
    def nbytes(self) -> int:
        parts = [part for selection in self._selections for part in selection.parts]
        return sum(part.nbytes for part in parts) + sum(plan.nbytes for plan in self._plans)


def device_planning(
    kernels: Any, device: torch.device, geometry: KVGeometry, config: SparseOffloadConfig, table_width: int
) -> DevicePlanning:
    """Creates a delivery by the kernels as the options say. Arguments: see :class:`KernelDelivery`."""
    kind = KernelCompactDelivery if config.delivery == "compact" else KernelDelivery
    topk, queries = geometry.index_topk, 1 + geometry.num_speculative_tokens

    def delivery(parts: DecodeParts) -> Delivery:
        return kind(parts, kernels, device, topk=topk, max_query_len=queries, table_width=table_width)

    return DevicePlanning(device, delivery)
