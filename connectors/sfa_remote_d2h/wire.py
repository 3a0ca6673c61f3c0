"""Wire format between a prefill rank and a decode rank: one frame is a version byte and msgpack.

A *session* is one run of one rank. A *transfer* is one attempt of one prefill rank to hand a request over:
its number is never reused in a session, so it serves as the generation of all messages about it. `Publish`
carries the state of a transfer, not a change: losing, repeating or delaying one is harmless, and a `Beat`
that lags behind is answered with the missing chunks.

Every number, text and list has a range that is checked while a frame is decoded, so that received values
fit an int64, a log line and the memory reserved for them. The state machines check consistency across
fields.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from vllm_kvoffload.foreign_text import LINE_LENGTH, is_line, printable

VERSION = 3
MAX_FRAME_BYTES = 4 << 20
"""Longest frame: enough for a `Publish` of MAX_BLOCKS blocks, or a `Hello` with MAX_METADATA bytes."""

MAX_BLOCKS = 1 << 18
MAX_METADATA = 2 << 20
MAX_ENTRIES = 4096
MAX_TEXT = LINE_LENGTH
MAX_NAME = 256
MAX_FACTS = 64
MAX_TP = 4096
_ADDRESS_END = 1 << 62
"""Upper bound (exclusive) of addresses, strides and block sizes: the sum of two is still an int64."""

_LINE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*\Z"

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=_LINE)]
Text = Annotated[str, Meta(max_length=MAX_TEXT, pattern=_LINE)]
Number = Annotated[int, Meta(ge=0, lt=1 << 53)]
Block = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Layers = Annotated[int, Meta(ge=0, le=4096)]
Size = Annotated[int, Meta(ge=0, lt=_ADDRESS_END)]
Bytes = Annotated[int, Meta(ge=1, lt=_ADDRESS_END)]
Component: TypeAlias = tuple[Bytes, Size, Bytes]
Components = Annotated[tuple[Component, ...], Meta(max_length=64)]
Entry: TypeAlias = tuple[Number, Count, Layers]
Entries = Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)]
Prompt = Annotated[bytes, Meta(min_length=16, max_length=16)]

_Message = TypeVar("_Message")
_Item = TypeVar("_Item")


class WireError(ValueError):
    """A frame that this version cannot decode."""


class VersionError(WireError):
    """A frame of another protocol version."""


class LayerLayout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Location of a layer's KV on prefill: components of the main KV, then of the indexer KV.

    Each is (address of block 0, bytes between blocks, bytes of a block).
    """

    index: Layers
    main: Components
    indexer: Components

    @property
    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes per block of each component, which both sides must agree on."""
        return tuple(c[2] for c in self.main), tuple(c[2] for c in self.indexer)


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Blocks that prefill computed in one step; the first `layers` layers are readable.

    start: number of the first block in the request; blocks: their ids on prefill.
    """

    start: Count
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS)]
    layers: Layers


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """Introduction of a prefill rank, repeated after every reconnect. `metadata` is the transfer engine's.

    progress: decode must report read progress, because prefill reuses the memory for other layers. secret:
    of the current run of decode, from the rendezvous. facts: the named facts that `digest` covers.
    """

    session: Name
    engine_id: Name
    tp_size: Annotated[int, Meta(ge=1, le=MAX_TP)]
    tp_rank: Annotated[int, Meta(ge=0, lt=MAX_TP)]
    digest: Name
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    layers: Annotated[tuple[LayerLayout, ...], Meta(max_length=4096)]
    metadata: Annotated[bytes, Meta(max_length=MAX_METADATA)]
    lease_s: Annotated[float, Meta(ge=0.1, le=86400)]
    progress: bool = False
    secret: Annotated[str, Meta(max_length=MAX_NAME, pattern=_LINE)] = ""
    facts: Annotated[dict[Name, Text], Meta(max_length=MAX_FACTS)] = {}


class HelloAck(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello_ack"):
    """Decode has admitted the prefill session."""

    session: Name
    peer: Name


class Refused(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refused"):
    """Decode rejects the prefill session: different model, layout or TP size."""

    session: Name
    peer: Name
    reason: Text


class NeedHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="need_hello"):
    """Decode does not know the prefill session, because it started later."""

    session: Name
    peer: Name


class Publish(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="publish"):
    """State of a transfer: its chunks from number `first` on. `complete`: no chunks will follow.

    request: external request id. prompt: digest of the prompt's token ids. num_blocks: of the whole prompt.
    """

    session: Name
    transfer: Number
    request: Name
    prompt: Prompt
    num_blocks: Count
    first: Count
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_BLOCKS)]
    complete: bool


