"""Row copies equal the oracle, reach past 4 GiB (I-5) and let other threads run."""

from __future__ import annotations

import mmap
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan_cases import int32
from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle

GIB = 1 << 30
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; named from Python 3.13 on


def random_bytes(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))


def sparse_bytes(size: int) -> torch.Tensor:
    """Zeroed address space that takes memory only where it is touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    row_bytes=st.sampled_from([1, 7, 64, 656, 1152]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    requests=st.integers(0, 4),
)
def test_serve_equals_oracle(seed: int, row_bytes: int, block_size: int, requests: int) -> None:
    rng = np.random.default_rng(seed)
    rows, slots, blocks, capacity = 5, 40, 12, 33
    host = random_bytes(rng, blocks, block_size, row_bytes)
    hot = random_bytes(rng, rows, slots, row_bytes)
    expected = hot.clone()
    table = torch.from_numpy(rng.integers(0, blocks, (requests + 1, 6), dtype=np.int32))
    row_of = torch.from_numpy(rng.permutation(np.arange(-1, rows, dtype=np.int32))[:requests].copy())
    ids = torch.from_numpy(rng.integers(0, 6 * block_size, (requests + 2, capacity), dtype=np.int32))
    to = torch.from_numpy(
        np.stack([rng.permutation(slots)[:capacity] for _ in range(requests + 2)]).astype(np.int32)
    )
    counts = torch.from_numpy(rng.integers(0, capacity + 1, requests + 2, dtype=np.int32))
    copied = ops.dsa_serve(host, hot, table, row_of, ids, to, counts)
    assert copied == oracle.dsa_serve(host, expected, table, row_of, ids, to, counts)
    assert torch.equal(hot, expected)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), tokens=st.integers(0, 9), row_bytes=st.sampled_from([1, 656, 1152]))
def test_writes_equal_oracle(seed: int, tokens: int, row_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    new_rows = random_bytes(rng, tokens, row_bytes)
    hot = random_bytes(rng, 3, 8, row_bytes)
    expected = hot.clone()
    slots = torch.from_numpy(rng.permutation(np.arange(-2, 8, dtype=np.int32)).clip(-1)[:tokens].copy())
    rows = torch.from_numpy(np.where(slots.numpy() < 0, 99, rng.integers(0, 3, tokens)).astype(np.int32))
    ops.write_rows(hot, rows, new_rows, slots)
    oracle.write_rows(expected, rows, new_rows, slots)
    assert torch.equal(hot, expected)

    host = random_bytes(rng, 4, 5, row_bytes)
    expected = host.clone()
    mapping = torch.from_numpy(rng.permutation(np.arange(-4, 20, dtype=np.int64)).clip(-1)[:tokens].copy())
    ops.host_write(host, new_rows, mapping)
    oracle.host_write(expected, new_rows, mapping)
    assert torch.equal(host, expected)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_host_read_equals_oracle(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    host = random_bytes(rng, 7, block_size, 24)
    table = torch.from_numpy(rng.integers(0, 7, 5, dtype=np.int32))
    start = data.draw(st.integers(0, 5 * block_size))
    count = data.draw(st.integers(0, 5 * block_size - start))
    got = random_bytes(rng, count + 2, 24)
    expected = got.clone()
    ops.host_read(host, table, start, count, got)
    oracle.host_read(host, table, start, count, expected)
    assert torch.equal(got, expected)


def test_offsets_beyond_4_gib() -> None:
    """Block 5,000,000 of a host pool and the last row of a hot pool, both past what 32 bits can address."""
    row_bytes = 1152
    host = sparse_bytes(6 * GIB)[: 5_000_001 * row_bytes].view(5_000_001, 1, row_bytes)
    hot = sparse_bytes(6 * GIB)[: 600 * 8192 * row_bytes].view(600, 8192, row_bytes)
    rows = torch.arange(2 * row_bytes, dtype=torch.int64).to(torch.uint8).view(2, row_bytes)
    ops.host_write(host, rows, torch.tensor([5_000_000, 4_000_000]))
    back = torch.zeros_like(rows)
    ops.host_read(host, torch.tensor([5_000_000, 4_000_000], dtype=torch.int32), 0, 2, back)
    assert torch.equal(back, rows)
    one = torch.tensor([599], dtype=torch.int32)
    miss = torch.tensor([[1]], dtype=torch.int32)
    table = torch.tensor([[0, 5_000_000]], dtype=torch.int32)
    slot = torch.tensor([[8191]], dtype=torch.int32)
    ops.dsa_serve(host, hot, table, one, miss, slot, torch.tensor([1], dtype=torch.int32))
    assert torch.equal(hot[599, 8191], rows[0])
    ops.write_rows(hot, one, rows[1:], torch.tensor([8190], dtype=torch.int32))
    assert torch.equal(hot[599, 8190], rows[1])


def test_compact_offsets_beyond_4_gib() -> None:
    """The same pools for compact delivery, and selections as large."""
    row_bytes, width = 1152, 2048
    host = sparse_bytes(6 * GIB)[: 5_000_001 * row_bytes].view(5_000_001, 1, row_bytes)
    hot = sparse_bytes(6 * GIB)[: 600 * 8192 * row_bytes].view(600, 8192, row_bytes)
    selection = sparse_bytes(5 * GIB)[: 2000 * width * row_bytes].view(2000, width, row_bytes)
    rows = torch.arange(3 * row_bytes, dtype=torch.int64).to(torch.uint8).view(3, row_bytes)
    host[5_000_000, 0], hot[599, 8191], selection[1999, 2047] = rows
    table, one, start = torch.tensor([[5_000_000]], dtype=torch.int32), int32(599), int32(0, 1)
    kinds = torch.tensor([[[1, 8191], [2, 0]]], dtype=torch.int32)
    got = torch.zeros((1, 2, row_bytes), dtype=torch.uint8)
    ops.dsa_serve_compact(kinds, start, int32(2), host, hot, table, one, rows[:1], got)
    assert torch.equal(got[0], rows[[1, 0]])

    lists = [torch.tensor([[0], [value]], dtype=torch.int32) for value in (2047, 8190)]
    ops.dsa_install(selection, int32(0, 1999, 2000), int32(-1, 599), *lists, int32(0, 1), hot)
    assert torch.equal(hot[599, 8190], rows[2])

    gathered = selection.view(1000, 2, width, row_bytes)
    status = torch.zeros((1000, 2, width + 1), dtype=torch.int32)
    ids = torch.full((2, width), -1, dtype=torch.int32)
    ids[1, 5] = 0
    lengths = torch.zeros(2, dtype=torch.int32)
    ops.gather_selection(
        ids, int32(0, 2), int32(9), int32(999), host, table, rows[:2], gathered, status, lengths
    )
    assert torch.equal(gathered[999, 1, 0], rows[0])
    assert lengths.tolist() == [0, 1]


def test_plan_offsets_beyond_4_gib() -> None:
    """The last of 80,000 rows of 16384 slots: its tags start 5 GB into the tensor."""
    rows, sets, ways = 80_000, 1024, 16
    slots = rows * sets * ways
    residency = ops.Residency(
        sparse_bytes(4 * slots).view(torch.int32).view(rows, sets, ways),
        sparse_bytes(slots).view(rows, sets, ways),
        sparse_bytes(rows * sets).view(rows, sets),
        torch.zeros(rows, dtype=torch.int32),
        "rrip",
    )
    residency.reset_partition(rows - 1)
    small = ops.Residency.allocate(1, sets * ways, ways, "rrip")
    outs = [ops.PlanOut(1, 1, 64, 1) for _ in range(2)]
    ids = torch.arange(64, dtype=torch.int32).view(1, 64) * 1023
    step = ids, torch.tensor([0, 1], dtype=torch.int32), torch.tensor([100_000], dtype=torch.int32)
    for residency_, row, out in ((residency, rows - 1, outs[0]), (small, 0, outs[1])):
        ops.dsa_plan(*step, torch.tensor([row], dtype=torch.int32), residency_, out, ops.Workspace())
    assert torch.equal(outs[0].slots, outs[1].slots)
    assert torch.equal(residency.tags[-1], small.tags[0])


@pytest.mark.timeout(120)
def test_gil_is_released() -> None:
    """With a switch interval of an hour, another thread runs during a call only if the call lets it."""
    host = torch.zeros((64, 1024, 4096), dtype=torch.uint8)
    dst = torch.zeros((65536, 4096), dtype=torch.uint8)
    table = torch.arange(64, dtype=torch.int32)
    interval = sys.getswitchinterval()
    overlapped = False
    for _ in range(10):  # the other thread may be late on a busy machine
        started, finished = threading.Event(), threading.Event()

        def copy(started: threading.Event = started, finished: threading.Event = finished) -> None:
            started.set()
            ops.host_read(host, table, 0, 65536, dst)
            finished.set()

        thread = threading.Thread(target=copy)
        sys.setswitchinterval(3600)
        try:
            thread.start()
            started.wait()
            overlapped = not finished.is_set()
        finally:
            sys.setswitchinterval(interval)
            thread.join()
        if overlapped:
            break
    assert overlapped
