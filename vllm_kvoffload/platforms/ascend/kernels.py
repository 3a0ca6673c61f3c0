"""Shared by the deliveries that plan on the device: the AscendC kernels, a step's batch, counters.

All work is queued on the device. A step's host data goes over in one transfer; results return
asynchronously, and the host never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_kvoffload import ops
from vllm_kvoffload.ops.types import LINE_INTS
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV, library_path
from vllm_kvoffload.platforms.ascend.rows import PortableRows, Scatter, SplitRows, check_range
from vllm_kvoffload.runtime.base import Event
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step_state import StepState

FETCHED, REFUSED = 0, 1  # columns of a report


def load_kernels() -> Any:
    """Returns torch.ops.kvoffload with the AscendC kernels, None if they were not built.

    Raises ConfigError if KVOFFLOAD_ASCEND_OPS names a library that is missing, or the library does not load.
    """
    path = library_path()
    if not path:
        return None
    if not Path(path).is_file():
        raise ConfigError(
            KERNELS_ENV, path, "no such file", "unset it and run kvoffload build-ops, or correct it"
        )
    from vllm_kvoffload.ops import torch_ops  # noqa: F401  # declares dsa_plan, which the library implements

    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        fix = "run kvoffload build-ops again, with the CANN and torch_npu that are installed"
        raise ConfigError(KERNELS_ENV, path, f"does not load: {error}", fix) from error
    return torch.ops.kvoffload


def starts_of(sizes: Iterable[int]) -> list[int]:
    """Returns the offsets of consecutive int32 tensors of these sizes, and their end.

    Each starts on a line, as the kernels require.
    """
    return list(accumulate((-(-size // LINE_INTS) * LINE_INTS for size in sizes), initial=0))


class DeviceInts:
    """int32 tensors on the device at fixed addresses, each line-aligned.

    sizes: maximum number of elements of each tensor.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._starts = starts_of(sizes)
        self._there = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies host tensors, one per size, into place and returns the device tensors.

        One asynchronous transfer, queued on the stream: work queued earlier still reads the old contents.
        """
        last = self._starts[len(tensors) - 1] + tensors[-1].numel()
        packed = torch.zeros(last, dtype=torch.int32)
        for tensor, start in zip(tensors, self._starts, strict=False):
            packed[start : start + tensor.numel()] = tensor.flatten()
        if self._there.device.type != "cpu":
            packed = packed.pin_memory()
        self._there[:last].copy_(packed, non_blocking=True)
        return [
            self._there[start : start + tensor.numel()].view(tensor.shape)
            for tensor, start in zip(tensors, self._starts, strict=False)
        ]


@dataclass(frozen=True)
class DeviceBatch:
    """The decoding requests of a :class:`StepState` on the device, all int32, under the same names."""

    tokens: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    token_partitions: torch.Tensor
    start_loc: torch.Tensor
    seq_lens: torch.Tensor
    partitions: torch.Tensor
    block_table: torch.Tensor


class StepBuffers:
    """Holds a step's :class:`DeviceBatch` at the same addresses in every step, as graphs require.

    tokens, requests: of the largest step. table_width: blocks of the longest request.
    """

    def __init__(self, tokens: int, requests: int, table_width: int, device: torch.device) -> None:
        self._width = table_width
        # The largest is last, so that no step transfers more of it than it needs.
        sizes = [*[tokens] * 4, requests + 1, requests, requests, requests * table_width]
        self._ints = DeviceInts(sizes, device)

    def fill(self, step: StepState) -> DeviceBatch:
        """Queues the copy on the compute stream, after everything that reads the previous step."""
        table = step.decode_block_table
        fields = (
            step.decode_tokens,
            step.decode_slots,
            step.ends,
            step.token_partitions,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_partitions,
            pad(table, (0, self._width - table.shape[1])),
        )
        return DeviceBatch(*self._ints.put(fields))


class DeviceCounters:
    """Counters raised by the kernels, as far as they have arrived: one or two steps late.

    Args:
        stats: receives the totals. record: records an event of the compute stream.
    """

    def __init__(self, stats: OffloadStats, device: torch.device, record: Callable[[str], Event]) -> None:
        self._stats = stats
        self._record = record
        plan = len(ops.STATS)
        self._sums = torch.zeros(plan + 2, dtype=torch.int64, device=device)
        self._plans, self._fetched, self._refused = torch.split(self._sums, [plan, 1, 1])
        self._fetches: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._counted = False
        self._read = torch.zeros(plan + 2, dtype=torch.int64)
        if device.type != "cpu":
            self._read = self._read.pin_memory()
        self._reading: Event | None = None

    def count_plan(self, plan: ops.PlanOut) -> None:
        """Adds the counts of a plan that was just queued."""
        self._counted = True
        self._plans.add_(plan.stats)

    def count_fetch(self, reports: torch.Tensor) -> None:
        """Adds the reports, int64 [cores, 8], of a call that was just queued and reads the host pool."""
        self._fetches.append(reports)
        self._copies.append(reports)

    def check_copies(self, reports: torch.Tensor) -> None:
        """Like `count_fetch`, for a call that only moves rows on the device."""
        self._copies.append(reports)

    def add_up(self) -> None:
        """Adds the reports to the sums, on the device. All streams must have been joined."""
        for total, reports, column in (
            (self._fetched, self._fetches, FETCHED),
            (self._refused, self._copies, REFUSED),
        ):
            if reports:
                total.add_(torch.stack(reports)[:, :, column].sum())
                reports.clear()

    def replayed(self) -> None:
        """A graph that contains the calls and :meth:`add_up` was queued."""
        self._counted = True

    def advance(self) -> None:
        """Takes the sums that have arrived, and requests the next ones. All streams must have been joined.

        Raises RuntimeError if kernels were given blocks or slots that do not exist.
        """
        if self._reading is not None and self._reading.query():
            self._reading = None
            self._take(self._read.tolist())
        if self._counted and self._reading is None:
            self._counted = False
            self.add_up()
            self._read.copy_(self._sums, non_blocking=True)
            self._reading = self._record("counters")

    def _take(self, sums: list[int]) -> None:
        stats = self._stats
        stats.hits, stats.misses, stats.new_rows, stats.displaced = sums[:4]
        stats.fetched_bytes, refused = sums[-2:]
        if refused:
            raise RuntimeError(
                f"the AscendC kernels left {refused} rows alone whose block or slot is out of bounds: "
                "attention has read invalid rows"
            )


class KernelRows(PortableRows):
    """Moves rows by torch, except that a kernel writes new ones to the host pool.

    Args:
        kernels: torch.ops.kvoffload with the AscendC library; other arguments as in :class:`PortableRows`.
    """

    def __init__(
        self,
        row_bytes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        scatter: Scatter,
        kernels: Any,
    ) -> None:
        super().__init__(row_bytes, dtype, device, scatter)
        self._kernels = kernels

    def host_write(self, host: SplitRows, new_rows: SplitRows, slot_mapping: torch.Tensor) -> None:
        """Queues the kernel on the current stream. Raises ValueError for a slot beyond the pool."""
        blocks, block_size = host.parts[0].shape[:2]
        check_range("slot_mapping", slot_mapping[slot_mapping >= 0], blocks * block_size)
        (slots,) = DeviceInts([len(slot_mapping)], self._device).put([slot_mapping])
        # Its report counts invalid slots, of which there are none after this check.
        self._kernels.host_write_rows(list(host.addresses), blocks, block_size, list(new_rows.parts), slots)


class RowKernels:
    """Calls the kernels that move rows, with this platform's row tensors."""

    def __init__(self, kernels: Any, requests: int, none: SplitRows, device: torch.device) -> None:
        self._kernels = kernels
        self._no_misses = torch.zeros(requests, dtype=torch.int32, device=device)
        self._none = none
        self._no_slots = torch.empty(0, dtype=torch.int32, device=device)

    def fetch(
        self,
        host: SplitRows,
        hot: SplitRows,
        on: DeviceBatch,
        plan: ops.PlanOut,
        new_rows: SplitRows | None,
        *,
        misses: bool,
    ) -> torch.Tensor:
        """Copies a layer's misses from the host pool and new rows [T'] into their slots; either may be
        omitted. Returns the reports.
        """
        report: torch.Tensor = self._kernels.dsa_serve_rows(
            list(host.addresses),
            *host.parts[0].shape[:2],
            list(hot.parts),
            list((self._none if new_rows is None else new_rows).parts),
            on.block_table,
            on.start_loc,
            on.partitions,
            plan.miss_ids,
            plan.miss_slots,
            plan.miss_counts if misses else self._no_misses,
            self._no_slots if new_rows is None else plan.new_slots,
        )
        return report

    def gather(
        self,
        host: SplitRows,
        hot: SplitRows,
        on: DeviceBatch,
        plan: ops.PlanOut,
        new_rows: SplitRows,
        selection: SplitRows,
    ) -> torch.Tensor:
        """Gathers the rows of all top-k positions of a layer into the selection. Returns the reports."""
        report: torch.Tensor = self._kernels.dsa_serve_compact_rows(
            list(host.addresses),
            *host.parts[0].shape[:2],
            list(hot.parts),
            list(new_rows.parts),
            list(selection.parts),
            plan.kinds,
            on.start_loc,
            on.seq_lens,
            on.block_table,
            on.partitions,
        )
        return report

    def write_host(self, host: SplitRows, new_rows: SplitRows, slots: torch.Tensor) -> torch.Tensor:
        """Copies new rows [T'] that have a slot into the host pool. Returns the reports."""
        report: torch.Tensor = self._kernels.host_write_rows(
            list(host.addresses), *host.parts[0].shape[:2], list(new_rows.parts), slots
        )
        return report

    def install(
        self, selection: SplitRows, hot: SplitRows, on: DeviceBatch, plan: ops.PlanOut
    ) -> torch.Tensor:
        """Copies the selection's misses into their slots. Returns the reports."""
        report: torch.Tensor = self._kernels.dsa_install_rows(
            list(selection.parts),
            list(hot.parts),
            on.start_loc,
            on.partitions,
            plan.miss_positions,
            plan.miss_slots,
            plan.miss_counts,
        )
        return report
