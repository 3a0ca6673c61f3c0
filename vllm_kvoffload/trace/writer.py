"""Writes a trace file, step by step, on the caller's thread. See `format` for its contents."""

from __future__ import annotations

import contextlib
import errno
import struct
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.trace.format import (
    DROPPED,
    END,
    REQUEST,
    STEP,
    Ids,
    Numbers,
    TraceError,
    TraceHeader,
    encode_numbers,
    pack_record,
)

MAX_SLOTS = 256  # minimum number of requests remembered, each with 4 * K bytes per group
_HINTS = {
    errno.EFBIG: "; RLIMIT_FSIZE limits this process's files: ulimit -f unlimited",
    errno.EROFS: "; name a file elsewhere, or mount it writable",
    errno.ENOSPC: "; free space, or name a file elsewhere",
    errno.EDQUOT: "; raise the user's quota, or name a file elsewhere",
    errno.EACCES: "; let this user write there, or name a file elsewhere",
}
_NOTHING: Ids = np.empty(0, np.int32)


def _errno(error: Exception) -> int:
    return getattr(error, "errno", None) or 0


def distinct_ids(topk: Ids) -> tuple[Numbers, Numbers]:
    """The sets of ids of query tokens: keys ``token << 32 | id`` int64, ascending, and counts int64 [T].

    Args:
        topk: int32 [T, K]; ids below 0 are padding, and so are ids above 2**31 - 2.
    """
    tokens, width = topk.shape
    if not width:
        return np.empty(0, np.int64), np.zeros(tokens, np.int64)
    ordered = np.sort(topk, axis=1)
    keep = ordered >= 0
    keep[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    counts = keep.sum(axis=1, dtype=np.int64)
    keys = ordered[keep].astype(np.int64)
    keys |= np.repeat(np.arange(tokens, dtype=np.int64) << 32, counts)
    return keys, counts


def compare(before: Numbers, keys: Numbers) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Which of ``before`` are in ``keys``, and which keys are not in ``before``; both ascending, distinct."""
    if not len(keys):
        return np.zeros(len(before), np.bool_), keys
    found = np.searchsorted(keys, before)
    np.minimum(found, len(keys) - 1, out=found)
    kept = np.asarray(keys[found] == before)
    fresh = np.ones(len(keys), np.bool_)
    fresh[found[kept]] = False
    return kept, keys[fresh]


class TraceWriter:
    """One trace file.

    Args:
        path: must not exist: a trace is never overwritten.
        header: the trace's description.

    Raises TraceError if the file can't be created. Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, path: str | Path, header: TraceHeader, *, max_slots: int = MAX_SLOTS) -> None:
        self.path = Path(path)
        self.header = header
        self.steps = 0
        self.dropped = 0
        self._max_slots = max_slots
        self._slots: OrderedDict[str, int] = OrderedDict()  # least recently recorded first
        self._last: dict[tuple[int, int], Ids] = {}  # (slot, group) -> ids of the last query token
        self._groups: set[int] = set()
        try:
            self._file = self.path.open("xb")
            self._file.write(header.encode())
            self._file.flush()  # makes a full file system fail now
        except FileExistsError as error:
            raise TraceError(f"{path} exists already: move it, or name another file") from error
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            reason = getattr(error, "strerror", None) or error
            raise TraceError(f"can't make {str(path)!r}: {reason}{_HINTS.get(_errno(error), '')}") from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self, group: int, step: int, topk: Ids, starts: Ids, seq_lens: Ids, request_ids: Sequence[str]
    ) -> None:
        """One step of one index group.

        Args:
            group: index group.
            step: its number, counted from 0 per group.
            topk: int32 [at least T, K], top-k ids of each query token, below 0: padding.
            starts: int32 [N + 1], the requests' first query tokens, from 0 to T.
            seq_lens: int32 [N], tokens including this step's.
            request_ids: [N], unique and as stable as the requests.

        Raises ValueError if the arguments are inconsistent; nothing is written then.
        """
        self._check(topk, starts, seq_lens, request_ids)
        slots = self._assign_slots(request_ids)
        payload = self._encode(group, step, topk[: int(starts[-1])], starts, seq_lens, slots)
        self._file.write(pack_record(STEP, payload))
        self.steps += 1

    def write_dropped(self, count: int) -> None:
        """Records that ``count`` steps were dropped before the next one."""
        self.dropped += count
        self._file.write(pack_record(DROPPED, struct.pack("<Q", count)))

    def flush(self) -> None:
        """Flushes written data to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Marks the trace as complete. Idempotent."""
        if not self._file.closed:
            self._file.write(pack_record(END, struct.pack("<QQ", self.steps, self.dropped)))
            self._file.close()

    def abandon(self) -> None:
        """Closes the file without an end record, as a killed process would leave it. Never raises."""
        with contextlib.suppress(OSError):
            self._file.close()

    @staticmethod
    def _check(topk: Ids, starts: Ids, seq_lens: Ids, request_ids: Sequence[str]) -> None:
        if len(starts) != len(seq_lens) + 1 or len(request_ids) != len(seq_lens):
            raise ValueError("query_start_loc, seq_lens and request_ids are not of the same requests")
        if starts[0] != 0 or np.any(np.diff(starts) < 0) or starts[-1] > len(topk):
            raise ValueError("query_start_loc must rise from 0 to topk's tokens at most")
        if len(set(request_ids)) != len(request_ids):
            raise ValueError("a request stands twice in a step")

    def _assign_slots(self, request_ids: Sequence[str]) -> list[int]:
        for name in request_ids:
            if name in self._slots:
                self._slots.move_to_end(name)
        current = set(request_ids)
        for name in request_ids:
            if name not in self._slots:
                slot = self._free_slot(current)
                self._slots[name] = slot
                self._file.write(
                    pack_record(REQUEST, struct.pack("<I", slot) + name.encode(errors="backslashreplace"))
                )
        return [self._slots[name] for name in request_ids]

    def _free_slot(self, current: set[str]) -> int:
        if len(self._slots) >= self._max_slots:
            oldest = next(iter(self._slots))
            if oldest not in current:
                slot = self._slots.pop(oldest)
                for group in self._groups:
                    self._last.pop((slot, group), None)
                return slot
        return len(self._slots)

    def _encode(
        self, group: int, step: int, topk: Ids, starts: Ids, seq_lens: Ids, slots: list[int]
    ) -> bytes:
        self._groups.add(group)
        keys, counts = distinct_ids(topk)
        ends = np.cumsum(counts)
        before = self._before(group, keys, ends, starts, slots)
        kept, fresh = compare(before, keys)
        fresh_counts = np.bincount(fresh >> 32, minlength=len(topk))
        head = np.empty((len(slots), 3), np.int64)
        head[:, 0], head[:, 1], head[:, 2] = slots, seq_lens, np.diff(starts)
        differences = np.diff(fresh, prepend=0)
        firsts = (np.cumsum(fresh_counts) - fresh_counts)[fresh_counts > 0]
        differences[firsts] = fresh[firsts] & 0xFFFFFFFF
        numbers = encode_numbers(
            np.concatenate(([group, step, len(slots)], head.ravel(), fresh_counts, differences))
        )
        return struct.pack("<I", len(numbers)) + numbers + np.packbits(kept).tobytes()

    def _before(self, group: int, keys: Numbers, ends: Numbers, starts: Ids, slots: list[int]) -> Numbers:
        """The previous sets, as keys of the tokens compared with them; remembers each request's last set."""
        ids = (keys & 0xFFFFFFFF).astype(np.int32)
        sets: list[Ids] = []
        for n, slot in enumerate(slots):
            last = self._last.get((slot, group), _NOTHING)
            for token in range(int(starts[n]), int(starts[n + 1])):
                sets.append(last)
                last = ids[int(ends[token - 1]) if token else 0 : int(ends[token])]
            self._last[slot, group] = last.copy()
        lengths = np.array([len(item) for item in sets], np.int64)
        tokens = np.repeat(np.arange(len(sets), dtype=np.int64) << 32, lengths)
        keys = np.concatenate([_NOTHING, *sets]).astype(np.int64)
        keys |= tokens
        return keys
