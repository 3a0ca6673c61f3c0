"""torch.ops.kvoffload on the simulated NPU, with the interface of csrc/ascendc/torch/ops.cpp.

`CoreKernels` calls the C++ core, which equals the oracle; `TwinKernels` the AscendC kernels themselves, on
the CPU twin of a vector core. Both check what the binding checks, and launch on the current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vllm_kvoffload import ops
from vllm_kvoffload.ops import torch_ops

from tests.ascend.simulated_device import NPUTensor, plain, wrap  # isort: skip

PLAN = [
    "topk",
    "query_start_loc",
    "seq_lens",
    "rows",
    "tags",
    "ages",
    "hands",
    "high",
    "slots",
    "new_slots",
    "miss_ids",
    "miss_slots",
    "miss_counts",
    "stats",
    "kinds",
    "miss_positions",
]
LISTS = {
    "dsa_serve_rows": [
        "block_table",
        "query_start_loc",
        "rows",
        "miss_ids",
        "miss_slots",
        "miss_counts",
        "new_slots",
    ],
    "dsa_serve_compact_rows": ["kinds", "query_start_loc", "seq_lens", "block_table", "rows"],
    "dsa_install_rows": ["query_start_loc", "rows", "miss_positions", "miss_slots", "miss_counts"],
    "host_write_rows": ["slot_mapping"],
}
"""An operator's arguments after its lists of components, in order."""
CORES, REPORT_INTS, LINE = 5, 8, 64


class Kernels:
    """Common part of both: checks, streams, and host rows by address."""

    def __init__(self, npu: Any) -> None:
        self._npu = npu
        self.calls: list[str] = []

    def host_register(self, address: int, nbytes: int) -> int:  # noqa: ARG002
        return address

    def host_unregister(self, address: int) -> None:
        pass

    def _launch(self, name: str, *groups: Any) -> tuple[Any, NPUTensor]:
        """Checked plain tensors, and the reports to be."""
        self.calls.append(name)
        flat = [
            tensor for group in groups for tensor in (group if isinstance(group, (list, tuple)) else [group])
        ]
        places = {isinstance(tensor, NPUTensor) for tensor in flat}
        if len(places) != 1:
            raise ValueError(f"{name}: must be on the NPU")
        for tensor in flat:
            if not tensor.is_contiguous() or tensor.data_ptr() % LINE:
                raise ValueError(f"{name}: must be contiguous and begin on a line of {LINE} bytes")
            if tensor.dtype not in (torch.int32, torch.uint8, torch.int64):
                raise ValueError(f"{name}: wrong type {tensor.dtype}")
        with _disable_current_modes():
            return self._bare(groups, True in places)

    @staticmethod
    def _bare(groups: Any, on_npu: bool) -> tuple[Any, NPUTensor]:
        bare = [[plain(t) for t in g] if isinstance(g, (list, tuple)) else plain(g) for g in groups]
        with torch._C.DisableTorchFunction():
            reports = torch.zeros((CORES, REPORT_INTS), dtype=torch.int64)
        return (bare, reports), (wrap(reports) if on_npu else reports)

    def _queue(self, reports: torch.Tensor, work: Callable[[], object]) -> None:
        def kernel() -> None:
            reports.zero_()  # a graph's calls run again
            work()

        self._npu.launch(kernel)

    def dsa_plan(self, *arguments: Any) -> None:
        (bare, _), _ = self._launch("dsa_plan", *arguments[:8], *arguments[9:])
        for tensor in bare:
            assert tensor.dtype in (torch.int32, torch.uint8, torch.int64)
        self._npu.launch(lambda: self._plan(arguments[8], bare))

    def dsa_serve_rows(
        self, host: list[int], blocks: int, block_size: int, hot: Any, new_rows: Any, *lists: Any
    ) -> Any:
        (bare, reports), wrapped = self._launch("dsa_serve_rows", hot, new_rows, *lists)
        rows = host_rows(host, blocks, block_size, hot)
        self._queue(reports, lambda: self._serve(rows, reports, *bare))
        return wrapped

    def dsa_serve_compact_rows(
        self,
        host: list[int],
        blocks: int,
        block_size: int,
        hot: Any,
        new_rows: Any,
        selection: Any,
        *lists: Any,
    ) -> Any:
        (bare, reports), wrapped = self._launch("dsa_serve_compact_rows", hot, new_rows, selection, *lists)
        rows = host_rows(host, blocks, block_size, hot)
        self._queue(reports, lambda: self._gather(rows, reports, *bare))
        return wrapped

    def dsa_install_rows(self, selection: Any, hot: Any, *lists: Any) -> Any:
        (bare, reports), wrapped = self._launch("dsa_install_rows", selection, hot, *lists)
        self._queue(reports, lambda: self._install(reports, *bare))
        return wrapped

    def host_write_rows(
        self, host: list[int], blocks: int, block_size: int, new_rows: Any, slot_mapping: Any
    ) -> Any:
        (bare, reports), wrapped = self._launch("host_write_rows", new_rows, slot_mapping)
        rows = host_rows(host, blocks, block_size, new_rows)
        self._queue(reports, lambda: self._host_write(rows, reports, *bare))
        return wrapped


