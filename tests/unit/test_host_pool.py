"""Host pool: where rows lie, who may see them, and what happens without enough memory or after a SIGKILL."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from vllm_kvoffload.memory import segment as segment_module
from vllm_kvoffload.memory.limits import MemoryLimit
from vllm_kvoffload.memory.segment import (
    SegmentAttachError,
    SegmentClosedError,
    SegmentError,
    SegmentFileError,
    SegmentLayoutError,
    SegmentMemoryError,
    SharedSegment,
    remove_stale_segments,
)
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout, MemoryRange

pytestmark = pytest.mark.timeout(60)

SHM = Path("/dev/shm")
MIB = 1 << 20
GIB = 1 << 30
LAYOUT = HostPoolLayout(num_layers=3, num_blocks=5, block_size=16, components=(("nope", 1024), ("rope", 128)))

# Without torch, to start fast. Prints its name, then obeys one word per line.
OWNER = """
import sys
from vllm_kvoffload.memory.segment import SharedSegment
segment = SharedSegment.create(4 << 20, "test")
print(segment.name, flush=True)
for line in sys.stdin:
    getattr(segment, line.strip())()
    print("done", flush=True)
"""


def names() -> set[str]:
    return {name for name in os.listdir(SHM) if name.startswith("kvoffload-")}


def left_behind(before: set[str]) -> set[str]:
    """New names, but for those of live processes that are not ours to judge (other tests on this machine)."""
    return {
        name
        for name in names() - before
        if name.split("-")[1] == str(os.getpid()) or not Path("/proc", name.split("-")[1]).exists()
    }


@pytest.fixture(autouse=True)
def nothing_left_in_shm() -> Iterator[None]:
    before = names()
    yield
    if left_behind(before):
        gc.collect()  # slow with torch loaded, so not always
        assert not left_behind(before)


@contextlib.contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def command(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    print(word, file=process.stdin, flush=True)
    assert process.stdout.readline() == "done\n"


def sigkill(process: subprocess.Popen[str]) -> None:
    """Kill without reaping: the pid still exists, as a zombie, when the next start looks."""
    process.send_signal(signal.SIGKILL)
    proc = Path(f"/proc/{process.pid}")
    while state(proc) != "Z" or len(os.listdir(proc / "task")) > 1:  # threads end after their leader
        time.sleep(0.002)


def state(proc: Path) -> str:
    return (proc / "stat").read_text().rpartition(")")[2].split()[0]


class TestLayout:
    def test_offsets_are_disjoint_aligned_and_in_order(self) -> None:
        end = 0
        for layer in range(3):
            for component, (_, row_bytes) in enumerate(LAYOUT.components):
                start = LAYOUT.offset(layer, component)
                assert start >= end
                assert start % (2 * MIB) == 0
                end = start + LAYOUT.component_bytes(component)
                assert LAYOUT.component_bytes(component) == 5 * 16 * row_bytes
        assert end <= LAYOUT.total_bytes == 3 * 2 * 2 * MIB
        assert LAYOUT.row_bytes == 1152
        assert LAYOUT.payload_bytes == 3 * 5 * 16 * 1152

    def test_sizes_beyond_32_bits(self) -> None:
        layout = HostPoolLayout(78, 1 << 16, 128, (("kv", 1152),))  # GLM-5.x, 8 Mi tokens
        per_layer = (1 << 23) * 1152
        assert layout.offset(77, 0) == 77 * per_layer
        assert layout.total_bytes == layout.payload_bytes == 78 * per_layer == 702 * GIB

    def test_chunks_cover_the_pool_within_the_limit_and_never_cut_a_block(self) -> None:
        big = HostPoolLayout(4, 1 << 16, 128, (("kv", 1152), ("scale", 100)))
        for layout, limit in ((LAYOUT, 64 * GIB), (LAYOUT, 5 * MIB), (big, 64 * GIB), (big, 3 * GIB + 7)):
            chunks = layout.chunks(limit)
            assert chunks[0].start == 0
            assert all(a.start + a.nbytes == b.start for a, b in pairwise(chunks))
            assert sum(chunk.nbytes for chunk in chunks) == layout.total_bytes
            assert max(chunk.nbytes for chunk in chunks) <= limit
            for layer in range(layout.num_layers):
                for component, (_, row_bytes) in enumerate(layout.components):
                    base, block = layout.offset(layer, component), layout.block_size * row_bytes
                    cuts = [
                        c.start - base
                        for c in chunks
                        if 0 < c.start - base < layout.component_bytes(component)
                    ]
                    assert all(cut % block == 0 for cut in cuts)
        assert LAYOUT.chunks() == [MemoryRange(0, LAYOUT.total_bytes)]
        assert all(c.start % (2 * MIB) == 0 for c in big.chunks())
        with pytest.raises(ValueError, match="max_bytes=100000: a block of 'nope'"):
            HostPoolLayout(1, 99, 128, (("nope", 1024),)).chunks(100000)

    @pytest.mark.parametrize(
        "change",
        [
            (4, 5, 16, (("nope", 1024), ("rope", 128))),
            (3, 6, 16, (("nope", 1024), ("rope", 128))),
            (3, 5, 8, (("nope", 1024), ("rope", 128))),
            (3, 5, 16, (("rope", 128), ("nope", 1024))),
            (3, 5, 16, (("nope", 1024), ("rope", 64))),
            (3, 5, 16, (("nope", 1024),)),
            (3, 5, 16, (("nope", 1024), ("pe", 128))),
        ],
    )
    def test_every_field_changes_the_digest(
        self, change: tuple[int, int, int, tuple[tuple[str, int], ...]]
    ) -> None:
        assert HostPoolLayout(*change).digest != LAYOUT.digest
        assert HostPoolLayout(3, 5, 16, LAYOUT.components).digest == LAYOUT.digest

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ((0, 1, 1, (("a", 1),)), "num_layers=0"),
            ((1, -1, 1, (("a", 1),)), "num_blocks=-1"),
            ((1, 1, 0, (("a", 1),)), "block_size=0"),
            ((1, 1, 1, (("a", 0),)), "a=0"),
            ((1, 1, 1, ()), "components"),
            ((1, 1, 1, (("a", 1), ("a", 2))), "components"),
            ((1, 1, 1, (("", 1),)), "components"),
        ],
    )
    def test_bad_layouts(self, args: tuple[int, int, int, tuple[tuple[str, int], ...]], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            HostPoolLayout(*args)

    @pytest.mark.parametrize("layer", [-1, 3])
    def test_layers_outside(self, layer: int) -> None:
        with pytest.raises(IndexError, match=f"layer={layer}"):
            LAYOUT.offset(layer, 0)


class TestSharing:
    def test_tensors_have_the_layout_and_start_as_zeros(self) -> None:
        with HostPool.create(LAYOUT) as pool:
            base = pool.chunks()[0].start
            for layer in range(3):
                tensors = pool.layer(layer)
                assert list(tensors) == ["nope", "rope"]
                for component, (name, row_bytes) in enumerate(LAYOUT.components):
                    tensor = tensors[name]
                    assert tensor.shape == (5, 16, row_bytes)
                    assert tensor.dtype == torch.uint8
                    assert tensor.is_contiguous()
                    assert tensor.data_ptr() % (2 * MIB) == 0
                    assert tensor.data_ptr() - base == LAYOUT.offset(layer, component)
                    assert not tensor.any()
                    tensor.fill_(1 + 2 * layer + component)
            for layer in range(3):  # no write has hit a neighbour
                for component, name in enumerate(("nope", "rope")):
                    assert (pool.layer(layer)[name] == 1 + 2 * layer + component).all()

    def test_another_process_sees_writes_and_is_seen(self) -> None:
        program = (
            "import sys; from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout\n"
            f"pool = HostPool.attach(sys.argv[1], {LAYOUT!r})\n"
            "assert not pool.is_owner\n"
            "rows = pool.layer(2)['rope']; print(int(rows[4, 15, 127])); rows[0, 0, 0] = 9; pool.close()\n"
        )
        with HostPool.create(LAYOUT) as pool:
            pool.layer(2)["rope"][4, 15, 127] = 77
            done = subprocess.run(
                [sys.executable, "-c", program, pool.name],
                capture_output=True,
                text=True,
                timeout=50,
                check=True,
            )
            assert done.stdout == "77\n"
            assert pool.layer(2)["rope"][0, 0, 0] == 9

    def test_name_is_unguessable_and_only_for_its_owner(self) -> None:
        previous = os.umask(0)
        try:
            with HostPool.create(LAYOUT) as a, HostPool.create(LAYOUT) as b:
                info = os.stat(SHM / a.name)
                assert stat.S_IMODE(info.st_mode) == 0o600
                assert info.st_uid == os.geteuid()
                assert info.st_blocks * 512 >= LAYOUT.total_bytes  # reserved, so no SIGBUS later
                parts = [re.fullmatch(r"kvoffload-(\d+)-(\d+)-([0-9a-f]{32})", pool.name) for pool in (a, b)]
                assert parts[0]
                assert parts[1]
                assert parts[0][3] != parts[1][3]
                assert int(parts[0][1]) == os.getpid()
        finally:
            os.umask(previous)

    def test_strictest_umask_does_not_lock_us_out(self) -> None:
        previous = os.umask(0o777)
        try:
            with HostPool.create(LAYOUT) as pool:
                HostPool.attach(pool.name, LAYOUT).close()
        finally:
            os.umask(previous)

    def test_another_layout_is_refused_with_both_in_the_message(self) -> None:
        other = HostPoolLayout(3, 5, 8, (("nope", 2048), ("rope", 256)))
        assert other.total_bytes == LAYOUT.total_bytes  # so size alone would not tell
        with HostPool.create(LAYOUT) as pool:
            with pytest.raises(SegmentLayoutError, match=r"expected .*block_size=8.*found .*block_size=16"):
                HostPool.attach(pool.name, other)
            HostPool.attach(pool.name, LAYOUT).close()

    @pytest.mark.parametrize(
        "name", ["", "../etc/passwd", "kvoffload-1-2-xyz", "/dev/shm/x", "kvoffload-1-2"]
    )
    def test_only_pool_names_are_opened(self, name: str) -> None:
        with pytest.raises(SegmentAttachError, match="expected a host pool name"):
            HostPool.attach(name, LAYOUT)

    def test_attach_refuses_links_and_open_modes(self) -> None:
        link = SHM / f"kvoffload-1-2-{'0' * 32}"
        with HostPool.create(LAYOUT) as pool:
            link.symlink_to(SHM / pool.name)
            try:
                with pytest.raises(SegmentAttachError):
                    HostPool.attach(link.name, LAYOUT)
            finally:
                link.unlink()
            (SHM / pool.name).chmod(0o644)
            with pytest.raises(SegmentAttachError, match="mode 0600"):
                HostPool.attach(pool.name, LAYOUT)

    def test_offsets_beyond_4_gib_reach_their_own_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, size: os.truncate(fd, offset + size))
        monkeypatch.setattr(segment_module, "memory_limits", lambda _: [])
        monkeypatch.setattr(segment_module, "ram_limits", lambda: [])
        layout = HostPoolLayout(2, 4097, 1024, (("kv", 1152),))  # 4.8 GB a layer, three pages touched
        with HostPool.create(layout) as pool, HostPool.attach(pool.name, layout) as other:
            for pattern, (layer, block) in enumerate(((0, 0), (0, 4096), (1, 4096)), 1):
                pool.layer(layer)["kv"][block, 1023, 1151] = pattern
            found = [
                int(other.layer(i)["kv"][j, 1023, 1151]) for i, j in ((0, 0), (0, 4096), (1, 0), (1, 4096))
            ]
            assert found == [1, 2, 0, 3]


class TestLifetime:
    def test_seal_removes_the_name_and_nothing_else(self) -> None:
        with HostPool.create(LAYOUT) as pool, HostPool.attach(pool.name, LAYOUT) as other:
            pool.seal()
            pool.seal()
            assert pool.name not in names()
            pool.layer(0)["nope"][1, 1, 1] = 5
            assert other.layer(0)["nope"][1, 1, 1] == 5
            with pytest.raises(SegmentAttachError, match="sealed"):
                HostPool.attach(pool.name, LAYOUT)
            with pytest.raises(SegmentError, match="only be sealed by the rank that created it"):
                other.seal()

    @pytest.mark.parametrize("seal", [False, True])
    def test_close_is_idempotent_and_final(self, seal: bool) -> None:
        pool = HostPool.create(LAYOUT)
        if seal:
            pool.seal()
        for _ in range(3):
            pool.close()
        assert pool.name not in names()
        for use in (lambda: pool.layer(0), pool.chunks):
            with pytest.raises(SegmentClosedError):
                use()

    def test_closing_one_rank_leaves_the_others(self) -> None:
        with HostPool.create(LAYOUT) as pool:
            other = HostPool.attach(pool.name, LAYOUT)
            other.close()
            other.close()
            assert pool.name in names()
            pool.layer(0)["nope"].fill_(1)

    def test_tensors_outlive_close_and_then_memory_is_returned(self) -> None:
        pool = HostPool.create(LAYOUT)
        tensor = pool.layer(1)["nope"]
        address = tensor.data_ptr()
        pool.close()
        gc.collect()
        tensor.fill_(3)  # a crash, if close had unmapped it
        assert tensor.sum() == 3 * tensor.numel()
        assert mapped(address)
        del tensor
        gc.collect()
        assert not mapped(address)

    def test_a_dropped_pool_leaves_no_name_and_no_descriptor(self) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        name = HostPool.create(LAYOUT).name
        gc.collect()
        assert name not in names()
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_forked_child_does_not_remove_the_parents_pool(self) -> None:
        pool = HostPool.create(LAYOUT)
        pid = os.fork()
        if pid == 0:
            pool.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert pool.name in names()
        HostPool.attach(pool.name, LAYOUT).close()
        pool.close()

    @pytest.mark.parametrize("ending", ["sys.exit(3)", "raise ZeroDivisionError", "pass"])
    def test_every_ordinary_exit_removes_the_name(self, ending: str) -> None:
        program = OWNER.partition("for line")[0] + ending
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
        )
        assert done.stdout.strip()
        assert done.stdout.strip() not in names()


def mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class TestKilled:
    def test_sigkill_before_seal_leaves_nothing_after_the_next_start(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with owner_process() as (process, name):
            sigkill(process)
            assert name in names()
            with caplog.at_level(logging.WARNING), HostPool.create(LAYOUT):
                assert name not in names()
            assert name in caplog.text

    def test_sigkill_after_seal_leaves_nothing_at_all(self) -> None:
        with owner_process() as (process, name):
            command(process, "seal")
            sigkill(process)
            assert name not in names()

    def test_sigkill_while_reserving_leaves_nothing(self) -> None:
        program = (
            "import os, signal\nos.posix_fallocate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            + OWNER
        )
        before = names()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50, check=False)
        assert done.returncode == -signal.SIGKILL
        assert not left_behind(before)

    def test_a_live_owner_is_never_touched(self) -> None:
        with owner_process() as (process, name):
            assert name not in remove_stale_segments()
            assert name in names()
            SharedSegment.attach(name, 4 << 20, "test").close()
            command(process, "close")

    def test_survivors_keep_their_memory_when_the_owner_is_cleaned_up(self) -> None:
        with owner_process() as (process, name):
            segment = SharedSegment.attach(name, 4 << 20, "test")
            segment.data[-1] = 7
            sigkill(process)
            assert name in remove_stale_segments()
            assert segment.data[-1] == 7
            segment.close()

    def test_a_reused_pid_is_told_apart_by_its_start_time(self) -> None:
        path = plant(os.getpid(), start=1)
        assert path.name in remove_stale_segments()

    def test_an_owner_in_another_pid_namespace_is_recognised_by_its_lock(self) -> None:
        path = plant(dead_pid(), start=1)
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            assert path.name not in remove_stale_segments()
            assert path.exists()
        assert path.name in remove_stale_segments()

    def test_the_owner_holds_the_lock_until_it_closes(self) -> None:
        with HostPool.create(LAYOUT) as pool, (SHM / pool.name).open("r+") as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            pool.close()
            gc.collect()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_other_files_are_never_touched(self) -> None:
        pid = dead_pid()
        strangers = [
            SHM / f"kvoffload-{pid}-1-short",
            SHM / f"kvoffload-{pid}-1-{'a' * 32}.bak",
            SHM / f"kvoffload-x-1-{'a' * 32}",
        ]
        fifo, link = (SHM / f"kvoffload-{pid}-1-{digit * 32}" for digit in "ef")
        try:
            for path in strangers:
                path.touch()
            os.mkfifo(fifo)
            link.symlink_to(strangers[0])
            removed = remove_stale_segments()
            assert not {path.name for path in (*strangers, fifo, link)} & set(removed)
            assert all(path.is_symlink() or path.exists() for path in (*strangers, fifo, link))
        finally:
            for path in (*strangers, fifo, link):
                path.unlink(missing_ok=True)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
    def test_another_users_segment_is_never_touched_even_by_root(self) -> None:
        path = plant(dead_pid(), start=1)
        try:
            os.chown(path, 12345, 12345)
            assert path.name not in remove_stale_segments()
            assert path.exists()
            with pytest.raises(SegmentAttachError, match="this user"):
                HostPool.attach(path.name, LAYOUT)
        finally:
            path.unlink()

    def test_two_cleaners_at_once(self) -> None:
        """Whichever unlinks first, the other goes on quietly and both agree that it is gone."""
        paths = [plant(dead_pid(), start=1, digit=digit) for digit in "0123456789abcdef"]
        program = "from vllm_kvoffload.memory.segment import remove_stale_segments as r; print(*r())"
        cleaners = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        removed = [name for cleaner in cleaners for name in cleaner.communicate(timeout=50)[0].split()]
        assert [cleaner.returncode for cleaner in cleaners] == [0, 0]
        assert sorted(removed) == sorted(path.name for path in paths)


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def plant(pid: int, start: int, digit: str = "d") -> Path:
    path = SHM / f"kvoffload-{pid}-{start}-{digit * 32}"
    path.touch(0o600)
    return path


class TestMemory:
    def expect_refusal(self, limited_by: str, limit_bytes: int | None = None) -> SegmentMemoryError:
        before = names()
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SegmentMemoryError, match=limited_by) as info:
            HostPool.create(LAYOUT, limit_bytes)
        assert not left_behind(before)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        return info.value

    def test_configured_limit_counts_the_kv_data(self) -> None:
        error = self.expect_refusal("dram_size_per_dp_GB", LAYOUT.payload_bytes - 1)
        assert error.requested_bytes == LAYOUT.payload_bytes
        assert error.available_bytes == LAYOUT.payload_bytes - 1
        for number in (error.requested_bytes, error.available_bytes):
            assert str(number) in str(error)
        assert "raise it" in str(error)
        HostPool.create(LAYOUT, LAYOUT.payload_bytes).close()

    def test_tightest_machine_limit_is_named_before_anything_is_taken(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        limits = [
            MemoryLimit("free memory", 9 << 40, "-"),
            MemoryLimit("cgroup /x", 3 * MIB, "raise the limit"),
        ]
        monkeypatch.setattr(segment_module, "memory_limits", lambda _: limits)
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("reserved before the check"))
        error = self.expect_refusal("cgroup /x")
        assert error.available_bytes == 3 * MIB
        assert error.requested_bytes == LAYOUT.total_bytes + 2 * MIB
        assert "raise the limit" in str(error)

    def test_a_real_impossible_request(self) -> None:
        huge = HostPoolLayout(1000, 1 << 20, 128, (("kv", 1152),))
        with pytest.raises(SegmentMemoryError) as info:
            HostPool.create(huge)
        assert info.value.available_bytes < info.value.requested_bytes == huge.total_bytes + 2 * MIB

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
    def test_shm_filling_up_meanwhile(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        reserve = os.posix_fallocate

        def full(fd: int, offset: int, size: int) -> None:
            if offset >= 4 * MIB:
                raise OSError(code, os.strerror(code))
            reserve(fd, offset, size)

        monkeypatch.setattr(segment_module, "RESERVE_STEP_BYTES", 2 * MIB)
        monkeypatch.setattr(os, "posix_fallocate", full)
        error = self.expect_refusal("filled up while the pool was reserved")
        assert error.available_bytes == 4 * MIB

    def test_machine_running_out_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two ranks that both passed the first check: the later one stops before memory runs out."""
        left = iter([100 * MIB, 100 * MIB, 3 * MIB])
        monkeypatch.setattr(segment_module, "RESERVE_STEP_BYTES", 2 * MIB)
        monkeypatch.setattr(
            segment_module, "ram_limits", lambda: [MemoryLimit("free memory", next(left), "stop it")]
        )
        error = self.expect_refusal("free memory")
        assert error.available_bytes == 4 * MIB + 3 * MIB

    def test_other_errors_are_not_taken_for_lack_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: int) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, "posix_fallocate", broken)
        before = names()
        with pytest.raises(SegmentFileError, match="broken"):
            HostPool.create(LAYOUT)
        assert not left_behind(before)

    @pytest.mark.parametrize(
        ("call", "number", "kind", "fix"),
        [
            ("posix_fallocate", errno.EFBIG, SegmentMemoryError, "RLIMIT_FSIZE"),
            ("posix_fallocate", errno.EDQUOT, SegmentMemoryError, "raise the quota"),
            ("posix_fallocate", errno.EINVAL, SegmentFileError, "mount -t tmpfs"),
            ("open", errno.EROFS, SegmentFileError, "writable"),
            ("open", errno.EACCES, SegmentFileError, "mode 1777"),
            ("open", errno.EOPNOTSUPP, SegmentFileError, "mount -t tmpfs"),
            ("open", errno.EMFILE, SegmentFileError, "ulimit -n"),
            ("listdir", errno.ENOENT, SegmentFileError, "mount a tmpfs"),
            ("statvfs", errno.EACCES, SegmentFileError, "mode 1777"),
            ("fchmod", errno.EPERM, SegmentFileError, "mode 1777"),
            ("pwrite", errno.ENOSPC, SegmentFileError, "enlarge"),
            ("link", errno.EROFS, SegmentFileError, "writable"),
            ("link", errno.ENOMEM, SegmentFileError, "free memory"),
        ],
    )
    def test_what_the_system_refuses_is_one_line_with_a_fix(
        self, monkeypatch: pytest.MonkeyPatch, call: str, number: int, kind: type[SegmentError], fix: str
    ) -> None:
        before, descriptors = names(), len(os.listdir("/proc/self/fd"))

        def refused(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, refused)
            with pytest.raises(kind, match=fix) as info:
                SharedSegment.create(4 << 20, "test")
        assert "\n" not in str(info.value)
        assert os.strerror(number) in str(info.value)
        assert not left_behind(before)
        del info
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors

    def test_a_limit_of_file_sizes(self) -> None:
        program = (
            "import resource, sys\n"
            "from vllm_kvoffload.store import make_store\n"
            "from vllm_kvoffload.settings.errors import ConfigError\n"
            "from vllm_kvoffload.trace import TraceError, TraceHeader, TraceWriter\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, -1))\n"
            "try:\n"
            "    make_store('local', local_bytes=10737418, role='owner', instance='rlimit')\n"
            "except ConfigError as error:\n"
            "    print(error)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (10, -1))\n"
            "try:\n"
            "    TraceWriter(sys.argv[1], TraceHeader('m' * 20, index_topk=4, num_groups=1, block_size=16))\n"
            "except TraceError as error:\n"
            "    print(error)\n"
        )
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", program, f"{folder}/trace"]
            said = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
        pool, trace = said.stdout.splitlines()
        assert "local_dram_size_GB=0.01: host pool needs" in pool
        assert "(RLIMIT_FSIZE): 8388608" in pool
        assert "File too large; RLIMIT_FSIZE" in trace

    def test_progress_with_an_estimate(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(segment_module, "RESERVE_STEP_BYTES", 2 * MIB)
        monkeypatch.setattr(segment_module, "PROGRESS_BYTES", 4 * MIB)
        with caplog.at_level(logging.INFO), HostPool.create(LAYOUT):
            pass
        lines = [message for message in caplog.messages if "reserved" in message]
        assert len(lines) == 4  # 14 MiB: at 4, 8, 12 and at the end
        assert all("left" in line for line in lines)
