"""How the numbers of a worker lie in its memory file.

A header, then two slots that are written in turn. A slot carries its sequence number and a checksum over
number and values, and the reader takes the newest slot whose checksum holds. A slot caught half written fails
its check, also on a processor that reorders stores, where a plain seqlock would need barriers that Python
hasn't got; and as the other slot is whole meanwhile, a writer stopped or killed in mid-write never blocks a
reader.
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
# What /proc/<pid>/fd/<n> points to. An instance id may hold anything, colons too.
_LINK = re.compile(rf"/memfd:{_PREFIX}-(\w+):(.*):dp(\d+):tp(\d+) \(deleted\)", re.DOTALL)


@dataclass(frozen=True)
class Field:
    """One number. Counters only grow while the worker lives; the help text is what /metrics shows.

    label: a label of the field's own and its value; the fields of one name make one series. Of a histogram,
    whose label is ("le", upper bound in seconds), each field counts the values above the bound before it;
    the bound "sum" has their sum in microseconds.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """What the field is published by: `name`, or `name.value` of its label."""
        return f"{self.name}.{self.label[1]}" if self.label else self.name


@dataclass(frozen=True)
class Record:
    """A file's content: pid of its writer, creation in ns since the epoch, values in the fields' order."""

    pid: int
    created_ns: int
    values: tuple[int, ...]


class FieldSet:
    """What one kind of file holds. A worker has a file for each part of the product that counts in it.

    Args:
        name: of the part, one word; it is in the file's name.
        fields: in their order in the file, with keys of their own.
    """

    def __init__(self, name: str, fields: Sequence[Field]) -> None:
        self.name, self.fields = name, tuple(fields)
        self.index: Mapping[str, int] = {field.key: number for number, field in enumerate(self.fields)}
        # Changes with the fields by itself: a reader of another version refuses instead of misreading.
        self.schema = zlib.crc32(";".join(f"{field.key}:{field.kind}" for field in self.fields).encode())
        self._body = struct.Struct(f"<Q{len(self.fields)}q")  # sequence number, values
        self.slot_bytes = self._body.size + _CHECK.size
        self.file_bytes = _HEADER.size + 2 * self.slot_bytes

    def file_name(self, instance_id: str, dp_rank: int, tp_rank: int) -> str:
        """Name of a worker's memory file; it shows in /proc and lsof, and is what readers look for."""
        return f"{_PREFIX}-{self.name}:{instance_id}:dp{dp_rank}:tp{tp_rank}"

    def pack_header(self, pid: int, created_ns: int) -> bytes:
        """The part that stays as it is while the writer lives."""
        return _HEADER.pack(MAGIC, self.schema, pid, created_ns)

    def pack_slot(self, sequence: int, values: Sequence[int]) -> tuple[int, bytes]:
        """Offset in the file and bytes of the slot that publication `sequence` goes to.

        Raises struct.error for a value that isn't an integer of 64 bits.
        """
        body = self._body.pack(sequence, *values)
        return _HEADER.size + (sequence & 1) * self.slot_bytes, body + _CHECK.pack(zlib.crc32(body))

    def parse(self, data: bytes) -> Record | None:
        """The newest whole publication in a file's bytes.

        None when both slots were caught half written (read again), or the file isn't one of this version.
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
    """Durations of one series, to be published by the keys of `fields`."""

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
