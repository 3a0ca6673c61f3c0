"""Calls of the kernels that move rows, on the twin and by the oracle.

Rows have two components on the device, e.g. nope and rope, and one on the CPU: the components side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.ascendc.twin_kernels import IN, IN_OUT, OUT, REPORT_INTS, Kernels, Ran, aligned
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.ops.types import Kind

Arguments = list[tuple[str, torch.Tensor | None, int]]


@dataclass(frozen=True)
class Layout:
    """Sizes of one call."""

    requests: int
    width: int = 16
    slots: int = 64
    max_query: int = 2
    row_bytes: tuple[int, int] = (64, 0)
    blocks: int = 40
    block_size: int = 16
    table_width: int = 8
    padding: int = 1  # tokens past the last request

    @property
    def bytes(self) -> int:
        return sum(self.row_bytes)

    @property
    def hot_rows(self) -> int:
        return self.requests + 1


def random_rows(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """uint8 of that shape, no zeros, so that an absent row shows."""
    return torch.from_numpy(rng.integers(1, 256, shape, dtype=np.uint8))


def ints(values: np.ndarray | list[int]) -> torch.Tensor:
    return aligned(torch.from_numpy(np.asarray(values, dtype=np.int32)))


class Rows:
    """One tensor of rows, as one and by component."""

    def __init__(self, layout: Layout, whole: torch.Tensor) -> None:
        self.layout = layout
        self.whole = whole
        parts = torch.split(whole, [size for size in layout.row_bytes if size], dim=-1)
        self.parts: list[torch.Tensor | None] = [aligned(part.contiguous()) for part in parts]
        self.parts += [None] * (2 - len(self.parts))

    def arguments(self, name: str, use: int) -> Arguments:
        return [(f"{name}{i}", part, use) for i, part in enumerate(self.parts)]

    def joined(self) -> torch.Tensor:
        return torch.cat([part for part in self.parts if part is not None], dim=-1)

    def same(self) -> bool:
        return torch.equal(self.joined(), self.whole)


@dataclass
class Batch:
    """Requests of a step, and the host pool that serves them."""

    layout: Layout
    rng: np.random.Generator
    rows: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    host: Rows
    hot: Rows
    new_rows: Rows
    reports: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def tokens(self) -> int:
        return len(self.new_rows.whole)

    def query(self, n: int) -> int:
        return int(self.query_start_loc[n + 1] - self.query_start_loc[n])

    def stable(self, n: int) -> int:
        return int(self.seq_lens[n]) - self.query(n)

    def active(self) -> list[int]:
        return [n for n, row in enumerate(self.rows.tolist()) if row >= 0 and self.query(n) > 0]

    def fetched(self) -> int:
        return int(self.reports[:, 0].sum())

    def refused(self) -> int:
        return int(self.reports[:, 1].sum())

    def new_reports(self, cores: int) -> torch.Tensor:
        self.reports = aligned(torch.zeros((cores, REPORT_INTS), dtype=torch.int64))
        return self.reports


def make_batch(layout: Layout, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    rows = rng.permutation(layout.hot_rows)[: layout.requests].astype(np.int32)
    rows[rng.random(layout.requests) < 0.15] = -1
    query = rng.integers(0 if layout.requests > 1 else 1, layout.max_query + 1, layout.requests)
    starts = np.concatenate([[0], np.cumsum(query)])
    capacity = layout.table_width * layout.block_size
    seq_lens = np.maximum(rng.integers(capacity // 2, capacity, layout.requests), query)
    tables = np.zeros((layout.requests, layout.table_width), np.int32)
    for table in tables:
        table[:] = rng.permutation(layout.blocks)[: layout.table_width]
    tokens = int(starts[-1]) + layout.padding
    return Batch(
        layout,
        rng,
        ints(rows),
        ints(starts),
        ints(seq_lens),
        ints(tables),
        Rows(layout, random_rows(rng, layout.blocks, layout.block_size, layout.bytes)),
        Rows(layout, random_rows(rng, layout.hot_rows, layout.slots, layout.bytes)),
        Rows(layout, random_rows(rng, tokens, layout.bytes)),
    )


@dataclass
class Misses:
    """Misses of each request, distinct slots."""

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    new_slots: torch.Tensor


def make_misses(batch: Batch, most: int) -> Misses:
    layout, rng = batch.layout, batch.rng
    capacity = layout.max_query * layout.width
    shape = (layout.requests, capacity)
    ids, slots, positions = (np.full(shape, -7, np.int32) for _ in range(3))
    counts = np.zeros(layout.requests, np.int32)
    new_slots = np.full(batch.tokens, -1, np.int32)
    for n in range(layout.requests):
        free = rng.permutation(layout.slots)
        places = batch.query(n) * layout.width
        count = int(rng.integers(0, min(most, places, batch.stable(n), layout.slots - layout.max_query) + 1))
        counts[n] = count
        ids[n, :count] = rng.permutation(batch.stable(n))[:count]
        slots[n, :count] = np.sort(free[:count]) if rng.random() < 0.3 else free[:count]  # runs, too
        positions[n, :count] = np.sort(rng.permutation(places)[:count])
        if batch.rows[n] >= 0:
            first = int(batch.query_start_loc[n])
            given = free[count : count + batch.query(n)].astype(np.int32)
            given[rng.random(len(given)) < 0.2] = -1
            new_slots[first : first + len(given)] = given
    return Misses(ints(ids), ints(slots), ints(positions), ints(counts), ints(new_slots))


def numbers(layout: Layout, *front: int, host: bool = True) -> tuple[int, ...]:
    middle = (layout.blocks, layout.block_size, layout.table_width) if host else ()
    return (*front, *middle, *layout.row_bytes)


def serve(kernels: Kernels, batch: Batch, misses: Misses, cores: int, schedule: str, drop: str = "") -> Ran:
    layout = batch.layout
    args = [
        *batch.host.arguments("host", IN),
        *batch.hot.arguments("hot", IN_OUT),
        *batch.new_rows.arguments("new_rows", IN),
        ("block_table", batch.block_table, IN),
        ("query_start_loc", batch.query_start_loc, IN),
        ("rows", batch.rows, IN),
        ("miss_ids", misses.ids, IN),
        ("miss_slots", misses.slots, IN),
        ("miss_counts", misses.counts, IN),
        ("new_slots", misses.new_slots, IN),
        ("reports", batch.new_reports(cores), OUT),
    ]
    shape = numbers(
        layout, layout.requests, batch.tokens, layout.hot_rows, layout.slots, layout.max_query * layout.width
    )
    return kernels.run("dsa_serve", args, shape, cores, schedule, drop)


def oracle_serve(batch: Batch, misses: Misses) -> int:
    hot = batch.hot.whole
    fetched = oracle.dsa_serve(
        batch.host.whole, hot, batch.block_table, batch.rows, misses.ids, misses.slots, misses.counts
    )
    owners = torch.full((batch.tokens,), -1, dtype=torch.int32)
    for n in range(batch.layout.requests):
        owners[int(batch.query_start_loc[n]) : int(batch.query_start_loc[n + 1])] = batch.rows[n]
    oracle.write_rows(hot, owners, batch.new_rows.whole, misses.new_slots)
    return fetched


def make_kinds(batch: Batch) -> torch.Tensor:
    """int32 [T, K, 2] of all kinds, also where there is no plan."""
    layout, rng = batch.layout, batch.rng
    kinds = np.zeros((batch.tokens, layout.width, 2), np.int32)
    kinds[..., 1] = -1
    for n in range(layout.requests):
        stable, first = batch.stable(n), int(batch.query_start_loc[n])
        for s in range(batch.query(n)):
            kind = rng.choice([int(kind) for kind in Kind], layout.width)
            if rng.random() < 0.3:
                kind[:] = int(Kind.POOL_HIT)
            index = rng.integers(0, layout.slots, layout.width)
            index = np.where(kind == Kind.OLD_MISS, rng.integers(0, max(stable, 1), layout.width), index)
            index = np.where(kind == Kind.DECODE_WINDOW, stable + rng.integers(0, s + 1, layout.width), index)
            index = np.where(kind == Kind.FUTURE_SKIP, stable + s + 1, index)
            index = np.where(kind == Kind.NEGATIVE_STOP, -1, index)
            if stable == 0:
                kind[kind == Kind.OLD_MISS] = int(Kind.INVALID)
            kinds[first + s, :, 0], kinds[first + s, :, 1] = kind, index
    return ints(kinds)


def serve_compact(
    kernels: Kernels,
    batch: Batch,
    kinds: torch.Tensor,
    selection: Rows,
    cores: int,
    schedule: str,
    drop: str = "",
) -> Ran:
    layout = batch.layout
    args = [
        *batch.host.arguments("host", IN),
        *batch.hot.arguments("hot", IN),
        *batch.new_rows.arguments("new_rows", IN),
        *selection.arguments("selection", IN_OUT),
        ("kinds", kinds, IN),
        ("query_start_loc", batch.query_start_loc, IN),
        ("seq_lens", batch.seq_lens, IN),
        ("block_table", batch.block_table, IN),
        ("rows", batch.rows, IN),
        ("reports", batch.new_reports(cores), OUT),
    ]
    shape = numbers(layout, layout.requests, batch.tokens, layout.width, layout.hot_rows, layout.slots)
    return kernels.run("dsa_serve_compact", args, shape, cores, schedule, drop)


def install(
    kernels: Kernels, batch: Batch, misses: Misses, selection: Rows, cores: int, schedule: str, drop: str = ""
) -> Ran:
    layout = batch.layout
    args = [
        *selection.arguments("selection", IN),
        *batch.hot.arguments("hot", IN_OUT),
        ("query_start_loc", batch.query_start_loc, IN),
        ("rows", batch.rows, IN),
        ("miss_positions", misses.positions, IN),
        ("miss_slots", misses.slots, IN),
        ("miss_counts", misses.counts, IN),
        ("reports", batch.new_reports(cores), OUT),
    ]
    shape = numbers(
        layout,
        layout.requests,
        batch.tokens,
        layout.width,
        layout.hot_rows,
        layout.slots,
        layout.max_query * layout.width,
        host=False,
    )
    return kernels.run("dsa_install", args, shape, cores, schedule, drop)


def make_slots(batch: Batch) -> torch.Tensor:
    """Distinct slots of the host pool for a step's tokens, some in runs, some tokens without one."""
    layout, rng = batch.layout, batch.rng
    slots = rng.permutation(layout.blocks * layout.block_size)[: batch.tokens].astype(np.int32)
    if rng.random() < 0.5:
        slots.sort()
        slots[: len(slots) // 2] = slots[0] + np.arange(len(slots) // 2)  # a chunk; below the others
    slots[rng.random(len(slots)) < 0.2] = -1
    return ints(slots)


def host_write(
    kernels: Kernels, batch: Batch, slots: torch.Tensor, cores: int, schedule: str, drop: str = ""
) -> Ran:
    layout = batch.layout
    args = [
        *batch.host.arguments("host", IN_OUT),
        *batch.new_rows.arguments("new_rows", IN),
        ("slot_mapping", slots, IN),
        ("reports", batch.new_reports(cores), OUT),
    ]
    shape = (batch.tokens, layout.blocks, layout.block_size, *layout.row_bytes)
    return kernels.run("host_write", args, shape, cores, schedule, drop)
