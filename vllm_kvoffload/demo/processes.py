"""Finds a server's processes and its names in /dev/shm through /proc. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SEGMENT = re.compile(r"\s(/dev/shm/\S+)$")


@dataclass(frozen=True)
class Process:
    """A process, distinguished from a later one of the same pid by its start (clock ticks since boot)."""

    pid: int
    start: int


@dataclass(frozen=True)
class _Entry:
    process: Process
    name: str
    state: str
    parent: int
    session: int


def session_and_descendants(leader: int, known: Iterable[Process] = ()) -> dict[Process, str]:
    """Returns a server's live processes with their names: its session, its tree, and survivors of `known`.

    `leader` is the pid of the session's leader, which must not have been reaped yet: until then its number
    cannot be reused. Zombies count as gone.
    """
    entries = {entry.process.pid: entry for entry in _entries()}
    wanted = {leader, *(process.pid for process in known if _same(entries.get(process.pid), process))}
    wanted |= {pid for pid, entry in entries.items() if entry.session == leader}
    grown = True
    while grown:
        children = {pid for pid, entry in entries.items() if entry.parent in wanted} - wanted
        grown = bool(children)
        wanted |= children
    found = (entries[pid] for pid in sorted(wanted) if pid in entries)
    return {entry.process: entry.name for entry in found if entry.state not in "ZX"}


def mapped_segments(processes: Iterable[Process]) -> set[Path]:
    """Returns named files in /dev/shm that are mapped by one of the processes."""
    found: set[Path] = set()
    for process in processes:
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended meanwhile
            continue
        found |= {Path(match[1]) for line in maps.splitlines() if (match := _SEGMENT.search(line))}
    return found


def _same(entry: _Entry | None, process: Process) -> bool:
    return entry is not None and entry.process == process


def _entries() -> Iterable[_Entry]:
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name, in parentheses, may contain parentheses itself.
        head, _, tail = stat.rpartition(")")
        fields = tail.split()
        process = Process(int(name), int(fields[19]))
        yield _Entry(process, head.partition("(")[2], fields[0], int(fields[1]), int(fields[3]))