class Closed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="closed"):
    """The transfer has ended on prefill, its blocks may be reused. `retry`: the request will be computed
    again."""

    session: Name
    transfer: Number
    reason: Text
    retry: bool


class Finished(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="finished"):
    """Answer to `Finish`: the blocks were held throughout, so the data read is valid."""

    session: Name
    transfer: Number


class Declined(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="declined"):
    """This session will not transfer the request, for example because decode refused its `Hello`.

    Sent without being a peer: the secret proves that the sender has the request's rendezvous. digest: of
    prefill's facts.
    """

    session: Name
    secret: Annotated[str, Meta(max_length=MAX_NAME, pattern=_LINE)]
    request: Name
    prompt: Prompt
    reason: Text
    digest: Annotated[str, Meta(max_length=MAX_NAME, pattern=_LINE)] = ""


class BeatAck(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="beat_ack"):
    """The leases of these transfers were extended."""

    session: Name
    transfers: Annotated[tuple[Number, ...], Meta(max_length=MAX_ENTRIES)]


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="beat"):
    """Decode's heartbeat: (transfer, chunks known, layers known of the last one)."""

    session: Name
    peer: Name
    entries: Entries


class Progress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="progress"):
    """Read progress: (transfer, chunks read, layers read of the next one). Monotonic."""

    session: Name
    peer: Name
    entries: Entries


class Finish(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="finish"):
    """Decode has read the whole transfer."""

    session: Name
    peer: Name
    transfer: Number


class Cancel(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="cancel"):
    """Decode no longer wants the transfer."""

    session: Name
    peer: Name
    transfer: Number
    reason: Text


ToDecode: TypeAlias = Hello | Publish | Closed | Finished | BeatAck | Declined
ToPrefill: TypeAlias = HelloAck | Refused | NeedHello | Beat | Progress | Finish | Cancel

_ENCODER = msgspec.msgpack.Encoder()
_TO_DECODE = msgspec.msgpack.Decoder(ToDecode)
_TO_PREFILL = msgspec.msgpack.Decoder(ToPrefill)


def encode(message: ToDecode | ToPrefill) -> bytes:
    """Encodes a message as one frame."""
    return bytes([VERSION]) + _ENCODER.encode(message)


def decode_to_decode(frame: bytes) -> ToDecode:
    """Decodes a frame received by a decode rank. Raises WireError."""
    message = _checked(frame, _TO_DECODE)
    if isinstance(message, Hello):
        _check_hello(message)
    return message


def decode_to_prefill(frame: bytes) -> ToPrefill:
    """Decodes a frame received by a prefill rank. Raises WireError."""
    return _checked(frame, _TO_PREFILL)


def _checked(frame: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    if not frame:
        raise WireError("an empty frame")
    if frame[0] != VERSION:
        raise VersionError(
            f"protocol version {frame[0]}, this side speaks {VERSION}: both need the same release"
        )
    try:
        return decoder.decode(frame[1:])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a message of protocol version {VERSION}: {printable(str(error))}") from error


def _check_hello(hello: Hello) -> None:
    """Checks across fields: a rank below its TP size, a finite lease, layers within the address space."""
    if hello.tp_rank >= hello.tp_size:
        raise WireError(f"rank {hello.tp_rank} of TP size {hello.tp_size}")
    if not math.isfinite(hello.lease_s):
        raise WireError(f"lease of {hello.lease_s} s")
    for layer in hello.layers:
        for address, stride, nbytes in (*layer.main, *layer.indexer):
            if address + stride * (hello.num_blocks - 1) + nbytes > _ADDRESS_END:
                raise WireError(f"layer {layer.index} reaches beyond the address space")


def wire_name(request: str) -> str:
    """Returns a request id for messages: a digest if it is too long or not printable."""
    if 0 < len(request) <= MAX_NAME and is_line(request):
        return request
    return f"sha256-{hashlib.sha256(request.encode('utf-8', 'surrogatepass')).hexdigest()}"


def parts(entries: Sequence[_Item]) -> Iterator[tuple[_Item, ...]]:
    """Splits a list into pieces that each fit into one message."""
    for begin in range(0, len(entries), MAX_ENTRIES):
        yield tuple(entries[begin : begin + MAX_ENTRIES])


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Returns 16 bytes that identify a prompt: KV read for a different prompt is never used."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).digest()[:16]
