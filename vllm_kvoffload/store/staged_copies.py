"""Copies between ordinary host memory and the NPU, through page-locked memory of this process.

The `local` store's pool is shared memory that is not registered with a device. Only page-locked memory can be
copied to and from a device asynchronously, so bytes are staged in it: gathered by the processor and copied by
the device's copy engine. Each direction has a stage of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvoffload.store.base import CopySpans, Direction, Int64Array
from vllm_kvoffload.store.spans import copy_host

STAGE_BYTES = 64 << 20

Allocate = Callable[[int], torch.Tensor]


def page_locked(nbytes: int) -> torch.Tensor:
    """Page-locked uint8 [nbytes], for asynchronous copies from and to the device."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class StagedCopies:
    """See `store.DeviceCopies`. Each call waits for its copies, on the device stream that is current.

    Args:
        npu: torch.npu. caches: contiguous tensors on the device; copies touch no other device memory.
        stage_bytes: of page-locked memory for each direction, STAGE_BYTES if None; grows for longer spans.
        allocate: allocates the stage; None for `page_locked`.
    """

    def __init__(
        self,
        npu: Any,
        caches: Sequence[torch.Tensor],
        stage_bytes: int | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self._npu = npu
        by_address = {cache.data_ptr(): cache for cache in caches}  # layers may share memory
        ordered = [by_address[address] for address in sorted(by_address)]
        self._caches = [cache.view(torch.uint8).view(-1) for cache in ordered]
        self._starts = np.array([cache.data_ptr() for cache in ordered], dtype=np.int64)
        self._stage_bytes = stage_bytes or STAGE_BYTES
        self._allocate = allocate or page_locked
        self._stages: dict[Direction, torch.Tensor] = {}
        self._locks: dict[Direction, threading.Lock] = {"load": threading.Lock(), "save": threading.Lock()}

    def copy(self, spans: CopySpans, direction: Direction, object_ranges: Int64Array) -> None:
        order = np.argsort(spans.local_address, kind="stable")
        near, far, nbytes = (
            column[order] for column in (spans.local_address, spans.object_address, spans.nbytes)
        )
        with self._locks[direction]:
            stage = self._stage(direction, int(nbytes.max(initial=0)))
            for chosen in batches(nbytes, len(stage)):
                part = CopySpans(far[chosen], near[chosen], nbytes[chosen])
                self._copy(stage, part, direction, object_ranges)

    def _stage(self, direction: Direction, at_least: int) -> torch.Tensor:
        stage = self._stages.get(direction)
        if stage is None or len(stage) < at_least:
            stage = self._stages[direction] = self._allocate(max(self._stage_bytes, at_least))
        return stage

    def _copy(
        self, stage: torch.Tensor, spans: CopySpans, direction: Direction, object_ranges: Int64Array
    ) -> None:
        """Copies spans that fit into the stage together, ordered by device address."""
        offsets = np.cumsum(spans.nbytes) - spans.nbytes
        base = stage.data_ptr()
        staged = CopySpans(spans.object_address, base + offsets, spans.nbytes)
        stage_range = np.array([[base, base + len(stage)]], dtype=np.int64)
        if direction == "load":
            copy_host(staged, direction, object_ranges, stage_range)
        for part, at, count in list(self._runs(spans, offsets)):  # all are checked before any is queued
            host = stage[at : at + count]
            (part if direction == "load" else host).copy_(
                host if direction == "load" else part, non_blocking=True
            )
        self._npu.current_stream().synchronize()  # no deadline needed: the pipeline has one
        if direction == "save":
            copy_host(staged, direction, object_ranges, stage_range)

    def _runs(self, spans: CopySpans, offsets: Int64Array) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yields (device memory, offset in the stage, bytes); neighbours on the device are merged."""
        near, nbytes = spans.local_address, spans.nbytes
        cache = np.searchsorted(self._starts, near, side="right") - 1
        joined = (near[:-1] + nbytes[:-1] == near[1:]) & (cache[:-1] == cache[1:])
        starts = np.flatnonzero(np.concatenate(([True], ~joined)))
        for first, count in zip(starts.tolist(), np.add.reduceat(nbytes, starts).tolist(), strict=True):
            number = int(cache[first])
            begin = int(near[first] - self._starts[number]) if number >= 0 else -1
            if begin < 0 or begin + count > len(self._caches[number]):
                raise ValueError(f"device memory {int(near[first]):#x}+{count} is of no cache")
            yield self._caches[number][begin : begin + count], int(offsets[first]), count


def batches(nbytes: Int64Array, limit: int) -> Iterator[slice]:
    """Groups consecutive spans into batches of at most `limit` bytes; no span may be longer."""
    start, total = 0, 0
    for index, size in enumerate(nbytes.tolist()):
        if total + size > limit:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(nbytes):
        yield slice(start, len(nbytes))
