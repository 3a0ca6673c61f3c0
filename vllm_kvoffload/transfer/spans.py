"""Spans of memory to read: merges neighbours and checks spans against registered regions. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
ADDRESS_END = (1 << 63) - 1


@dataclass(frozen=True)
class Spans:
    """N copies of `nbytes` from remote to local addresses, int64 [N] each."""

    local: Int64Array
    remote: Int64Array
    nbytes: Int64Array

    def __post_init__(self) -> None:
        if not self.local.shape == self.remote.shape == self.nbytes.shape or self.local.ndim != 1:
            shapes = (self.local.shape, self.remote.shape, self.nbytes.shape)
            raise ValueError(f"spans of shapes {shapes}: expected three vectors of one length")

    def __len__(self) -> int:
        return len(self.local)

    @property
    def total_bytes(self) -> int:
        """Bytes of all spans."""
        return int(self.nbytes.sum())

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, int]]) -> Spans:
        """From (local, remote, nbytes) triples."""
        columns = np.array(items, dtype=np.int64).reshape(-1, 3).T
        return cls(*(np.ascontiguousarray(column) for column in columns))

    @classmethod
    def concat(cls, parts: Sequence[Spans]) -> Spans:
        """All spans of the parts, in order."""
        if not parts:
            return cls.of([])
        local = np.concatenate([part.local for part in parts])
        remote = np.concatenate([part.remote for part in parts])
        return cls(local, remote, np.concatenate([part.nbytes for part in parts]))


def block_spans(
    local: Int64Array, local_base: int, local_stride: int,
    remote: Int64Array, remote_base: int, remote_stride: int, block_bytes: int,
) -> Spans:  # fmt: skip
    """Spans of whole blocks: `local` and `remote` are block numbers, int64 [N], strides are in bytes.

    Raises ValueError: an address does not fit an int64.
    """
    for blocks, base, stride in ((local, local_base, local_stride), (remote, remote_base, remote_stride)):
        if not len(blocks):
            continue
        lowest, highest = int(blocks.min()), int(blocks.max())
        if min(lowest, base, stride, block_bytes) < 0 or base + stride * highest + block_bytes > ADDRESS_END:
            raise ValueError(f"blocks {lowest} to {highest} of {stride} bytes from {base:#x} on")
    nbytes = np.full(len(local), block_bytes, dtype=np.int64)
    return Spans(local_base + local * local_stride, remote_base + remote * remote_stride, nbytes)


def coalesce(spans: Spans, max_bytes: int = 1 << 62) -> Spans:
    """The same bytes in as few spans as possible: sorted by remote address, neighbours on both sides merged.

    Merging makes no span longer than `max_bytes`; longer spans stay unchanged. Empty spans are dropped.
    """
    order = np.argsort(spans.remote, kind="stable")
    order = order[spans.nbytes[order] > 0]
    local, remote, nbytes = spans.local[order], spans.remote[order], spans.nbytes[order]
    if len(local) < 2:
        return Spans(local, remote, nbytes)
    joined = (remote[:-1] + nbytes[:-1] == remote[1:]) & (local[:-1] + nbytes[:-1] == local[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~joined)))
    if np.add.reduceat(nbytes, starts).max() > max_bytes:
        starts = _split(starts, nbytes, max_bytes)
    return Spans(local[starts], remote[starts], np.add.reduceat(nbytes, starts))


def _split(starts: Int64Array, nbytes: Int64Array, max_bytes: int) -> Int64Array:
    wanted, run = set(starts.tolist()), 0
    kept = []
    for index, size in enumerate(nbytes.tolist()):
        if index in wanted or run + size > max_bytes:
            kept.append(index)
            run = 0
        run += size
    return np.array(kept, dtype=np.int64)


class _Sized(Protocol):
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class RegionTable:
    """Registered regions of one side.

    Raises ValueError: a region is empty or reaches beyond an int64, or two overlap.
    """

    def __init__(self, regions: Sequence[_Sized]) -> None:
        ordered = sorted(regions, key=lambda region: region.address)
        if any(region.address <= 0 or region.nbytes <= 0 for region in ordered):
            raise ValueError("a region is empty, or has no address")
        if any(region.address + region.nbytes > ADDRESS_END for region in ordered):
            raise ValueError("a region ends beyond 2**63")
        self._starts = np.array([region.address for region in ordered], dtype=np.int64)
        self._ends = np.array([region.address + region.nbytes for region in ordered], dtype=np.int64)
        clash = np.flatnonzero(self._ends[:-1] > self._starts[1:])
        if clash.size:
            first, second = ordered[int(clash[0])], ordered[int(clash[0]) + 1]
            raise ValueError(
                f"regions overlap: {first.address:#x}+{first.nbytes} and {second.address:#x}+{second.nbytes}"
            )

    @property
    def ranges(self) -> Int64Array:
        """int64 [R, 2]: start and end of each region, in order."""
        return np.stack([self._starts, self._ends], axis=1)

    def find_outside(self, addresses: Int64Array, nbytes: Int64Array) -> int | None:
        """Number of the first span that is not within a single region, None if there is none."""
        if not len(addresses):
            return None
        if not len(self._starts):
            return 0
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        # address + length may overflow int64; the distance to the region's end never does.
        inside = (index >= 0) & (nbytes > 0) & (nbytes <= self._ends[np.maximum(index, 0)] - addresses)
        outside = np.flatnonzero(~inside)
        return int(outside[0]) if outside.size else None
