"""Assignment of the hot pools' partitions to requests.

Every hot pool is divided into partitions of P slots, numbered from 0. Each decoding request holds one
partition, with the same number for all layers and index groups, until it is released (finish, abort or
preemption). Partitions are reused, so a number alone does not identify its owner: the generation is
incremented at every release, and work queued for an older generation must be dropped (I-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PartitionLease(NamedTuple):
    """A request's claim on a partition: valid while `PartitionTable.check(partition, generation)` is true."""

    partition: int
    generation: int


class PartitionError(RuntimeError):
    """Base class of this module's errors."""


class NoFreePartitionError(PartitionError):
    """Every partition is taken: more requests were admitted than the pools have partitions."""


class UnknownRequestError(PartitionError):
    """The request holds no partition: never admitted here, or already released."""


class PartitionLeakError(PartitionError):
    """Partitions are held where none should be."""


class PartitionTable:
    """Maps request ids to partitions, 0 .. total-1; generations start at 0.

    Not locked: one thread acquires and releases. `check` may be called from any thread, but its answer is
    valid only until that thread releases a partition, so side-stream work is joined before a release (I-7).
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"total={total}: expected at least 1")
        self._owners: list[str | None] = [None] * total
        self._generations = [0] * total
        self._leases: dict[str, PartitionLease] = {}
        # Last in, first out: the memory of the partition freed last is the most likely to be cached.
        self._free = list(reversed(range(total)))

    @property
    def total(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> tuple[str, ...]:
        """Requests that hold a partition, oldest first."""
        return tuple(self._leases)

    def acquire(self, req_id: str) -> PartitionLease:
        """Returns the request's lease, a new one if it holds none. Raises NoFreePartitionError."""
        lease = self._leases.get(req_id)
        if lease is not None:
            return lease
        if not self._free:
            raise NoFreePartitionError(
                f"no partition for request {req_id!r}: all {self.total} are held, by {_some(self.live)}; "
                "more requests decode than there are partitions, or a release was missed"
            )
        partition = self._free.pop()
        lease = PartitionLease(partition, self._generations[partition])
        self._owners[partition] = req_id
        self._leases[req_id] = lease
        return lease

    def lookup(self, req_id: str) -> PartitionLease | None:
        """The request's lease, None if it holds none."""
        return self._leases.get(req_id)

    def release(self, req_id: str) -> PartitionLease:
        """Frees the request's partition and returns the lease that ended. Raises UnknownRequestError."""
        lease = self._leases.pop(req_id, None)
        if lease is None:
            raise UnknownRequestError(
                f"request {req_id!r} holds no partition: never acquired, or released twice"
            )
        # Before the partition becomes free: no thread may see its next owner under the old generation.
        self._generations[lease.partition] += 1
        self._owners[lease.partition] = None
        self._free.append(lease.partition)
        return lease

    def check(self, partition: int, generation: int) -> bool:
        """True while the lease (partition, generation) is live. Raises ValueError outside the table."""
        if not 0 <= partition < self.total:
            raise ValueError(f"partition={partition}: expected 0 <= partition < {self.total}")
        return self._owners[partition] is not None and self._generations[partition] == generation

    def still_leased(self, partitions: torch.Tensor, leases: Sequence[PartitionLease]) -> torch.Tensor:
        """Returns the partitions, int32 [N], with -1 where the corresponding lease has ended."""
        live = [self.check(lease.partition, lease.generation) for lease in leases]
        return partitions if all(live) else partitions.masked_fill(~torch.tensor(live), -1)

    def check_empty(self) -> None:
        """Raises PartitionLeakError if any request still holds a partition."""
        if self._leases:
            raise PartitionLeakError(
                f"{len(self._leases)} of {self.total} partitions still held, by {_some(self.live)}"
            )


def _some(names: tuple[str, ...], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
