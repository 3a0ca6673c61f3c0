"""The reader side: finds a server's workers by their memory files and reads these.

Searches only this user's descendants of a given process. Keeps no file of a worker open between reads, so a
worker that ended, even by SIGKILL, disappears from the next read.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm_kvoffload.metrics.fields import FIELD_SETS
from vllm_kvoffload.metrics.layout import parse_link

RESCAN_S = 10.0
"""Minimum time between two searches; each examines every process of the machine, about 20 us apiece."""

_ATTEMPTS = 16


@dataclass(frozen=True)
class WorkerStats:
    """Last publication of one part of a worker.

    Attributes:
        part: name of its field set.
        instance_id, dp_rank, tp_rank: as given to `StatsChannel`; pid: the worker's.
        created_ns: start of the counters, ns since the epoch.
        values: by the keys of the field set.
    """

    part: str
    instance_id: str
    dp_rank: int
    tp_rank: int
    pid: int
    created_ns: int
    values: dict[str, int]


@dataclass(frozen=True)
class _Place:
    """Location of a worker's file: descriptor `fd` of process `pid`; `link` is its expected target."""

    pid: int
    fd: str
    link: str


def find_stats(pid_root: int, instance_id: str | None = None) -> list[WorkerStats]:
    """Counters of every worker at or below process `pid_root`, by DP and TP rank and part.

    With `instance_id`, only those of that engine. Empty when there is none. Caller and workers must be in the
    same PID namespace.
    """
    return _read_all(_search(pid_root, instance_id))


class StatsFinder:
    """`find_stats` for a periodic reader: caches the workers' locations. Thread-safe.

    Args:
        pid_root, instance_id: see `find_stats`.
        expected: expected number of workers' parts. While fewer are found, reads search again, at most every
            `rescan_s`.
    """

    def __init__(
        self, pid_root: int, instance_id: str | None, expected: int, rescan_s: float = RESCAN_S
    ) -> None:
        self._root, self._instance, self._expected = pid_root, instance_id, expected
        self._rescan_s = rescan_s
        self._next_search = time.monotonic()
        self._places: list[_Place] = []
        self._lock = threading.Lock()

    def read(self) -> list[WorkerStats]:
        """Like `find_stats`, in a few system calls per worker unless a search is due."""
        with self._lock:
            found = _read_all(self._places)
            now = time.monotonic()
            if len(found) >= self._expected or now < self._next_search:
                return found
            self._next_search = now + self._rescan_s
            self._places = list(_search(self._root, self._instance))
            return _read_all(self._places)


def _search(root: int, instance_id: str | None) -> Iterator[_Place]:
    for pid in _descendants(root):
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:  # gone, or not this user's
            continue
        for fd in descriptors:
            link = _link(pid, fd)
            identity = parse_link(link)
            # Engines of one server may append suffixes to its instance id.
            if identity is None or identity[0] not in FIELD_SETS:
                continue
            if instance_id is None or identity[1] in _aliases(instance_id, identity[2]):
                yield _Place(pid, fd, link)


def _aliases(instance_id: str, dp_rank: int) -> tuple[str, str]:
    return instance_id, f"{instance_id}_dp{dp_rank}"


def _descendants(root: int) -> list[int]:
    """`root` and all its descendants, from one pass over /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            continue
        # The name, in parentheses, may contain any character; the state and the parent follow it.
        parent = int(stat.rpartition(b")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry))
    found = [root]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _link(pid: int, fd: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""


def _read_all(places: Iterable[_Place]) -> list[WorkerStats]:
    found: dict[tuple[str, str, int, int], WorkerStats] = {}
    for place in places:
        stats = _read(place)
        if stats is None:
            continue
        key = (stats.part, stats.instance_id, stats.dp_rank, stats.tp_rank)
        # A second engine in the same process may exist before its predecessor's file is closed.
        if key not in found or found[key].created_ns < stats.created_ns:
            found[key] = stats
    return sorted(
        found.values(), key=lambda stats: (stats.dp_rank, stats.tp_rank, stats.part, stats.instance_id)
    )


def _read(place: _Place) -> WorkerStats | None:
    """A worker's values; None if it has ended, or the file belongs to another process or version."""
    identity = parse_link(place.link)
    # The descriptor may have been reused for, say, a FIFO, whose open could block: check first.
    if identity is None or _link(place.pid, place.fd) != place.link:
        return None
    fields = FIELD_SETS[identity[0]]
    try:
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        record = None
        for _ in range(_ATTEMPTS):
            record = fields.parse(os.pread(fd, fields.file_bytes, 0))
            if record is not None:
                break
    except OSError:
        return None
    finally:
        os.close(fd)
    # A forked child also holds its parent's file and may outlive the parent.
    if record is None or record.pid != place.pid:
        return None
    values = dict(zip(fields.index, record.values, strict=True))
    return WorkerStats(*identity, pid=record.pid, created_ns=record.created_ns, values=values)
