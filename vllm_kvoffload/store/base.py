"""The interface of a KV store, its value types and its errors. Imports neither vLLM nor torch.

A store holds one object per KV block, with the block's KV of all layers at byte offsets set by the caller's
layout. An object is written once, is readable only after `finish_write`, and never changes afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.transfer.base import Region

Direction = Literal["save", "load"]
Int64Array = npt.NDArray[np.int64]


class StoreError(RuntimeError):
    """The store rejected a call, or failed during it."""


class StoreUnavailableError(StoreError):
    """The store's package or service is missing or down; the message names the fix."""


class StoreMismatchError(StoreError):
    """Two engines that share a store disagree on its contents; the message names the differing fact."""


class WriteRefusal(Enum):
    """Why a key can't be written now."""

    EXISTS = "exists"
    """The key is already readable or being written: nothing to do."""
    FULL = "full"
    """No room, even after evicting all evictable objects."""


@dataclass(frozen=True)
class ReadObject:
    """An object pinned against eviction, for the client that opened it.

    address: base of `CopySpans.object_address`, valid in this client only. nbytes: at least the size that the
    writer requested. handle: of this opening.
    """

    key: str
    address: int
    nbytes: int
    handle: int


@dataclass(frozen=True)
class WriteObject:
    """Room reserved for an object, for the client that opened it. Fields as in `ReadObject`."""

    key: str
    address: int
    nbytes: int
    handle: int


@dataclass(frozen=True)
class CopySpans:
    """N copies of `nbytes` between an object and registered local memory, int64 [N] each.

    Raises ValueError: not three int64 vectors of one length.
    """

    object_address: Int64Array
    local_address: Int64Array
    nbytes: Int64Array

    def __post_init__(self) -> None:
        columns = (self.object_address, self.local_address, self.nbytes)
        if any(column.dtype != np.int64 or column.ndim != 1 for column in columns) or (
            len({len(column) for column in columns}) != 1
        ):
            found = ", ".join(f"{column.dtype} {list(column.shape)}" for column in columns)
            raise ValueError(f"spans of {found}: expected three int64 vectors of one length")

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all spans."""
        return int(self.nbytes.sum())


class Store(Protocol):
    """A client of one process. All methods may be called from any thread.

    Every method returns within the backend's deadline (seconds), `copy` within the time needed for its bytes.
    A store that is down raises StoreUnavailableError almost immediately. It is retried in the background or
    by later calls and recovers without a restart; objects open at the failure are lost.
    """

    name: str

    def register(self, regions: Sequence[Region]) -> None:
        """Registers local memory for copies. May be called again for more regions.

        Raises StoreError: a region is empty or overlaps another one, or the backend refuses it.
        """

    def lookup(self, keys: Sequence[str]) -> int:
        """Length of the leading run of keys that are readable now; never raises, an error counts as 0.

        Pins nothing: a key may be evicted before it is opened. Counts as a use of these objects, the first
        key most recently, so that the end of a prefix is evicted before its beginning.
        """

    def open_read(self, keys: Sequence[str], lease_s: float) -> list[ReadObject | None]:
        """Pins objects for at most `lease_s` seconds; None for a key that is not (or no longer) readable.

        After the lease `copy` rejects the object. Raises StoreError.
        """

    def close_read(self, objects: Sequence[ReadObject]) -> None:
        """Unpins objects; no copy of them may be running. Never raises; closed objects are ignored."""

    def open_write(self, keys: Sequence[str], nbytes: int) -> list[WriteObject | WriteRefusal]:
        """Reserves room for objects of `nbytes` each.

        `local`: all or nothing; either every key that does not exist gets room, or each of them is FULL.
        `memcache`: reserves as many as fit, the others are FULL (it can't release room before the end of a
        lease). A reservation not finished within the backend's write lease lapses, even if the process dies.
        Raises StoreError: nothing is reserved then, or the reservation lapses.
        """

    def finish_write(self, objects: Sequence[WriteObject], ok: Sequence[bool]) -> list[bool]:
        """Publishes each object, or discards it where not ok. No copy of them may be running.

        Returns False for an object not published: it was not ok, had lapsed, or the store lost it. After a
        StoreError the objects are gone or lapse; a partly written object is never readable.
        """

    def copy(self, spans: CopySpans, direction: Direction) -> None:
        """Copies all bytes, blocking, with the GIL released. save: local memory to open writes; load: back.

        Raises StoreError: a span lies outside open objects or registered memory (nothing was copied), or a
        lease ended during the copy (loaded data is invalid, saved data is not published).
        """

    def close(self) -> None:
        """Closes all open objects and releases memory and connections. Idempotent."""
