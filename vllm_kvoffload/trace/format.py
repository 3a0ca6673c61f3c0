"""The trace file: a header, then records with separate checksums.

All integers are little-endian. A file is::

    "KVTRACE1"  u32 length  u32 crc32  header: a JSON object of `length` bytes
    records:    u8 kind     u32 length  u32 crc32  payload of `length` bytes

The checksum covers the header; in records, the kind's byte and the payload. A process that dies leaves at
worst a partial last record, before which readers stop. Kinds:

- 1 ``REQUEST``: u32 slot, then the request's id in UTF-8. From here on the slot denotes that request, which
  has no recorded steps yet. Slots are reused, so both sides keep state for live requests only.
- 2 ``STEP``: one record call of the engine. u32 length, that many bytes of numbers, then bits. The numbers
  are varints (LEB128, below 2**35): group, step, N; then N times slot, seq_len, query_len; then for each of
  the T query tokens its number of *new* ids; then those ids token by token, ascending, the first as it is
  and each later one as the difference to its predecessor.
  A token's ids are compared with those of the *same request's previous query token* in that group (an empty
  set at first). For each id of that set, ascending, one bit tells whether it is among the token's ids again
  (most significant bit first, all tokens in one string); its other ids are the new ones.
- 3 ``DROPPED``: u64, number of record calls dropped here because the writer couldn't keep up.
- 4 ``END``: u64 steps written, u64 dropped. A file without it was not closed.

The file keeps the *set* of ids of a query token, without order, duplicates and padding. `step` counts the
record calls of that group from 0, dropped ones included.

A decoding model repeats six or seven of ten ids. In the trace suite an id costs 0.40 to 0.86 bytes (0.56 and
0.67 for the two published models), compared with 4 in memory and 1.08 with differences alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

MAGIC = b"KVTRACE1"
REQUEST, STEP, DROPPED, END = 1, 2, 3, 4
MAX_NUMBER_BYTES = 5  # of a varint: 35 bits
NUMBER_LIMIT = 1 << 35

Ids: TypeAlias = npt.NDArray[np.int32]
Numbers: TypeAlias = npt.NDArray[np.int64]

_HEAD = struct.Struct("<8sII")
_RECORD = struct.Struct("<BII")
_MAX_HEADER_BYTES = 1 << 20


class TraceError(Exception):
    """A file is not a valid trace, or can't be written at the given path."""


@dataclass(frozen=True)
class TraceHeader:
    """Description of a trace's origin.

    model_name: as served, or the name of a synthetic trace.
    index_topk: K, maximum ids of a query token.
    num_groups: index groups of the model, whether or not all are recorded.
    block_size: tokens of a KV block.
    source: "engine" or "synthetic".
    details: additional information, JSON-compatible.
    """

    model_name: str
    index_topk: int
    num_groups: int
    block_size: int
    source: str = "engine"
    details: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The encoded header, which begins the file."""
        text = json.dumps(asdict(self)).encode()
        return _HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text

    @classmethod
    def read(cls, file: BinaryIO, name: str) -> TraceHeader:
        """The header of an open file. Raises TraceError: not a trace, another version, damaged."""
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or head[:7] != MAGIC[:7]:
            raise TraceError(f"{name} is not a trace: it doesn't begin with {MAGIC.decode()}")
        magic, length, checksum = _HEAD.unpack(head)
        if magic != MAGIC:
            raise TraceError(f"{name} has trace format {magic[7:].decode('latin-1')}, this version reads 1")
        text = file.read(min(length, _MAX_HEADER_BYTES))
        if zlib.crc32(text) != checksum:
            raise TraceError(f"{name} is damaged: its header's checksum is wrong")
        values = json.loads(text)
        known = {item.name for item in fields(cls)}
        try:
            return cls(**{key: value for key, value in values.items() if key in known})
        except (TypeError, AttributeError) as error:
            raise TraceError(f"{name} is damaged: its header lacks fields ({error})") from error


def _checksum(kind: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(bytes([kind])))


def pack_record(kind: int, payload: bytes) -> bytes:
    """The encoded record."""
    return _RECORD.pack(kind, len(payload), _checksum(kind, payload)) + payload


def read_record(file: BinaryIO, bytes_left: int) -> tuple[int, bytes] | None:
    """The next record as (kind, payload); None if the rest is not a complete, undamaged record."""
    head = file.read(_RECORD.size)
    if len(head) < _RECORD.size:
        return None
    kind, length, checksum = _RECORD.unpack(head)
    if length > bytes_left - _RECORD.size:
        return None
    payload = file.read(length)
    if len(payload) < length or _checksum(kind, payload) != checksum:
        return None
    return kind, payload


def record_bytes(payload: bytes) -> int:
    """File size of a record with this payload, in bytes."""
    return _RECORD.size + len(payload)


def encode_numbers(values: Numbers) -> bytes:
    """Varints of int64 [n]. Raises ValueError for one below 0 or not below 2**35."""
    if not len(values):
        return b""
    largest = int(values.max())
    if int(values.min()) < 0 or largest >= NUMBER_LIMIT:
        raise ValueError("a number doesn't fit the trace format")
    if largest < 128:
        return values.astype(np.uint8).tobytes()
    lengths = np.ones(len(values), np.int64)
    for count in range(1, MAX_NUMBER_BYTES):
        lengths += values >= 1 << 7 * count
    starts = np.cumsum(lengths) - lengths
    coded = np.empty(int(starts[-1] + lengths[-1]), np.uint8)
    coded[starts] = (values & 127) | ((lengths > 1).astype(np.int64) << 7)
    for count in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > count)
        more = (lengths[longer] > count + 1).astype(np.int64) << 7
        coded[starts[longer] + count] = ((values[longer] >> 7 * count) & 127) | more
    return coded.tobytes()


def decode_numbers(coded: bytes) -> Numbers:
    """The inverse of :func:`encode_numbers`. Raises TraceError."""
    data = np.frombuffer(coded, np.uint8)
    ends = np.flatnonzero(data < 128)
    if not len(data):
        return np.empty(0, np.int64)
    if not len(ends) or ends[-1] != len(data) - 1:
        raise TraceError("a record's numbers end in the middle")
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if int(lengths.max()) > MAX_NUMBER_BYTES:
        raise TraceError("a record has a number that is too long")
    values = (data[starts] & 127).astype(np.int64)
    for count in range(1, int(lengths.max())):
        longer = np.flatnonzero(lengths > count)
        values[longer] |= (data[starts[longer] + count].astype(np.int64) & 127) << 7 * count
    return np.asarray(values, np.int64)
