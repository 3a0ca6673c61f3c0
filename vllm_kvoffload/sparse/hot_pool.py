"""Device memory of sparse decode: a hot pool for every layer and one residency for every index group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.geometry import IndexGroup, KVGeometry
from vllm_kvoffload.policies import DEFAULT_PLACEMENT
from vllm_kvoffload.sparse.row_ops import RowOps, Rows, TensorRows


@dataclass(frozen=True, eq=False)
class GroupPool:
    """State shared by the layers of one index group.

    Attributes:
        group: the layers.
        residency: maps tokens to slots, for each partition.
    """

    group: IndexGroup
    residency: ops.Residency


class HotPool:
    """The hot pools of all layers, [R, P] rows each, and the groups' residencies.

    Args:
        geometry: layers and groups.
        num_partitions: R, maximum number of concurrently decoding requests.
        num_slots: P, slots of a partition.
        ways: W. placement, policy: names of the placement and the replacement policy.
        row_ops: allocates rows; None for plain memory.
        device: holds the residencies; the plans run there.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        num_partitions: int,
        num_slots: int,
        ways: int,
        policy: str,
        placement: str = DEFAULT_PLACEMENT,
        row_ops: RowOps | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_slots = num_slots
        row_ops = row_ops or TensorRows(geometry.main_row_bytes)
        self.layers: list[Rows] = [
            row_ops.zeros(num_partitions, num_slots) for _ in range(geometry.num_layers)
        ]
        self._group_of = [geometry.group_of(layer).index for layer in range(geometry.num_layers)]
        self._row_nbytes = geometry.num_layers * num_partitions * num_slots * geometry.main_row_bytes
        self._residencies = ops.Residencies(
            len(geometry.groups), num_partitions, num_slots, ways, policy, device, placement
        )
        self.groups = [
            GroupPool(group, residency)
            for group, residency in zip(geometry.groups, self._residencies.groups, strict=True)
        ]

    def pool_of(self, layer: int) -> GroupPool:
        """The pool of a layer's index group."""
        return self.groups[self._group_of[layer]]

    def reset_partition(self, partition: int) -> None:
        """Clears a partition's residency in every group, so that its next owner starts cold."""
        self._residencies.reset_partition(partition)

    def forget_beyond(self, partition: int, length: int, layers: range) -> None:
        """Clears a partition's residency in groups of ``layers`` that may hold positions >= ``length``."""
        for pool in self.groups:
            if pool.group.owner in layers and pool.residency.high[partition] > length:
                pool.residency.reset_partition(partition)

    @property
    def nbytes(self) -> int:
        """Device bytes of the hot rows and of the residencies."""
        return self._row_nbytes + sum(p.residency.nbytes for p in self.groups)