def host_rows(addresses: list[int], blocks: int, block_size: int, like: Any) -> list[torch.Tensor]:
    """Host rows by component, from addresses."""
    found = []
    with _disable_current_modes():
        for address, part in zip(addresses, like, strict=True):
            assert address
            shape = (blocks, block_size, part.shape[-1])
            nbytes = blocks * block_size * part.shape[-1]
            raw = (ctypes.c_uint8 * nbytes).from_address(address)
            found.append(torch.frombuffer(raw, dtype=torch.uint8).view(shape))
    return found


def owners(starts: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    """The row of each new token."""
    return rows.repeat_interleave(starts.diff())[:tokens]


class CoreKernels(Kernels):
    """By the C++ core."""

    def _plan(self, policy: str, bare: list[torch.Tensor]) -> None:
        torch_ops.dsa_plan(*bare[:8], policy, *bare[8:])

    def _serve(
        self, host: Any, reports: Any, hot: Any, new_rows: Any, table: Any, starts: Any, rows: Any, ids: Any,
        slots: Any, counts: Any, new_slots: Any,
    ) -> None:  # fmt: skip
        for part, pool, fresh in zip(host, hot, new_rows, strict=True):
            reports[0, 0] += ops.dsa_serve(part, pool, table, rows, ids, slots, counts)
            if len(fresh):
                ops.write_rows(pool, owners(starts, rows, len(fresh)), fresh, new_slots[: len(fresh)])

    def _gather(
        self, host: Any, reports: Any, hot: Any, new_rows: Any, selection: Any, kinds: Any, starts: Any,
        lengths: Any, table: Any, rows: Any,
    ) -> None:  # fmt: skip
        for part, pool, fresh, chosen in zip(host, hot, new_rows, selection, strict=True):
            reports[0, 0] += ops.dsa_serve_compact(
                kinds, starts, lengths, part, pool, table, rows, fresh, chosen
            )

    def _install(
        self, reports: Any, selection: Any, hot: Any, starts: Any, rows: Any, positions: Any, slots: Any,
        counts: Any,
    ) -> None:  # fmt: skip
        for chosen, pool in zip(selection, hot, strict=True):
            reports[0, 0] += ops.dsa_install(chosen, starts, rows, positions, slots, counts, pool)

    def _host_write(self, host: Any, reports: Any, new_rows: Any, slots: Any) -> None:
        for part, fresh in zip(host, new_rows, strict=True):
            ops.host_write(part, fresh, slots.long())
            reports[0, 0] += int((slots >= 0).sum()) * fresh.shape[-1]


class TwinKernels(Kernels):
    """Calls the AscendC kernels in a library built for the CPU twin. `reported`: findings of the twin."""

    def __init__(self, npu: Any, library: str) -> None:
        super().__init__(npu)
        from tests.ascendc import twin_kernels

        self._twin = twin_kernels
        self._kernels = twin_kernels.Kernels(Path(library))
        self.reported: list[str] = []

    def _run(self, op: str, arguments: list[tuple[str, Any, int]], shape: tuple[int, ...]) -> None:
        try:
            ran = self._kernels.run(op, arguments, shape, CORES, "lazy")
        except self._twin.RefusedError as error:
            raise ValueError(str(error)) from error
        self.reported += ran.reports

    def _rows(self, name: str, parts: Any, use: int) -> list[tuple[str, Any, int]]:
        return [(f"{name}{n}", part, use) for n, part in enumerate(parts)]

    def _plan(self, policy: str, bare: list[torch.Tensor]) -> None:
        topk, tags, ids, kinds = bare[0], bare[4], bare[10], bare[14]
        uses = [self._twin.IN] * 4 + [self._twin.IN_OUT] * 12
        arguments = list(zip(PLAN, bare, uses, strict=True))
        width = topk.shape[1]
        shape = (
            len(bare[3]), len(topk), width, ids.shape[1] // width, *tags.shape, ops.POLICIES.index(policy),
            ids.shape[1], int(kinds.numel() > 0),
        )  # fmt: skip
        self._run("dsa_plan", arguments, shape)

    def _serve(self, host: Any, reports: Any, hot: Any, new_rows: Any, *lists: torch.Tensor) -> None:
        into = self._twin.IN_OUT
        names = LISTS["dsa_serve_rows"]
        arguments = self._rows("host", host, self._twin.IN) + self._rows("hot", hot, into)
        arguments += self._rows("new_rows", new_rows, self._twin.IN)
        arguments += [(name, part, self._twin.IN) for name, part in zip(names, lists, strict=True)]
        table, rows, ids = lists[0], lists[2], lists[3]
        shape = (
            len(rows), len(new_rows[0]), *hot[0].shape[:2], ids.shape[1], *host[0].shape[:2], table.shape[1],
            *(part.shape[-1] for part in hot),
        )  # fmt: skip
        self._run("dsa_serve", [*arguments, ("reports", reports, self._twin.OUT)], shape)

    def _gather(
        self, host: Any, reports: Any, hot: Any, new_rows: Any, selection: Any, *lists: torch.Tensor
    ) -> None:
        names = LISTS["dsa_serve_compact_rows"]
        arguments = self._rows("host", host, self._twin.IN) + self._rows("hot", hot, self._twin.IN)
        arguments += self._rows("new_rows", new_rows, self._twin.IN)
        arguments += self._rows("selection", selection, self._twin.IN_OUT)
        arguments += [(name, part, self._twin.IN) for name, part in zip(names, lists, strict=True)]
        kinds, table, rows = lists[0], lists[3], lists[4]
        shape = (
            len(rows), len(new_rows[0]), kinds.shape[1], *hot[0].shape[:2], *host[0].shape[:2],
            table.shape[1], *(part.shape[-1] for part in hot),
        )  # fmt: skip
        self._run("dsa_serve_compact", [*arguments, ("reports", reports, self._twin.OUT)], shape)

    def _install(self, reports: Any, selection: Any, hot: Any, *lists: torch.Tensor) -> None:
        names = LISTS["dsa_install_rows"]
        arguments = self._rows("selection", selection, self._twin.IN)
        arguments += self._rows("hot", hot, self._twin.IN_OUT)
        arguments += [(name, part, self._twin.IN) for name, part in zip(names, lists, strict=True)]
        rows, positions = lists[1], lists[2]
        shape = (
            len(rows), *selection[0].shape[:2], *hot[0].shape[:2], positions.shape[1],
            *(part.shape[-1] for part in hot),
        )  # fmt: skip
        self._run("dsa_install", [*arguments, ("reports", reports, self._twin.OUT)], shape)

    def _host_write(self, host: Any, reports: Any, new_rows: Any, slots: Any) -> None:
        arguments = self._rows("host", host, self._twin.IN_OUT)
        arguments += self._rows("new_rows", new_rows, self._twin.IN)
        shape = (len(slots), *host[0].shape[:2], *(part.shape[-1] for part in host))
        into = self._twin.OUT
        self._run(
            "host_write",
            [*arguments, ("slot_mapping", slots, self._twin.IN), ("reports", reports, into)],
            shape,
        )
