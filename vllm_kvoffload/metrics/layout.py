"""Layout of a worker's memory file: a header, then two slots that are written alternately.

A slot contains its sequence number and a checksum over number and values; the reader takes the newest slot
with a valid checksum. A half-written slot fails the check even on a processor that reorders stores, where a
seqlock would need barriers that Python lacks. The other slot is complete meanwhile, so a writer stopped or
killed during a write never blocks a reader.
"""

from __future__ import annotations

import bisect
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

MAGIC = b"KVOFFST2"

_HEADER = struct.Struct("<8sIIQ")  # magic, schema, pid of the writer, time of creation in ns since the epoch
_CHECK = struct.Struct("<I4x")

_PREFIX = "vllm-kvoffload"
# Target of /proc/<pid>/fd/<n>. An instance id may contain any character, including colons.
_LINK = re.compile(rf"/memfd:{_PREFIX}-(\w+):(.*):dp(\d+):tp(\d+) \(deleted\)", re.DOTALL)


@dataclass(frozen=True)
class Field:
    """One number. Counters only grow while the worker lives; /metrics shows the help text.

    label: an additional label and its value; fields with the same name form one series. In a histogram, whose
    label is ("le", upper bound in seconds), each field counts the values above the previous bound and up to
    its own; the bound "sum" holds the sum of all values in microseconds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """The key for publishing the field: `name`, or `name.value` with the value of its label."""
        return f"{self.name}.{self.label[1]}" if self.label else self.name


@dataclass(frozen=True)
class Record:
    """A file's content: pid of its writer, creation in ns since the epoch, values in the fields' order."""

    pid: int
    created_ns: int
    values: tuple[int, ...]


class FieldSet:
    """Contents of one kind of file. A worker has one file for each part of the product that counts in it.

    Args:
        name: of the part, one word; used in the file's name.
        fields: in file order, with unique keys.
    """

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self.name, self.fields = name, tuple(fields)
        self.index: Mapping[str, int] = {field.key: number for number, field in enumerate(self.fields)}
        # Derived from the fields, so that a reader of another version rejects the file.
        self.schema = zlib.crc32(";".join(f"{field.key}:{field.kind}" for field in self.fields).encode())
        self._body = struct.Struct(f"<Q{len(self.fields)}q")  # sequence number, values
        self.slot_bytes = self._body.size + _CHECK.size
        self.file_bytes = _HEADER.size + 2 * self.slot_bytes

    def file_name(self, instance_id: str, dp_rank: int, tp_rank: int) -> str:
        """Name of a worker's memory file, by which readers find it in /proc."""
        return f"{_PREFIX}-{self.name}:{instance_id}:dp{dp_rank}:tp{tp_rank}"

    def pack_header(self, pid: int, created_ns: int) -> bytes:
        """The file's header, constant while the writer lives."""
        return _HEADER.pack(MAGIC, self.schema, pid, created_ns)

    def pack_slot(self, sequence: int, values: Sequence[int]) -> tuple[int, bytes]:
        """File offset and contents of the slot for publication `sequence`.

        Raises struct.error for a value that isn't a 64-bit integer.
        """
        body = self._body.pack(sequence, *values)
        return _HEADER.size + (sequence & 1) * self.slot_bytes, body + _CHECK.pack(zlib.crc32(body))

    def parse(self, data: bytes) -> Record | None:
        """The newest complete publication in a file's bytes.

        None if both slots were half written (read again), or the file is of another version.
        """
        if len(data) != self.file_bytes:
            return None
        magic, schema, pid, created_ns = _HEADER.unpack_from(data)
        if magic != MAGIC or schema != self.schema:
            return None
        newest: tuple[int, ...] = ()
        for offset in (_HEADER.size, _HEADER.size + self.slot_bytes):
            body = data[offset : offset + self._body.size]
            (check,) = _CHECK.unpack_from(data, offset + self._body.size)
            if zlib.crc32(body) == check:
                newest = max(newest, self._body.unpack(body))
        return Record(pid, created_ns, newest[1:]) if newest else None


def parse_link(link: str) -> tuple[str, str, int, int] | None:
    """Field set, instance id, DP rank and TP rank of a /proc/<pid>/fd link; None for any other file."""
    match = _LINK.fullmatch(link)
    return (match[1], match[2], int(match[3]), int(match[4])) if match else None


class Histogram:
    """Durations of one series, published by the keys of `fields`."""

    def __init__(self, name: str, bounds_s: Sequence[float]) -> None:
        self._name, self._bounds_s = name, tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self._sum_us = 0

    def fields(self, help_text: str) -> tuple[Field, ...]:
        """The fields of this series."""
        return tuple(Field(self._name, "histogram", help_text, ("le", part)) for part in self._parts())

    def observe(self, seconds: float) -> None:
        """Counts one duration."""
        self._counts[bisect.bisect_left(self._bounds_s, seconds)] += 1
        self._sum_us += round(seconds * 1e6)

    def values(self) -> dict[str, int]:
        """All numbers so far, by key."""
        numbers = [*self._counts, self._sum_us]
        return {f"{self._name}.{part}": value for part, value in zip(self._parts(), numbers, strict=True)}

    def _parts(self) -> list[str]:
        return [*(f"{float(bound)}" for bound in self._bounds_s), "+Inf", "sum"]
