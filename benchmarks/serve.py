"""``serve``: rate of dsa_serve on random rows; baseline: memcpy of the same rows by lists of addresses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.baselines import copy_rows
from benchmarks.measure import interleave
from benchmarks.registry import Row, higher_is_better
from vllm_kvoffload import ops

REQUESTS = 16
BLOCK_SIZE = 128
BLOCKS_PER_REQUEST = 256
SLOTS = 8192
MISSES = 300  # per request and step, about 15 % of K
STEPS = 24
ROUNDS = 60


class ServeCase:
    """Pools well beyond the caches, and a few steps' worth of misses on random tokens and slots."""

    def __init__(self, row_bytes: int) -> None:
        rng = np.random.default_rng(5)
        self.row_bytes = row_bytes
        blocks = REQUESTS * BLOCKS_PER_REQUEST
        self.host = torch.zeros((blocks, BLOCK_SIZE, row_bytes), dtype=torch.uint8)
        self.hot = torch.zeros((REQUESTS, SLOTS, row_bytes), dtype=torch.uint8)
        self.host.fill_(1)  # really allocated, or every read would hit the one zero page
        self.hot.fill_(2)
        self.table = torch.from_numpy(rng.permutation(blocks).astype(np.int32).reshape(REQUESTS, -1))
        self.rows = torch.arange(REQUESTS, dtype=torch.int32)
        self.counts = torch.full((REQUESTS,), MISSES, dtype=torch.int32)
        tokens = BLOCKS_PER_REQUEST * BLOCK_SIZE
        self.ids = [self.draw(rng, tokens) for _ in range(STEPS)]
        self.slots = [self.draw(rng, SLOTS) for _ in range(STEPS)]
        self.sources = [self.host_addresses(ids.numpy()) for ids in self.ids]
        self.targets = [self.hot_addresses(slots.numpy()) for slots in self.slots]

    def draw(self, rng: np.random.Generator, limit: int) -> torch.Tensor:
        drawn = [rng.choice(limit, MISSES, replace=False) for _ in range(REQUESTS)]
        return torch.from_numpy(np.stack(drawn).astype(np.int32))

    def host_addresses(self, ids: np.ndarray) -> np.ndarray:
        blocks = np.take_along_axis(self.table.numpy(), ids // BLOCK_SIZE, axis=1).astype(np.uint64)
        tokens = blocks * BLOCK_SIZE + (ids % BLOCK_SIZE).astype(np.uint64)
        return (self.host.data_ptr() + tokens * self.row_bytes).ravel()

    def hot_addresses(self, slots: np.ndarray) -> np.ndarray:
        first = np.arange(REQUESTS, dtype=np.uint64)[:, None] * SLOTS
        return (self.hot.data_ptr() + (first + slots.astype(np.uint64)) * self.row_bytes).ravel()

    def serve(self, index: int) -> None:
        step = index % STEPS
        misses = self.ids[step], self.slots[step], self.counts
        ops.dsa_serve(self.host, self.hot, self.table, self.rows, *misses)

    def memcpy(self, index: int) -> None:
        # Half a cycle behind, or one contender would find the other's rows in the cache.
        step = (index + STEPS // 2) % STEPS
        copy_rows(self.sources[step], self.targets[step], self.row_bytes)


def run() -> Iterator[Row]:
    """One row per row size: BF16 and FP8 main KV."""
    for row_bytes in (1152, 656):
        case = ServeCase(row_bytes)
        cost = interleave({"serve": case.serve, "memcpy": case.memcpy}, STEPS, ROUNDS)
        gigabytes = REQUESTS * MISSES * row_bytes / 1e9
        yield higher_is_better(
            f"serve/{row_bytes}B", gigabytes / cost["serve"], "GB/s", gigabytes / cost["memcpy"]
        )
