"""Assignment of hot-pool rows to requests.

Each live request holds one row, the same for all layers and index groups, until it is released (finish,
abort or preemption). Rows are reused, so a row number alone does not identify its owner: the generation is
incremented at every release, and work queued for an older generation must be dropped (I-1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class RowLease(NamedTuple):
    """A request's claim on a row: valid while `RowTable.check(row, generation)` says so."""

    row: int
    generation: int


class RowError(RuntimeError):
    """Base class of this module's errors."""


class NoFreeRowError(RowError):
    """Every row is taken: more requests were admitted than the pools have rows for."""


class UnknownRequestError(RowError):
    """The request holds no row: never admitted here, or already released."""


class RowLeakError(RowError):
    """Rows are held where none should be."""


class RowTable:
    """Maps request ids to rows. Rows are 0 .. num_rows-1; generations start at 0.

    Not locked: one thread acquires and releases. `check` may be called from any thread, but its answer is
    valid only until that thread releases a row, so side-stream work is joined before a release (I-7).
    """

    def __init__(self, num_rows: int) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows={num_rows}: expected at least 1")
        self._owners: list[str | None] = [None] * num_rows
        self._generations = [0] * num_rows
        self._leases: dict[str, RowLease] = {}
        # Last in, first out: the pool memory of the row freed last is the most likely to be cached.
        self._free = list(reversed(range(num_rows)))

    @property
    def num_rows(self) -> int:
        return len(self._owners)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> tuple[str, ...]:
        """Requests that hold a row, oldest first."""
        return tuple(self._leases)

    def acquire(self, req_id: str) -> RowLease:
        """Returns the request's lease, a new one if it holds none. Raises NoFreeRowError."""
        lease = self._leases.get(req_id)
        if lease is not None:
            return lease
        if not self._free:
            raise NoFreeRowError(
                f"no row for request {req_id!r}: all {self.num_rows} rows are held, by {_some(self.live)}; "
                "admission must not exceed the rows, or a release was missed"
            )
        row = self._free.pop()
        lease = RowLease(row, self._generations[row])
        self._owners[row] = req_id
        self._leases[req_id] = lease
        return lease

    def lookup(self, req_id: str) -> RowLease | None:
        """The request's lease, None if it holds none."""
        return self._leases.get(req_id)

    def release(self, req_id: str) -> RowLease:
        """Free the request's row and return the lease that ended. Raises UnknownRequestError."""
        lease = self._leases.pop(req_id, None)
        if lease is None:
            raise UnknownRequestError(f"request {req_id!r} holds no row: never acquired, or released twice")
        # Before the row becomes free, so that no thread can see the next owner under the old generation.
        self._generations[lease.row] += 1
        self._owners[lease.row] = None
        self._free.append(lease.row)
        return lease

    def check(self, row: int, generation: int) -> bool:
        """True while the lease (row, generation) is live. Raises ValueError for a row outside the table."""
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row={row}: expected 0 <= row < {self.num_rows}")
        return self._owners[row] is not None and self._generations[row] == generation

    def still_leased(self, rows: torch.Tensor, leases: Sequence[RowLease]) -> torch.Tensor:
        """Returns the rows, int32 [N], with -1 where the corresponding lease has ended."""
        live = [self.check(lease.row, lease.generation) for lease in leases]
        return rows if all(live) else rows.masked_fill(~torch.tensor(live), -1)

    def check_empty(self) -> None:
        """Raise RowLeakError if any request still holds a row."""
        if self._leases:
            raise RowLeakError(
                f"{len(self._leases)} of {self.num_rows} rows still held, by {_some(self.live)}"
            )


def _some(names: tuple[str, ...], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
