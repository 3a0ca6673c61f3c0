"""``low_load``: few requests whose whole context fits into the hot pool, so that offload has no benefit.

A decode step of the KV part of two index groups of four layers: new rows are stored, rows selected, and
attended to by the reference kernel. Baseline: the same from a paged device cache, without offload.

- ``low_load/bN``: N requests.
- ``low_load/bN/rows``: the same without attention itself, in which both do the same work.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from benchmarks.registry import Row, lower_is_better
from vllm_kvoffload.geometry import Component, KVGeometry
from vllm_kvoffload.platforms.cpu.kernels import sparse_mla_attend
from vllm_kvoffload.runtime.cpu import CPURuntime
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.offloaded import OffloadedKV
from vllm_kvoffload.sparse.paged import PagedKV
from vllm_kvoffload.sparse.step import LayerKV, StepBatch
from vllm_kvoffload.trace.generator import scored_stream

BATCHES = (1, 2, 4)
PATTERN = "FSSSFSSS"
TOPK, SLOTS, CONTEXT = 2048, 4096, 3900
BLOCK_SIZE = 128
HEADS, WIDTH, VALUE_WIDTH = 16, 576, 512
WARM_UP, STEPS = 8, 96


class Batches:
    """Steps of N requests of about CONTEXT tokens. blocks: of each request, side by side."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.blocks = SLOTS // BLOCK_SIZE
        self.table = torch.arange(requests * self.blocks, dtype=torch.int32).view(requests, -1)
        self.names = tuple(f"request-{n}" for n in range(requests))
        self.starts = np.arange(requests + 1, dtype=np.int32)
        total = WARM_UP + STEPS
        streams = [scored_stream(np.random.default_rng(n), total, CONTEXT, TOPK) for n in range(requests)]
        self.chosen = [torch.from_numpy(np.stack([s[step] for s in streams])) for step in range(total)]
        # Together, the first steps select every token, so that nothing is fetched later.
        self.chosen[0][:] = torch.arange(TOPK)
        self.chosen[1][:] = torch.arange(CONTEXT + 2 - TOPK, CONTEXT + 2)
        self.rows = torch.randn(requests, WIDTH).to(torch.bfloat16)
        self.query = torch.randn(requests, HEADS, WIDTH).to(torch.bfloat16)

    def step(self, number: int) -> StepBatch:
        """Step `number`: every request is one token longer than in the one before."""
        position = CONTEXT + number
        first = torch.arange(self.requests, dtype=torch.int64) * (self.blocks * BLOCK_SIZE)
        lengths = np.full(self.requests, position + 1, dtype=np.int32)
        return StepBatch(self.starts, lengths, self.table, first + position, BLOCK_SIZE, self.names)


def run_layers(layers: list[LayerKV], batches: Batches, number: int, batch: StepBatch, attend: bool) -> None:
    """One step of all layers."""
    topk = batches.chosen[number]
    for layer in layers:
        layer.append(batches.rows.clone(), batch.slot_mapping)  # as the model makes new ones
        for part in layer.parts(topk, batch):
            if attend:
                query = batches.query[part.tokens]
                sparse_mla_attend(query, part.rows, part.indices, 0.1, VALUE_WIDTH)


class Offloaded:
    """The product's manager over a fully written host pool."""

    def __init__(self, batches: Batches) -> None:
        kinds = tuple("full" if kind == "F" else "shared" for kind in PATTERN)
        row = (Component("kv", WIDTH * 2),)
        geometry = KVGeometry("benchmark", kinds, "benchmark", TOPK, row, row)  # type: ignore[arg-type]
        shape = (batches.requests * batches.blocks, BLOCK_SIZE, WIDTH * 2)
        self.runtime = CPURuntime()
        self.manager = SparseKVManager(
            geometry,
            SparseOffloadConfig(enabled=True, topk_buffer_size=SLOTS),
            max_num_seqs=batches.requests,
            max_model_len=SLOTS,
            prefill_buffers=0,
            host_layers=[torch.zeros(shape, dtype=torch.uint8) for _ in PATTERN],
            runtime=self.runtime,
        )
        self.layers: list[LayerKV] = [OffloadedKV(self.manager, layer) for layer in range(len(PATTERN))]

    def step(self, batches: Batches, number: int, attend: bool) -> None:
        batch = batches.step(number)
        self.manager.begin_step(batch)
        run_layers(self.layers, batches, number, batch, attend)


class Paged:
    """A paged device cache."""

    def __init__(self, batches: Batches) -> None:
        shape = (batches.requests * batches.blocks, BLOCK_SIZE, WIDTH)
        self.layers: list[LayerKV] = [PagedKV(torch.zeros(shape, dtype=torch.bfloat16)) for _ in PATTERN]

    def step(self, batches: Batches, number: int, attend: bool) -> None:
        run_layers(self.layers, batches, number, batches.step(number), attend)


def measure(requests: int, attend: bool) -> tuple[float, float]:
    """Median milliseconds of a step with and without offload."""
    batches = Batches(requests)
    contenders = (Offloaded(batches), Paged(batches))
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(WARM_UP + STEPS):
        for contender, found in zip(contenders, times, strict=True):
            begin = time.process_time()
            contender.step(batches, number, attend)
            if number >= WARM_UP:
                found.append((time.process_time() - begin) * 1e3)
    contenders[0].runtime.shutdown()
    return median(times[0]), median(times[1])


def run() -> Iterator[Row]:
    """All rows; some seconds."""
    for requests in BATCHES:
        yield lower_is_better(f"low_load/b{requests}", *_row(requests, attend=True))
        yield lower_is_better(f"low_load/b{requests}/rows", *_row(requests, attend=False))


def _row(requests: int, attend: bool) -> tuple[float, str, float]:
    value, baseline = measure(requests, attend)
    return value, "ms/step", baseline
