"""Reads a trace file step by step. See `format` for its contents."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from vllm_kvoffload.trace.format import (
    DROPPED,
    END,
    REQUEST,
    STEP,
    Ids,
    TraceError,
    TraceHeader,
    decode_numbers,
    read_record,
    record_bytes,
)


@dataclass(frozen=True)
class RequestStep:
    """One request's part of a step.

    name: the request's id.
    seq_len: its tokens including this step's query tokens.
    ids: distinct top-k ids of each query token, int32, ascending.
    """

    name: str
    seq_len: int
    ids: tuple[Ids, ...]

    @property
    def query_len(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TraceStep:
    """One step of one index group; ``step`` counts per group, dropped steps included."""

    group: int
    step: int
    requests: tuple[RequestStep, ...]


class TraceReader:
    """One trace file; can be iterated any number of times.

    Attributes, the last three of the last complete pass:
        header: the trace's description.
        file_bytes: its size.
        dropped: record calls dropped by the recorder.
        closed: False if the trace has no end record: its process is still writing, died, or had to stop.
        damaged_at: None, or the offset of the first byte that is not part of a complete record.

    Raises TraceError if the file is not a trace. Iterating raises it for an inconsistent record.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.dropped = 0
        self.closed = False
        self.damaged_at: int | None = None
        try:
            self.file_bytes = self.path.stat().st_size
            with self.path.open("rb") as file:
                self.header = TraceHeader.read(file, str(path))
                self._first_record = file.tell()
        except OSError as error:
            raise TraceError(f"can't read {path}: {error.strerror}") from error

    def __iter__(self) -> Iterator[TraceStep]:
        self.dropped, self.closed, self.damaged_at = 0, False, None
        names: dict[int, str] = {}
        last: dict[int, dict[int, Ids]] = {}  # slot -> group -> ids of the last query token
        for kind, payload in self._records():
            if kind == REQUEST:
                (slot,) = struct.unpack_from("<I", payload)
                names[slot] = payload[4:].decode()
                last[slot] = {}
            elif kind == STEP:
                yield _decode_step(payload, names, last)
            elif kind == DROPPED:
                self.dropped += struct.unpack("<Q", payload)[0]
            elif kind == END:
                self.closed = True

    def _records(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            offset = self._first_record
            file.seek(offset)
            while record := self._next(file, offset):
                yield record
                offset += record_bytes(record[1])

    def _next(self, file: BinaryIO, offset: int) -> tuple[int, bytes] | None:
        size = self.path.stat().st_size
        record = read_record(file, size - offset)
        if record is None and offset < size:
            self.damaged_at = offset
        return record


def _decode_step(payload: bytes, names: dict[int, str], last: dict[int, dict[int, Ids]]) -> TraceStep:
    try:
        return _StepDecoder(payload).decode(names, last)
    except (IndexError, KeyError, struct.error, ValueError) as error:
        raise TraceError(f"a step contradicts itself: {error!r}") from error


class _StepDecoder:
    def __init__(self, payload: bytes) -> None:
        (length,) = struct.unpack_from("<I", payload)
        self._numbers = decode_numbers(payload[4 : 4 + length])
        self._bits = np.unpackbits(np.frombuffer(payload, np.uint8, offset=4 + length)).astype(np.bool_)
        self._bit = 0

    def decode(self, names: dict[int, str], last: dict[int, dict[int, Ids]]) -> TraceStep:
        group, step, count = self._numbers[:3].tolist()
        head = self._numbers[3 : 3 + 3 * count].reshape(count, 3)
        first = 3 + 3 * count
        tokens = int(head[:, 2].sum())
        fresh_counts = self._numbers[first : first + tokens].tolist()
        at = first + tokens
        if at + sum(fresh_counts) != len(self._numbers):
            raise TraceError("a step has another number of ids than it says")
        token = 0
        requests = []
        for slot, seq_len, query_len in head.tolist():
            before = last[slot].get(group, np.empty(0, np.int32))
            sets = []
            for fresh in fresh_counts[token : token + query_len]:
                before = self._token(before, at, fresh)
                sets.append(before)
                at += fresh
            token += query_len
            last[slot][group] = before
            requests.append(RequestStep(names[slot], seq_len, tuple(sets)))
        if len(self._bits) - self._bit >= 8:
            raise TraceError("a step has more bits than ids to keep")
        return TraceStep(group, step, tuple(requests))

    def _token(self, before: Ids, at: int, fresh: int) -> Ids:
        kept = self._bits[self._bit : self._bit + len(before)]
        self._bit += len(before)
        added = np.cumsum(self._numbers[at : at + fresh]).astype(np.int32)
        ids = np.sort(np.concatenate([before[kept], added]))  # kept: of before's length, or an IndexError
        ids.flags.writeable = False
        return ids
