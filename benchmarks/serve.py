"""``serve``: rates of the row copies; baseline: memcpy of the same rows by lists of addresses.

- ``serve/random_rows``: dsa_serve, random rows of 1152 bytes (BF16 main KV), random slots; ``/656B``: FP8.
- ``serve/compact``: dsa_serve_compact, K = 2048 rows of which all but the misses are hits, in order.
- ``serve/install``: dsa_install of those misses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.baselines import copy_rows
from benchmarks.measure import interleave
from benchmarks.registry import Row, higher_is_better
from vllm_kvoffload import ops

REQUESTS = 16
BLOCK_SIZE = 128
BLOCKS_PER_REQUEST = 256
SLOTS = 8192
TOPK = 2048
MISSES = 300  # per request and step, about 15 % of K
STEPS = 24
ROUNDS = 60

Ints = npt.NDArray[np.int32]
Addresses = npt.NDArray[np.uint64]


class Pools:
    """Pools much larger than the caches, and a few steps' misses on random tokens and slots."""

    def __init__(self, row_bytes: int) -> None:
        self.rng = np.random.default_rng(5)
        self.row_bytes = row_bytes
        blocks = REQUESTS * BLOCKS_PER_REQUEST
        self.host = torch.zeros((blocks, BLOCK_SIZE, row_bytes), dtype=torch.uint8)
        self.hot = torch.zeros((REQUESTS, SLOTS, row_bytes), dtype=torch.uint8)
        self.host.fill_(1)  # allocates it, or every read would hit the one zero page
        self.hot.fill_(2)
        self.table = torch.from_numpy(self.rng.permutation(blocks).astype(np.int32).reshape(REQUESTS, -1))
        self.rows = torch.arange(REQUESTS, dtype=torch.int32)
        self.counts = torch.full((REQUESTS,), MISSES, dtype=torch.int32)
        self.ids = [self.draw(BLOCKS_PER_REQUEST * BLOCK_SIZE, MISSES) for _ in range(STEPS)]
        self.slots = [self.draw(SLOTS, MISSES) for _ in range(STEPS)]

    def draw(self, limit: int, count: int) -> torch.Tensor:
        """int32 [REQUESTS, count], distinct in each row."""
        drawn = [self.rng.choice(limit, count, replace=False) for _ in range(REQUESTS)]
        return torch.from_numpy(np.stack(drawn).astype(np.int32))

    def host_addresses(self, ids: Ints) -> Addresses:
        blocks = np.take_along_axis(self.table.numpy(), ids // BLOCK_SIZE, axis=1).astype(np.uint64)
        tokens = blocks * BLOCK_SIZE + (ids % BLOCK_SIZE).astype(np.uint64)
        return self.host.data_ptr() + tokens * self.row_bytes

    def hot_addresses(self, slots: Ints) -> Addresses:
        first = np.arange(REQUESTS, dtype=np.uint64)[:, None] * SLOTS
        return self.hot.data_ptr() + (first + slots.astype(np.uint64)) * self.row_bytes


class InPlace(Pools):
    """Misses from the host pool into their slots."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self.sources = [self.host_addresses(ids.numpy()).ravel() for ids in self.ids]
        self.targets = [self.hot_addresses(slots.numpy()).ravel() for slots in self.slots]

    def serve(self, index: int) -> None:
        step = index % STEPS
        misses = self.ids[step], self.slots[step], self.counts
        ops.dsa_serve(self.host, self.hot, self.table, self.rows, *misses)

    def memcpy(self, index: int) -> None:
        # Half a cycle behind, or one contender would find the other's rows in the cache.
        step = (index + STEPS // 2) % STEPS
        copy_rows(self.sources[step], self.targets[step], self.row_bytes)


class Compact(Pools):
    """Hits and misses into a selection, and the misses from there into their slots."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__(row_bytes)
        self.starts = torch.arange(REQUESTS + 1, dtype=torch.int32)
        self.lengths = torch.full((REQUESTS,), BLOCKS_PER_REQUEST * BLOCK_SIZE, dtype=torch.int32)
        self.new_rows = torch.zeros((REQUESTS, row_bytes), dtype=torch.uint8)
        self.selection = torch.full((REQUESTS, TOPK, row_bytes), 3, dtype=torch.uint8)
        self.positions = [self.draw(TOPK, MISSES) for _ in range(STEPS)]
        rows = np.arange(REQUESTS * TOPK, dtype=np.uint64).reshape(REQUESTS, TOPK)
        self.selected = self.selection.data_ptr() + rows * row_bytes
        self.kinds = []
        self.sources = []
        for ids, positions in zip(self.ids, self.positions, strict=True):
            kinds = torch.stack([torch.full((REQUESTS, TOPK), ops.Kind.POOL_HIT), self.draw(SLOTS, TOPK)], -1)
            sources = self.hot_addresses(kinds[:, :, 1].numpy())
            at = positions.to(torch.int64)
            kinds[:, :, 0].scatter_(1, at, ops.Kind.OLD_MISS)
            kinds[:, :, 1].scatter_(1, at, ids.to(kinds.dtype))
            np.put_along_axis(sources, at.numpy(), self.host_addresses(ids.numpy()), axis=1)
            self.kinds.append(kinds.to(torch.int32))
            self.sources.append(sources.ravel())
        self.targets = [self.hot_addresses(slots.numpy()).ravel() for slots in self.slots]
        self.missed = [
            np.take_along_axis(self.selected, positions.numpy().astype(np.int64), axis=1).ravel()
            for positions in self.positions
        ]

    def serve(self, index: int) -> None:
        ops.dsa_serve_compact(
            self.kinds[index % STEPS],
            self.starts,
            self.lengths,
            self.host,
            self.hot,
            self.table,
            self.rows,
            self.new_rows,
            self.selection,
        )

    def serve_memcpy(self, index: int) -> None:
        copy_rows(self.sources[(index + STEPS // 2) % STEPS], self.selected.ravel(), self.row_bytes)

    def install(self, index: int) -> None:
        step = index % STEPS
        misses = self.positions[step], self.slots[step], self.counts
        ops.dsa_install(self.selection, self.starts, self.rows, *misses, self.hot)

    def install_memcpy(self, index: int) -> None:
        step = (index + STEPS // 2) % STEPS
        copy_rows(self.missed[step], self.targets[step], self.row_bytes)


def rate(
    name: str, op: Callable[[int], None], memcpy: Callable[[int], None], rows: int, row_bytes: int
) -> Row:
    cost = interleave({"op": op, "memcpy": memcpy}, STEPS, ROUNDS)
    gigabytes = REQUESTS * rows * row_bytes / 1e9
    return higher_is_better(name, gigabytes / cost["op"], "GB/s", gigabytes / cost["memcpy"])


def run() -> Iterator[Row]:
    """All rows; some seconds."""
    for name, row_bytes in (("serve/random_rows", 1152), ("serve/random_rows/656B", 656)):
        case = InPlace(row_bytes)
        yield rate(name, case.serve, case.memcpy, MISSES, row_bytes)
    compact = Compact(1152)
    yield rate("serve/compact", compact.serve, compact.serve_memcpy, TOPK, 1152)
    yield rate("serve/install", compact.install, compact.install_memcpy, MISSES, 1152)
