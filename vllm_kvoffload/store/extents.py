"""Free space of a pool, as extents in order of address. No I/O."""

from __future__ import annotations

from bisect import bisect_left


class FreeSpace:
    """Free extents of `capacity` bytes; neighbours are always merged.

    First fit by address: most pools hold objects of one size, so any hole fits.
    """

    def __init__(self, capacity: int) -> None:
        self._starts = [0] if capacity else []
        self._sizes = [capacity] if capacity else []

    @property
    def total(self) -> int:
        """Free bytes."""
        return sum(self._sizes)

    def copy(self) -> FreeSpace:
        """An independent copy, for trial allocations."""
        made = FreeSpace(0)
        made._starts, made._sizes = self._starts[:], self._sizes[:]
        return made

    def take(self, nbytes: int) -> int | None:
        """Allocates `nbytes` (above 0); returns the address, or None if no extent is large enough."""
        for at, size in enumerate(self._sizes):
            if size >= nbytes:
                start = self._starts[at]
                if size == nbytes:
                    del self._starts[at], self._sizes[at]
                else:
                    self._starts[at], self._sizes[at] = start + nbytes, size - nbytes
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Frees an extent allocated by `take`. Raises ValueError: part of it is already free."""
        at = bisect_left(self._starts, start)
        overlaps_next = at < len(self._starts) and start + nbytes > self._starts[at]
        overlaps_previous = at > 0 and self._starts[at - 1] + self._sizes[at - 1] > start
        if overlaps_next or overlaps_previous:
            raise ValueError(f"{start}+{nbytes} is free already")
        self._starts.insert(at, start)
        self._sizes.insert(at, nbytes)
        self._merge(at)
        if at > 0:
            self._merge(at - 1)

    def extents(self) -> list[tuple[int, int]]:
        """(start, bytes) of each extent, in order."""
        return list(zip(self._starts, self._sizes, strict=True))

    def _merge(self, at: int) -> None:
        if at + 1 < len(self._starts) and self._starts[at] + self._sizes[at] == self._starts[at + 1]:
            self._sizes[at] += self._sizes[at + 1]
            del self._starts[at + 1], self._sizes[at + 1]
