"""gather_selection on the twin and by the oracle: the selections of a few steps on the same rows."""

from __future__ import annotations

import numpy as np
import torch

from tests.ascendc.row_steps import Batch, Layout, Rows, ints, make_batch, numbers, random_rows
from tests.ascendc.twin_kernels import IN, IN_OUT, OUT, Kernels, Ran, aligned
from vllm_kvoffload.ops import oracle

STATUS_UNIT = 16  # int32 of a line


class Selections:
    """State that rows keep between steps. The device's status has a pitch of whole cache lines."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        rows, queries, width = layout.hot_rows, layout.max_query, layout.width
        rng = np.random.default_rng(seed)
        self.rows = Rows(layout, random_rows(rng, rows, queries, width, layout.bytes))
        self.status = torch.full((rows, queries, width + 1), -1, dtype=torch.int32)
        self.status[..., width] = 0
        self.pitch = -(-(width + 1) // STATUS_UNIT) * STATUS_UNIT
        self.padded = aligned(torch.full((rows, queries, self.pitch), -77, dtype=torch.int32))
        self.padded[..., : width + 1] = self.status
        self.previous: dict[tuple[int, int], np.ndarray] = {}

    def same(self) -> bool:
        width = self.layout.width
        untouched = bool((self.padded[..., width + 1 :] == -77).all())
        return untouched and self.rows.same() and torch.equal(self.padded[..., : width + 1], self.status)


def make_topk(batch: Batch, selections: Selections) -> torch.Tensor:
    """Mostly what the row's query chose last, and all that can go wrong."""
    layout, rng = batch.layout, batch.rng
    topk = np.full((batch.tokens, layout.width), -1, np.int32)
    for n in range(layout.requests):
        for s in range(batch.query(n)):
            limit = batch.stable(n) + s
            key = (int(batch.rows[n]), s)
            ids = selections.previous.get(key, rng.integers(0, limit + 1, layout.width))
            changed = rng.random(layout.width) < rng.choice([0.1, 0.5])
            ids = np.where(changed, rng.integers(-3, limit + 4, layout.width), ids)
            if rng.random() < 0.3:
                ids[rng.random(layout.width) < 0.6] = -1
            ids = rng.permutation(ids)
            if rng.random() < 0.1:
                ids[:] = -1
            topk[int(batch.query_start_loc[n]) + s] = ids
            selections.previous[key] = ids
    return ints(topk)


def gather(
    kernels: Kernels,
    batch: Batch,
    selections: Selections,
    topk: torch.Tensor,
    lengths: torch.Tensor,
    cores: int,
    schedule: str,
    drop: str = "",
) -> Ran:
    layout = batch.layout
    args = [
        *batch.host.arguments("host", IN),
        *batch.new_rows.arguments("new_rows", IN),
        *selections.rows.arguments("selection", IN_OUT),
        ("status", selections.padded, IN_OUT),
        ("topk", topk, IN),
        ("query_start_loc", batch.query_start_loc, IN),
        ("seq_lens", batch.seq_lens, IN),
        ("rows", batch.rows, IN),
        ("block_table", batch.block_table, IN),
        ("lengths", lengths, OUT),
        ("reports", batch.new_reports(cores), OUT),
    ]
    shape = numbers(
        layout,
        layout.requests,
        batch.tokens,
        layout.width,
        layout.max_query,
        layout.hot_rows,
        selections.pitch,
    )
    return kernels.run("gather_selection", args, shape, cores, schedule, drop)


def oracle_gather(batch: Batch, selections: Selections, topk: torch.Tensor, lengths: torch.Tensor) -> int:
    return oracle.gather_selection(
        topk,
        batch.query_start_loc,
        batch.seq_lens,
        batch.rows,
        batch.host.whole,
        batch.block_table,
        batch.new_rows.whole,
        selections.rows.whole,
        selections.status,
        lengths,
    )


def next_batch(layout: Layout, seed: int) -> Batch:
    return make_batch(layout, seed)
