"""The interface of a one-sided transfer engine, and its errors.

An engine belongs to one thread at a time: the methods are not locked. No method blocks longer than the copy
of one read takes, except `wait`, which has a deadline.
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
    """A transfer request is invalid, or the engine failed."""


class TransferUnavailableError(TransferError):
    """The engine can't run here; the message names the missing dependency and how to install it."""


Positive = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Memory that reads may use as source or destination. device: "host", or "npu" for device memory."""

    address: Positive
    nbytes: Positive
    device: Annotated[str, msgspec.Meta(max_length=16)] = "host"


class PeerHandle(msgspec.Struct, frozen=True):
    """An engine in another process. A restarted peer counts as a new peer, since its metadata differs."""

    name: str


class ReadStatus(str, Enum):
    """Status of a read. Once it is no longer pending, its local memory is drained: nothing writes there."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ReadHandle:
    """A read in flight or finished. reason: of its failure."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.status = ReadStatus.PENDING
        self.cancelled = False
        self.reason = ""

    def finish(self, reason: str = "") -> None:
        """Marks the read as done, or as failed if a reason is given."""
        self.status = ReadStatus.FAILED if reason else ReadStatus.DONE
        self.reason = reason


class TransferEngine(ABC):
    """Reads peers' registered memory into registered local memory."""

    name: str

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Registers local memory, before it is used and before `local_metadata` is called.

        Raises TransferError: a region is empty or overlaps another one.
        """

    @abstractmethod
    def local_metadata(self) -> bytes:
        """Opaque metadata for the other side's `add_peer`."""

    @abstractmethod
    def add_peer(self, metadata: bytes) -> PeerHandle:
        """Adds a peer; idempotent for equal metadata. Raises TransferError: another engine type."""

    @abstractmethod
    def remove_peer(self, peer: PeerHandle) -> None:
        """Removes a peer; reads from it fail. Unknown peers are ignored."""

    @abstractmethod
    def read(self, peer: PeerHandle, spans: Spans) -> ReadHandle:
        """Starts a read. Failures of the transfer itself are reported by the handle.

        Raises TransferError: unknown peer, or a span that lies in no registered region of its side.
        """

    @abstractmethod
    def poll(self, handle: ReadHandle) -> ReadStatus:
        """Returns the read's status; never blocks. Every status except pending is final."""

    @abstractmethod
    def cancel(self, handle: ReadHandle) -> None:
        """Requests an early end; the memory has drained once `poll` no longer returns pending."""

    @abstractmethod
    def close(self) -> None:
        """Releases peers and registrations. Idempotent."""

    def wait(self, handle: ReadHandle, deadline_s: float) -> ReadStatus:
        """Polls until the read is not pending, for at most `deadline_s` seconds; returns the last status."""
        end_s = time.monotonic() + deadline_s
        while (status := self.poll(handle)) is ReadStatus.PENDING and time.monotonic() < end_s:
            time.sleep(POLL_S)
        return status


def prepare(spans: Spans, local: RegionTable, remote: RegionTable) -> Spans:
    """Checks that each span lies in one registered region on either side; returns the spans coalesced.

    Raises TransferError naming the first invalid span, or the columns if they are not int64 vectors.
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
    # Neighbours in separate regions, such as two adjacent layers, are not merged.
    straddle = (
        local.find_outside(merged.local, merged.nbytes) is not None
        or remote.find_outside(merged.remote, merged.nbytes) is not None
    )
    return spans if straddle else merged
