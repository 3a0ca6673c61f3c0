"""Memory limits, read from made-up /proc and /sys/fs/cgroup trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_kvoffload.memory.limits import HEADROOM_BYTES, memory_limits, ram_limits

GIB = 1 << 30
V2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def machine(root: Path, cgroup: str, mounts: str, **files: object) -> None:
    write(
        root,
        {
            "proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {64 << 20} kB\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mounts,
        },
    )
    write(root / "sys/fs/cgroup", files)


def available(root: Path) -> list[int]:
    return [limit.available_bytes + HEADROOM_BYTES for limit in ram_limits(root)]


def test_mem_available_counts_not_mem_free(tmp_path: Path) -> None:
    machine(tmp_path, "", "")
    (limit,) = ram_limits(tmp_path)
    assert limit.available_bytes == 64 * GIB - HEADROOM_BYTES
    assert "MemAvailable" in limit.what


def test_cgroup_v2_counts_every_ancestor_and_not_the_page_cache(tmp_path: Path) -> None:
    machine(
        tmp_path,
        "0::/pod/container",
        V2.format(root="/"),
        **{
            "pod/container/memory.max": 8 * GIB,
            "pod/container/memory.current": 6 * GIB,
            "pod/container/memory.stat": f"anon 1\ninactive_file {3 * GIB}\nactive_file 9\n",
            "pod/memory.max": 20 * GIB,
            "pod/memory.current": 17 * GIB,
            "memory.max": "max",
            "memory.current": 1,
        },
    )
    assert available(tmp_path) == [64 * GIB, 5 * GIB, 3 * GIB]


def test_cgroup_v2_in_its_own_namespace(tmp_path: Path) -> None:
    files = {"memory.max": 4 * GIB, "memory.current": GIB}
    machine(tmp_path, "0::/", V2.format(root="/"), **files)
    assert available(tmp_path) == [64 * GIB, 3 * GIB]


@pytest.mark.parametrize("path", ["/../../elsewhere", "/not/mounted/here"])
def test_a_path_that_is_not_visible_falls_back_to_the_mount(tmp_path: Path, path: str) -> None:
    files = {"memory.max": 4 * GIB, "memory.current": GIB}
    machine(tmp_path, f"0::{path}", V2.format(root="/"), **files)
    assert available(tmp_path) == [64 * GIB, 3 * GIB]


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_cgroup_v1_bind_mounted_or_not(tmp_path: Path, root: str) -> None:
    where = "memory/docker/abc/" if root == "/" else "memory/"
    machine(
        tmp_path,
        "8:pids:/\n4:cpu,memory:/docker/abc\n0::/\n",
        V1_CPU + V1.format(root=root),
        **{
            where + "memory.limit_in_bytes": 10 * GIB,
            where + "memory.usage_in_bytes": 4 * GIB,
            where + "memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        },
    )
    assert available(tmp_path) == [64 * GIB, 7 * GIB]


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": 0x7FFFFFFFFFFFF000, "memory/memory.usage_in_bytes": GIB}
    machine(tmp_path, "4:memory:/\n", V1.format(root="/"), **files)
    assert available(tmp_path) == [64 * GIB]


def test_over_the_limit_is_zero_not_negative(tmp_path: Path) -> None:
    machine(tmp_path, "0::/", V2.format(root="/"), **{"memory.max": GIB, "memory.current": 2 * GIB})
    assert ram_limits(tmp_path)[1].available_bytes == 0


def test_nothing_readable_means_no_ram_limit_but_shm_counts(tmp_path: Path) -> None:
    assert ram_limits(tmp_path) == []
    (limit,) = memory_limits(tmp_path, tmp_path)
    assert limit.available_bytes > 0
    assert str(tmp_path) in limit.what
    assert "--shm-size" in limit.fix


def test_the_real_machine() -> None:
    assert all(limit.available_bytes >= 0 and limit.fix for limit in memory_limits(Path("/dev/shm")))
    assert any("MemAvailable" in limit.what for limit in ram_limits())
