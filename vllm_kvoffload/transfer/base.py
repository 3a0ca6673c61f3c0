"""The interface of a one-sided transfer engine, and its errors.

An engine belongs to one thread at a time: the methods are not locked. None blocks for longer than the
copying of one read takes, except `wait`, which has a deadline.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Annotated

import msgspec
import numpy as np

from vllm_kvoffload.transfer.spans import RegionTable, Spans, coalesce

POLL_S = 0.0005


class TransferError(RuntimeError):
    """A transfer can't be done as asked, or the engine failed."""


class TransferUnavailableError(TransferError):
    """The engine can't run here; the message says what is missing and how to get it."""


Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory that may be read into or from. device: "host", or "npu" for device memory."""

    address: Positive
    nbytes: Positive
    device: Annotated[str, msgspec.Meta(max_length=16)] = "host"


class PeerHandle(msgspec.Struct, frozen=True):
    """An engine in another process. A peer that restarted is another peer: it has other metadata."""

    name: str


class ReadStatus(str, Enum):
    """Of a read. Unless it is pending, its local memory is quiet: nothing writes there any more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ReadHandle:
    """A read in flight or finished; `reason` says why it failed."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.status = ReadStatus.PENDING
        self.cancelled = False
        self.reason = ""

    def finish(self, reason: str = "") -> None:
        """Marks the read as done, or as failed for a reason."""
        self.status = ReadStatus.FAILED if reason else ReadStatus.DONE
        self.reason = reason


class TransferEngine(ABC):
    """Reads peers' registered memory into registered local memory."""

    name: str

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Makes local memory known, before it is used and before `local_metadata`.

        Raises TransferError: a region is empty or overlaps another one.
        """

    @abstractmethod
    def local_metadata(self) -> bytes:
        """What `add_peer` needs on the other side. Opaque."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Idempotent for the same metadata. Raises TransferError: not made by an engine of this kind."""

    @abstractmethod
    def remove_peer(self, peer: PeerHandle) -> None:
        """Forgets a peer; reads from it fail. Unknown peers are fine."""

    @abstractmethod
    def read(self, peer: PeerHandle, spans: Spans) -> ReadHandle:
        """Starts a read. A failure of the transfer itself shows in the handle, not here.

        Raises TransferError: unknown peer, or a span that lies in no registered region of its side.
        """

    @abstractmethod
    def poll(self, handle: ReadHandle) -> ReadStatus:
        """Never blocks. Anything but pending is final."""

    @abstractmethod
    def cancel(self, handle: ReadHandle) -> None:
        """Asks for an early end; the memory is quiet once `poll` says that the read is not pending."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of peers and registrations. Idempotent."""

    def wait(self, handle: ReadHandle, deadline_s: float) -> ReadStatus:
        """Polls until the read is not pending, at most `deadline_s`; returns its status then."""
        end_s = time.monotonic() + deadline_s
        while (status := self.poll(handle)) is ReadStatus.PENDING and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return status


def prepare(spans: Spans, local: RegionTable, remote: RegionTable) -> Spans:
    """The spans coalesced, once each is known to lie in one registered region of either side.

    Raises TransferError naming the first span that doesn't, or the columns if they are no int64 vectors.
    """
    columns = (spans.local, spans.remote, spans.nbytes)
    if any(column.dtype != np.int64 for column in columns):
        raise TransferError(f"spans of {', '.join(str(column.dtype) for column in columns)}: expected int64")
    for side, table, addresses in (("local", local, spans.local), ("remote", remote, spans.remote)):
        bad = table.find_outside(addresses, spans.nbytes)
        if bad is not None:
            where = f"{int(addresses[bad]):#x}+{int(spans.nbytes[bad])}"
            raise TransferError(f"span {bad}: {side} memory {where} is not registered")
    merged = coalesce(spans)
    # Neighbours may be registered apart, such as two layers without a gap: those stay as they are.
    straddle = (
        local.find_outside(merged.local, merged.nbytes) is not None
        or remote.find_outside(merged.remote, merged.nbytes) is not None
    )
    return spans if straddle else merged
