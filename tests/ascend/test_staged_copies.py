"""Copies to and from a device through page-locked memory; this device copies only when it is waited for."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvoffload.store import CopySpans, Direction, StoreError, WriteObject
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.store.staged_copies import StagedCopies, batches
from vllm_kvoffload.transfer.base import Region

BLOCKS, BLOCK = 6, 4
WIDTHS = (8, 2)


class LazyNPU:
    """torch.npu, as far as it is used. `copies`: those that were asked for and not done yet."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.sizes: list[int] = []

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=self._synchronize)

    def _synchronize(self) -> None:
        for copy in self.copies:
            copy()
        self.copies.clear()


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> LazyNPU:
    made = LazyNPU()
    real = torch.Tensor.copy_

    def copy(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if not non_blocking:
            return real(self, source)
        made.copies.append(lambda: real(self, source))
        made.sizes.append(len(source))
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    return made


@pytest.fixture
def caches() -> list[torch.Tensor]:
    """Two components of a layer, the first of them twice, as layers that share it name it."""
    first, second = (torch.randn((BLOCKS, BLOCK, 1, width), dtype=torch.bfloat16) for width in WIDTHS)
    return [first, second, first]


def staged(npu: LazyNPU, caches: list[torch.Tensor], stage_bytes: int = 1 << 20) -> StagedCopies:
    return StagedCopies(npu, caches, stage_bytes, lambda n: torch.zeros(n, dtype=torch.uint8))


def block_spans(caches: list[torch.Tensor], pool: np.ndarray, blocks: list[int]) -> CopySpans:
    """Blocks of both components, one after the other in the pool, in the order given."""
    objects, local, nbytes = [], [], []
    at = int(pool.ctypes.data)
    for block in blocks:
        for cache in caches[:2]:
            size = cache[0].numel() * cache.element_size()
            objects.append(at)
            local.append(cache.data_ptr() + block * size)
            nbytes.append(size)
            at += size
    return CopySpans(*(np.array(column, dtype=np.int64) for column in (objects, local, nbytes)))


def pool_of(nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Host memory, and its bounds."""
    pool = np.zeros(nbytes, dtype=np.uint8)
    return pool, np.array([[pool.ctypes.data, pool.ctypes.data + nbytes]], dtype=np.int64)


@pytest.mark.parametrize("stage_bytes", [1 << 20, 100, 1])
def test_what_is_saved_is_loaded(npu: LazyNPU, caches: list[torch.Tensor], stage_bytes: int) -> None:
    copies = staged(npu, caches, stage_bytes)
    pool, bounds = pool_of(BLOCKS * BLOCK * sum(WIDTHS) * 2)
    spans = block_spans(caches, pool, [4, 0, 5, 2])
    before = [cache.clone() for cache in caches]
    copies.copy(spans, "save", bounds)
    for cache in caches:
        cache.zero_()
    copies.copy(spans, "load", bounds)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[4, 0, 5, 2]], old[[4, 0, 5, 2]])
        assert not cache[[1, 3]].any()
    assert npu.copies == []


def test_neighbours_on_the_device_are_one_copy(npu: LazyNPU, caches: list[torch.Tensor]) -> None:
    copies = staged(npu, caches)
    pool, bounds = pool_of(BLOCKS * BLOCK * sum(WIDTHS) * 2)
    copies.copy(block_spans(caches, pool, [3, 1, 2, 5]), "save", bounds)
    sizes = [BLOCK * width * 2 for width in WIDTHS]
    assert sorted(npu.sizes) == sorted([3 * sizes[0], sizes[0], 3 * sizes[1], sizes[1]])


@pytest.mark.parametrize("direction", ["load", "save"])
def test_control_nobody_waits_for_the_device(
    npu: LazyNPU, caches: list[torch.Tensor], direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = staged(npu, caches)
    pool, bounds = pool_of(BLOCKS * BLOCK * sum(WIDTHS) * 2)
    pool[:] = 1
    for cache in caches:
        cache.view(torch.uint8).fill_(2)
    monkeypatch.setattr(npu, "_synchronize", lambda: None)
    copies.copy(block_spans(caches, pool, [0]), direction, bounds)
    arrived = pool[:8] if direction == "save" else caches[0][0].view(torch.uint8).flatten()[:8].numpy()
    assert set(arrived.tolist()) != {1 if direction == "load" else 2}


def test_memory_of_no_cache_is_refused(npu: LazyNPU, caches: list[torch.Tensor]) -> None:
    copies = staged(npu, caches)
    pool, bounds = pool_of(4096)
    spans = block_spans(caches, pool, [0])
    beyond = CopySpans(spans.object_address, spans.nbytes, spans.nbytes)  # no addresses
    with pytest.raises(ValueError, match="of no cache"):
        copies.copy(beyond, "load", bounds)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [([], 4, []), ([1, 1, 1], 2, [2, 1]), ([4, 4], 4, [1, 1]), ([1, 3, 2, 2], 4, [2, 2])],
)
def test_batches(sizes: list[int], limit: int, expected: list[int]) -> None:
    found = list(batches(np.array(sizes, dtype=np.int64), limit))
    assert [part.stop - part.start for part in found] == expected
    assert [n for part in found for n in range(part.start, part.stop)] == list(range(len(sizes)))


def test_the_store_moves_device_memory_so_and_host_memory_as_ever(
    npu: LazyNPU, caches: list[torch.Tensor]
) -> None:
    store = LocalStore(uuid.uuid4().hex, 1 << 20, devices=staged(npu, caches))
    whole = [Region(c.data_ptr(), c.numel() * c.element_size(), "npu") for c in caches[:2]]
    host = np.arange(64, dtype=np.uint8)
    store.register([*whole, Region(int(host.ctypes.data), 64)])
    (written,) = store.open_write(["a"], 4096)
    assert isinstance(written, WriteObject)
    device = [(written.address + 64, caches[0].data_ptr(), 64)]
    mixed = as_spans([(written.address, int(host.ctypes.data), 64), *device])
    store.copy(mixed, "save")
    assert npu.sizes == [64]
    store.finish_write([written], [True])
    (found,) = store.open_read(["a"], 10.0)
    assert found is not None
    before = caches[0].clone()
    host[:], caches[0][:] = 0, 0
    store.copy(shifted(mixed, found.address - written.address), "load")
    assert host.tolist() == list(range(64))
    assert torch.equal(caches[0].view(-1)[:32], before.view(-1)[:32])
    outside = as_spans([(found.address, caches[0].data_ptr() + whole[0].nbytes - 8, 64)])
    with pytest.raises(StoreError, match="not open or registered"):
        store.copy(outside, "load")
    store.close()


def test_a_client_without_a_way_to_devices_refuses_their_memory(caches: list[torch.Tensor]) -> None:
    store = LocalStore(uuid.uuid4().hex, 1 << 20)
    with pytest.raises(StoreError, match="host memory only, not npu"):
        store.register([Region(caches[0].data_ptr(), 64, "npu")])
    store.close()


def as_spans(rows: list[Any]) -> CopySpans:
    return CopySpans(*(np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)))


def shifted(spans: CopySpans, by: int) -> CopySpans:
    return CopySpans(spans.object_address + by, spans.local_address, spans.nbytes)
