"""How much memory this process may still take: machine, cgroup (v1 and v2) and /dev/shm.

Reads /proc, /sys/fs/cgroup and statvfs only. Everything is in bytes.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import NamedTuple

# Using the last byte makes the kernel kill a process, most likely this one.
HEADROOM_BYTES = 256 << 20
_NO_LIMIT_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2^63


class MemoryLimit(NamedTuple):
    """One bound on an allocation, and how a user can raise it."""

    what: str
    available_bytes: int
    fix: str


def memory_limits(shm_dir: Path, root: Path = Path("/")) -> list[MemoryLimit]:
    """All limits on memory taken through `shm_dir` now. `root` stands for / in tests."""
    return [*ram_limits(root), _shm_limit(shm_dir), *_file_size_limit()]


def ram_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """MemAvailable and the cgroup limits, less HEADROOM_BYTES."""
    limits = []
    available = _key_values(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        limits.append(
            MemoryLimit(
                "free memory of the machine (MemAvailable)",
                max(0, available * 1024 - HEADROOM_BYTES),
                "lower dram_size_per_dp_GB, stop other processes or add memory",
            )
        )
    for directory in _memory_cgroups(root):
        left = _left_in_cgroup(directory)
        if left is not None:
            limits.append(
                MemoryLimit(
                    f"memory limit of cgroup {directory}",
                    max(0, left - HEADROOM_BYTES),
                    "raise the memory limit of the container or lower dram_size_per_dp_GB",
                )
            )
    return limits


def _shm_limit(shm_dir: Path) -> MemoryLimit:
    stat = os.statvfs(shm_dir)
    return MemoryLimit(
        f"free space of {shm_dir}",
        stat.f_bavail * stat.f_frsize,
        "lower dram_size_per_dp_GB or enlarge it (docker --shm-size, a Kubernetes emptyDir of medium Memory, "
        "mount -o remount,size=...)",
    )


def _file_size_limit() -> list[MemoryLimit]:
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY:
        return []
    fix = "raise it for the engine (ulimit -f unlimited, LimitFSIZE= of its unit)"
    return [MemoryLimit("largest file that this process may write (RLIMIT_FSIZE)", most, fix)]


def _memory_cgroups(root: Path) -> list[Path]:
    """Directories of this process's memory cgroup and its ancestors, as far as they are mounted here."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    found: list[Path] = []
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mount_root, mount_point = mount.split(" ")[3:5]
        top = root / mount_point.lstrip("/")
        # A container may see the mount start at its own cgroup, or a path outside its namespace (/..).
        inside = paths[kind].removeprefix(mount_root if mount_root != "/" else "").strip("/")
        leaf = top if ".." in inside else top / inside
        chain = [leaf, *leaf.parents]
        found += [directory for directory in chain[: chain.index(top) + 1] if directory.is_dir()]
    return found


def _left_in_cgroup(directory: Path) -> int | None:
    """Limit less usage, page cache that can be dropped not counted; None without a limit."""
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
            return limit - usage + _key_values(directory / "memory.stat").get(cache_key, 0)
    return None


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None  # v2 writes "max" for no limit


def _key_values(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # absent or unreadable: treated as no limit
        return []
