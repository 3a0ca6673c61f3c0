"""Messages between a prefill rank and a decode rank: one frame is a version byte and msgpack.

A *session* is one start of one rank. A *transfer* is one attempt of one prefill rank to hand a request over:
its number is never used twice in a session, so it is the generation of everything said about it. `Publish`
tells the state of a transfer, not a change of it: losing, repeating or delaying one does no harm, and a
`Beat` that lags behind is answered with what its sender lacks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

VERSION = 2
_Message = TypeVar("_Message")


class WireError(ValueError):
    """A frame that this version can't understand."""


class LayerLayout(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer's KV lies on prefill. Components of the main KV, then those of the indexer's.

    Each is (address of block 0, bytes between blocks, bytes of a block).
    """

    index: int
    main: tuple[tuple[int, int, int], ...]
    indexer: tuple[tuple[int, int, int], ...]

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of a block, which both sides must agree on."""
        return tuple(c[2] for c in self.main), tuple(c[2] for c in self.indexer)


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that prefill computed in one step; the first `layers` layers may be read.

    start: number of the first block in the request; blocks: their ids on prefill.
    """

    start: int
    blocks: tuple[int, ...]
    layers: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Prefill introduces itself, again after every reconnect. `metadata` is the transfer engine's.

    progress: decode is to say how far its reads are: prefill uses the memory for other layers then.
    """

    session: str
    engine_id: str
    tp_size: int
    tp_rank: int
    digest: str
    num_blocks: int
    layers: tuple[LayerLayout, ...]
    metadata: bytes
    lease_s: float
    progress: bool = False


class HelloAck(msgspec.Struct, frozen=True, array_like=True, tag="hello_ack"):
    """Decode knows the prefill session."""

    session: str
    peer: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Decode will not work with that prefill session: another model, layout or TP."""

    session: str
    peer: str
    reason: str


class NeedHello(msgspec.Struct, frozen=True, array_like=True, tag="need_hello"):
    """Decode doesn't know the prefill session, since it started later."""

    session: str
    peer: str


class Publish(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """State of a transfer: its chunks from number `first` on. `complete`: there will be no more chunks.

    request: external request id. prompt: digest of the prompt's token ids. num_blocks: of the whole prompt.
    """

    session: str
    transfer: int
    request: str
    prompt: bytes
    num_blocks: int
    first: int
    chunks: tuple[Chunk, ...]
    complete: bool


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="closed"):
    """The transfer is over on prefill, its blocks may be reused. `retry`: the request will come again."""

    session: str
    transfer: int
    reason: str
    retry: bool


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """Answer to `Finish`: the blocks were held all the time, what was read is right."""

    session: str
    transfer: int


class BeatAck(msgspec.Struct, frozen=True, array_like=True, tag="beat_ack"):
    """The leases of these transfers are extended."""

    session: str
    transfers: tuple[int, ...]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Decode's heartbeat: (transfer, chunks known, layers known of the last one)."""

    session: str
    peer: str
    entries: tuple[tuple[int, int, int], ...]


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """How far decode has read: (transfer, chunks read, layers read of the next one). It only grows."""

    session: str
    peer: str
    entries: tuple[tuple[int, int, int], ...]


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """Decode has read everything."""

    session: str
    peer: str
    transfer: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Decode doesn't want the transfer any more."""

    session: str
    peer: str
    transfer: int
    reason: str


ToDecode: TypeAlias = Hello | Publish | Closed | Finished | BeatAck
ToPrefill: TypeAlias = HelloAck | Refused | NeedHello | Beat | Progress | Finish | Cancel

_ENCODER = msgspec.msgpack.Encoder()
_TO_DECODE = msgspec.msgpack.Decoder(ToDecode)
_TO_PREFILL = msgspec.msgpack.Decoder(ToPrefill)


def encode(message: ToDecode | ToPrefill) -> bytes:
    """One frame."""
    return bytes([VERSION]) + _ENCODER.encode(message)


def decode_to_decode(frame: bytes) -> ToDecode:
    """A frame that a decode rank got. Raises WireError."""
    return _checked(frame, _TO_DECODE)


def decode_to_prefill(frame: bytes) -> ToPrefill:
    """A frame that a prefill rank got. Raises WireError."""
    return _checked(frame, _TO_PREFILL)


def _checked(frame: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    if not frame or frame[0] != VERSION:
        found = frame[0] if frame else "an empty frame"
        raise WireError(f"protocol version {found}, this side speaks {VERSION}: both need the same release")
    try:
        return decoder.decode(frame[1:])
    except msgspec.MsgspecError as error:
        raise WireError(f"not a message of protocol version {VERSION}: {error}") from error


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that name a prompt: KV read for another one is never taken."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).digest()[:16]
