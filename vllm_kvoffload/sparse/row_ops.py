"""Allocation and copies of main KV rows, for each platform.

The manager and its parts address rows by number; a platform's `RowOps` defines their representation and
copies. On CPU, rows are one uint8 tensor, copied by this project's C++ ops; on Ascend, rows are two tensors
in device memory.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import torch

from vllm_kvoffload import ops

Rows: TypeAlias = Any
"""Rows in a platform's representation, opaque to everything except its :class:`RowOps`."""


class RowOps(Protocol):
    """Allocation and copies of rows. Every call runs on the caller's current stream.

    Host rows: [num_blocks, block_size] of one layer. Hot rows: [R, P] of one layer. All are bytes, except
    rows just computed by the model and rows passed to attention.
    """

    def zeros(self, *shape: int) -> Rows:
        """[*shape] rows of zero bytes on the device."""

    def row_bytes(self, rows: Rows) -> int:
        """Bytes of one row, all components."""

    def as_bytes(self, rows: Rows) -> Rows:
        """Views rows computed by the model, [T], as bytes."""

    def take(self, rows: Rows, tokens: torch.Tensor) -> Rows:
        """Copies a subset of the rows [T]; ``tokens`` int64 [t] in host memory."""

    def place(self, rows: Rows, start: int, new_rows: Rows, tokens: slice) -> None:
        """Copies ``new_rows[tokens]`` to ``rows[start:]``."""

    def attended(self, rows: Rows, like: Rows) -> Rows:
        """Views hot rows [R, P] or a buffer [N] as attention reads them: flat, in the dtype of ``like``."""

    def host_write(self, host: Rows, new_rows: Rows, slot_mapping: torch.Tensor) -> None:
        """See :func:`vllm_kvoffload.ops.host_write`; ``slot_mapping`` is in host memory."""

    def host_read(self, host: Rows, blocks: torch.Tensor, count: int, target: Rows) -> None:
        """Copies the first ``count`` tokens of a request with these blocks into ``target``."""

    def serve(
        self, host: Rows, hot: Rows, block_table: torch.Tensor, rows: torch.Tensor, plan: ops.PlanOut
    ) -> int:
        """Copies a plan's misses into their slots, see :func:`vllm_kvoffload.ops.dsa_serve`."""

    def write_rows(self, hot: Rows, rows: torch.Tensor, new_rows: Rows, slots: torch.Tensor) -> None:
        """See :func:`vllm_kvoffload.ops.write_rows`; ``rows`` and ``slots`` are in host memory."""


class TensorRows:
    """Rows in plain memory, one uint8 tensor [..., row_bytes]."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros((*shape, self._row_bytes), dtype=torch.uint8)

    def row_bytes(self, rows: torch.Tensor) -> int:
        return rows.shape[-1] * rows.element_size()

    def as_bytes(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(torch.uint8)

    def take(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return rows[tokens]

    def place(self, rows: torch.Tensor, start: int, new_rows: torch.Tensor, tokens: slice) -> None:
        chosen = new_rows[tokens]
        rows[start : start + len(chosen)] = chosen

    def attended(self, rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return rows.view(-1, rows.shape[-1]).view(like.dtype)

    def host_write(self, host: torch.Tensor, new_rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        ops.host_write(host, new_rows, slot_mapping)

    def host_read(self, host: torch.Tensor, blocks: torch.Tensor, count: int, target: torch.Tensor) -> None:
        ops.host_read(host, blocks, 0, count, target[:count])

    def serve(
        self,
        host: torch.Tensor,
        hot: torch.Tensor,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        plan: ops.PlanOut,
    ) -> int:
        return ops.dsa_serve(host, hot, block_table, rows, plan.miss_ids, plan.miss_slots, plan.miss_counts)

    def write_rows(
        self, hot: torch.Tensor, rows: torch.Tensor, new_rows: torch.Tensor, slots: torch.Tensor
    ) -> None:
        ops.write_rows(hot, rows, new_rows, slots)


_conforms: type[RowOps] = TensorRows  # checked by mypy
