"""The interface of a KV store, what its calls exchange, and its errors. Neither vLLM nor torch.

A store holds objects: one per KV block, with the block's KV of all layers at byte offsets that the caller's
layout decides. An object is written once, can be read only after `finish_write`, and never changes then.
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
    """The store can't do what was asked, or failed while doing it."""


class StoreUnavailableError(StoreError):
    """The store's package or service is missing or down; the message says what to do."""


class StoreMismatchError(StoreError):
    """Two engines that share a store disagree about what is in it; the message names the fact."""


class WriteRefusal(Enum):
    """Why a key can't be written now."""

    EXISTS = "exists"
    """It is readable already, or somebody is writing it: nothing to do."""
    FULL = "full"
    """No room, even after evicting all that may go."""


@dataclass(frozen=True)
class ReadObject:
    """An object pinned against eviction, for the client that opened it.

    address: what `CopySpans.object_address` counts from; means nothing to other clients. nbytes: at least
    what the writer asked for. handle: of this opening.
    """

    key: str
    address: int
    nbytes: int
    handle: int


@dataclass(frozen=True)
class WriteObject:
    """Room reserved for an object, for the client that opened it. Fields as those of `ReadObject`."""

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

    Every method returns within the backend's deadline (seconds), `copy` within the time that its bytes take.
    A store that is down raises StoreUnavailableError at once or nearly so, is tried again in the background
    or by later calls, and works again without a restart; what was open then is gone.
    """

    name: str

    def register(self, regions: Sequence[Region]) -> None:
        """Makes local memory known that copies will touch. May be called again for more.

        Raises StoreError: a region is empty or overlaps another one, or the backend refuses it.
        """

    def lookup(self, keys: Sequence[str]) -> int:
        """Length of the leading run of keys that are readable now; never raises, an error counts as 0.

        Nothing is pinned: a key may be gone when it is opened. Counts as a use of these objects, the first
        key the most recent, so that the end of a prefix is evicted before its beginning.
        """

    def open_read(self, keys: Sequence[str], lease_s: float) -> list[ReadObject | None]:
        """Pins objects for at most `lease_s` seconds; None for a key that is not readable (any more).

        After the lease `copy` refuses the object. Raises StoreError.
        """

    def close_read(self, objects: Sequence[ReadObject]) -> None:
        """Unpins; no copy of these objects may be running. Never raises, what is closed already is fine."""

    def open_write(self, keys: Sequence[str], nbytes: int) -> list[WriteObject | WriteRefusal]:
        """Reserves room for objects of `nbytes` each.

        `local`: all or nothing; either every key that does not exist gets room, or each of them is FULL.
        `memcache`: as many as there is room for, the others are FULL (it can't give room back before the end
        of a lease). A reservation that is not finished within the backend's write lease lapses, also when the
        process dies. Raises StoreError: nothing is reserved then, or it lapses.
        """

    def finish_write(self, objects: Sequence[WriteObject], ok: Sequence[bool]) -> list[bool]:
        """Publishes each object, or discards it where not ok. No copy of them may be running.

        False: not published, because it was not ok, lapsed, or the store forgot it. Raises StoreError, and
        the objects then are gone or lapse; they are never readable in part.
        """

    def copy(self, spans: CopySpans, direction: Direction) -> None:
        """Moves all bytes, blocking, with the GIL released. save: local to open writes. load: the reverse.

        Raises StoreError: a span lies outside what is open or registered (nothing was copied), or a lease
        ended before the copy did (what a load brought is not to be used, what a save brought is not
        published).
        """

    def close(self) -> None:
        """Lets go of everything that is open, memory and connections. Idempotent."""
