"""What a worker publishes, and how it lies in the memory file.

A header, then two slots that are written in turn. A slot carries its sequence number and a checksum over
number and values, and the reader takes the newest slot whose checksum holds. A slot caught half written fails
its check, also on a processor that reorders stores, where a plain seqlock would need barriers that Python
hasn't got; and as the other slot is whole meanwhile, a writer stopped or killed in mid-write never blocks a
reader.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Field:
    """One number. Counters only grow while the worker lives; the help text is what /metrics shows."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str


FIELDS = (
    Field("decode_steps", "counter", "Steps with at least one decoding request."),
    Field("hits", "counter", "Chosen rows found in the hot pool, over all index groups."),
    Field("misses", "counter", "Chosen rows fetched from the host pool, over all index groups."),
    Field("new_rows", "counter", "Rows of tokens computed in the step that attended to them."),
    Field("displaced", "counter", "Rows that took a slot outside their own set."),
    Field("fetched_bytes", "counter", "Bytes of missing rows copied from the host pool."),
    Field("prefill_bytes", "counter", "Bytes of prefixes streamed from the host pool for prefill."),
    Field("written_bytes", "counter", "Bytes of new rows stored into the host pool."),
    Field("device_bytes", "gauge", "Device memory the offload holds: hot pools, tables, buffers."),
    Field(
        "device_bytes_without_offload",
        "gauge",
        "Device memory the same KV blocks would need without the offload.",
    ),
    Field("host_pool_bytes", "gauge", "Size of the host pool that this worker has mapped."),
    Field("kv_blocks", "gauge", "KV blocks the scheduler can hand out."),
    Field("live_rows", "gauge", "Requests that hold a row of the hot pool."),
)
COUNTERS = tuple(field.name for field in FIELDS if field.kind == "counter")
INDEX: Mapping[str, int] = {field.name: index for index, field in enumerate(FIELDS)}

MAGIC = b"KVOFFST1"
SCHEMA = zlib.crc32(";".join(f"{field.name}:{field.kind}" for field in FIELDS).encode())
"""Changes with FIELDS by itself: a reader of another version refuses instead of misreading."""

_HEADER = struct.Struct("<8sIIQ")  # magic, schema, pid of the writer, time of creation in ns since the epoch
_BODY = struct.Struct(f"<Q{len(FIELDS)}q")  # sequence number, values
_CHECK = struct.Struct("<I4x")
SLOT_BYTES = _BODY.size + _CHECK.size
FILE_BYTES = _HEADER.size + 2 * SLOT_BYTES

_PREFIX = "vllm-kvoffload-stats"
# What /proc/<pid>/fd/<n> points to. An instance id may hold anything, colons too.
_LINK = re.compile(rf"/memfd:{_PREFIX}:(.*):dp(\d+):tp(\d+) \(deleted\)", re.DOTALL)


@dataclass(frozen=True)
class Record:
    """A file's content: pid of its writer, creation in ns since the epoch, values in the order of FIELDS."""

    pid: int
    created_ns: int
    values: tuple[int, ...]


def file_name(instance_id: str, dp_rank: int, tp_rank: int) -> str:
    """Name of a worker's memory file; it shows in /proc and lsof, and is what readers look for."""
    return f"{_PREFIX}:{instance_id}:dp{dp_rank}:tp{tp_rank}"


def parse_link(link: str) -> tuple[str, int, int] | None:
    """Instance id, DP rank and TP rank of a /proc/<pid>/fd link; None for any other file."""
    match = _LINK.fullmatch(link)
    return (match[1], int(match[2]), int(match[3])) if match else None


def pack_header(pid: int, created_ns: int) -> bytes:
    """The part that stays as it is while the writer lives."""
    return _HEADER.pack(MAGIC, SCHEMA, pid, created_ns)


def pack_slot(sequence: int, values: Sequence[int]) -> tuple[int, bytes]:
    """Offset in the file and bytes of the slot that publication `sequence` goes to.

    Raises struct.error for a value that isn't an integer of 64 bits.
    """
    body = _BODY.pack(sequence, *values)
    return _HEADER.size + (sequence & 1) * SLOT_BYTES, body + _CHECK.pack(zlib.crc32(body))


def parse(data: bytes) -> Record | None:
    """The newest whole publication in a file's bytes.

    None when both slots were caught half written (read again), or the file isn't one of this version.
    """
    if len(data) != FILE_BYTES:
        return None
    magic, schema, pid, created_ns = _HEADER.unpack_from(data)
    if magic != MAGIC or schema != SCHEMA:
        return None
    newest: tuple[int, ...] = ()
    for offset in (_HEADER.size, _HEADER.size + SLOT_BYTES):
        body = data[offset : offset + _BODY.size]
        (check,) = _CHECK.unpack_from(data, offset + _BODY.size)
        if zlib.crc32(body) == check:
            newest = max(newest, _BODY.unpack(body))
    return Record(pid, created_ns, newest[1:]) if newest else None
