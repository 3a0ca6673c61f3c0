"""Objects that one client has open: their address ranges and deadlines, for checking copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from vllm_kvoffload.store.base import Int64Array
from vllm_kvoffload.transfer.base import Region
from vllm_kvoffload.transfer.spans import RegionTable


class OpenObjects:
    """Address ranges by handle. Not locked; a returned `view` never changes."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, int, float]] = {}
        self._view: OpenView | None = None

    def add(self, handle: int, address: int, nbytes: int, deadline: float) -> None:
        """Adds an opened object."""
        self._entries[handle] = address, address + nbytes, deadline
        self._view = None

    def remove(self, handles: Iterable[int]) -> list[int]:
        """Removes objects; returns the handles among them that were open."""
        known = [handle for handle in handles if self._entries.pop(handle, None) is not None]
        if known:
            self._view = None
        return known

    def clear(self) -> list[int]:
        """Removes all objects; returns their handles."""
        return self.remove(list(self._entries))

    def live(self, now: float) -> list[int]:
        """Handles of open objects that are not past their deadlines."""
        return [handle for handle, (_, _, deadline) in self._entries.items() if now < deadline]

    def view(self) -> OpenView:
        """Immutable view of the open objects."""
        if self._view is None:
            self._view = OpenView(list(self._entries.values()))
        return self._view


class OpenView:
    """Ranges by address. An object that a client opened several times is valid until its last deadline.

    Of overlapping ranges, the one with the later deadline is valid: the other one has ended, and its room has
    been reused for another object.
    """

    def __init__(self, entries: Sequence[tuple[int, int, float]]) -> None:
        kept: list[tuple[int, int, float]] = []
        for entry in sorted(entries):
            while kept and kept[-1][1] > entry[0] and kept[-1][2] <= entry[2]:
                kept.pop()
            if not kept or kept[-1][1] <= entry[0]:
                kept.append(entry)
        self.table = RegionTable([Region(start, end - start) for start, end, _ in kept])
        self._starts = np.array([start for start, _, _ in kept], dtype=np.int64)
        self._deadlines = np.array([deadline for _, _, deadline in kept], dtype=np.float64)

    def first_deadline(self, addresses: Int64Array) -> float:
        """Earliest deadline of the objects at these addresses; infinity for no addresses."""
        if not len(addresses) or not len(self._starts):
            return math.inf
        at = np.searchsorted(self._starts, addresses, side="right") - 1
        return float(self._deadlines[np.maximum(at, 0)].min())
