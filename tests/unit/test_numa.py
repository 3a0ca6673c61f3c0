"""Pages of the host pool on all NUMA nodes."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import pytest

from vllm_kvoffload.memory import numa
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout

LAYOUT = HostPoolLayout(2, 4, 16, (("nope", 64),))


@pytest.mark.parametrize(
    ("line", "nodes"),
    [("0", [0]), ("0-3", [0, 1, 2, 3]), ("0,2-3", [0, 2, 3]), ("0-1,4", [0, 1, 4])],
)
def test_allowed_nodes(line: str, nodes: list[int]) -> None:
    assert (
        numa.allowed_nodes(f"Name:\tx\nMems_allowed:\t1\nMems_allowed_list:\t{line}\nThreads:\t1\n") == nodes
    )


def test_a_kernel_without_numa_says_nothing() -> None:
    assert numa.allowed_nodes("Name:\tx\n") == []
    assert numa.allowed_nodes(Path("/proc/self/status").read_text())


def test_the_policy_holds_within_and_is_put_back() -> None:
    before = numa.thread_policy()
    if before != numa.DEFAULT:
        pytest.skip(f"this thread's memory policy is {before} already, or can't be asked for")
    with numa.interleaved([0]) as spread:
        if not spread:
            pytest.skip("memory policies can't be set here")
        assert numa.thread_policy() == numa.INTERLEAVE
        with numa.interleaved([0]) as again:
            assert not again  # a policy that was chosen stays
    assert numa.thread_policy() == numa.DEFAULT


def test_one_node_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Mems_allowed_list:\t0\n")
    monkeypatch.setattr(numa, "STATUS", tmp_path / "status")
    monkeypatch.setattr(numa, "_set_policy", lambda *_: pytest.fail("set"))
    with numa.interleaved() as spread:
        assert not spread


def test_a_kernel_that_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a container's does without CAP_SYS_NICE."""

    def refuse(*_: object) -> bool:
        ctypes.set_errno(errno.EPERM)
        return False

    monkeypatch.setattr(numa, "thread_policy", lambda: numa.DEFAULT)
    monkeypatch.setattr(numa, "_set_policy", refuse)
    with numa.interleaved([0, 1]) as spread:
        assert not spread
    assert "--cap-add SYS_NICE" in caplog.text


def test_the_pool_is_reserved_within(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(numa, "thread_policy", lambda: numa.DEFAULT)
    monkeypatch.setattr(numa, "allowed_nodes", lambda _: [0, 1])
    monkeypatch.setattr(numa, "_set_policy", lambda mode, nodes: bool(seen.append(f"{mode} {nodes}")) or True)
    HostPool.create(LAYOUT, spread=True).close()
    assert seen == ["3 [0, 1]", "0 []"]
    seen.clear()
    HostPool.create(LAYOUT).close()
    assert seen == []
