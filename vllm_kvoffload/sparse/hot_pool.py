"""The device side of sparse decode: hot rows of every layer and one residency per index group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.geometry import IndexGroup, KVGeometry
from vllm_kvoffload.sparse.row_ops import RowOps, Rows, TensorRows


@dataclass(frozen=True, eq=False)
class GroupPool:
    """State shared by the layers of one index group.

    Attributes:
        group: the layers.
        residency: maps tokens to slots, for each row.
    """

    group: IndexGroup
    residency: ops.Residency


class HotPool:
    """Hot rows [R, P] of every layer, and the groups' residencies.

    Args:
        geometry: layers and groups.
        num_rows: R, maximum number of concurrently decoding requests.
        num_slots: P, slots of a row.
        ways: W. policy: name of the replacement policy.
        row_ops: allocates rows; None for plain memory.
        device: holds the residencies; the plans run there.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        num_rows: int,
        num_slots: int,
        ways: int,
        policy: str,
        row_ops: RowOps | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        row_ops = row_ops or TensorRows(geometry.main_row_bytes)
        self.layers: list[Rows] = [row_ops.zeros(num_rows, num_slots) for _ in range(geometry.num_layers)]
        self._group_of = [geometry.group_of(layer).index for layer in range(geometry.num_layers)]
        self._row_nbytes = geometry.num_layers * num_rows * num_slots * geometry.main_row_bytes
        self.groups = [
            GroupPool(group, ops.Residency.allocate(num_rows, num_slots, ways, policy, device))
            for group in geometry.groups
        ]

    def pool_of(self, layer: int) -> GroupPool:
        """The pool of a layer's index group."""
        return self.groups[self._group_of[layer]]

    def reset_row(self, row: int) -> None:
        """Clears a row's residency in every group, so that its next owner starts cold."""
        for pool in self.groups:
            pool.residency.reset_row(row)

    def forget_beyond(self, row: int, length: int, layers: range) -> None:
        """Clears a row's residency in the groups of ``layers`` that may hold positions >= ``length``."""
        for pool in self.groups:
            if pool.group.owner in layers and pool.residency.high[row] > length:
                pool.residency.reset_row(row)

    @property
    def nbytes(self) -> int:
        """Device bytes of the hot rows and of the residencies."""
        return self._row_nbytes + sum(p.residency.nbytes for p in self.groups)
