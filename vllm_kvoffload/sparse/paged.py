"""Main KV in an ordinary paged device cache: the engine without offload."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvoffload.sparse.step import AttendPart, StepBatch


class PagedKV:
    """One layer's paged cache, contiguous [num_blocks, block_size, D]."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.rows = cache.view(-1, cache.shape[-1])

    def append(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if len(slot_mapping) and int(slot_mapping.min()) < 0:  # a dummy batch: its tokens have no slots
            rows, slot_mapping = rows[slot_mapping >= 0], slot_mapping[slot_mapping >= 0]
        self.rows.index_copy_(0, slot_mapping, rows)

    def parts(self, topk: torch.Tensor, batch: StepBatch) -> Iterator[AttendPart]:
        query_lens = torch.from_numpy(batch.query_lens).long()
        tables = batch.block_table.repeat_interleave(query_lens, dim=0)
        indices = physical_rows(topk, tables, batch.block_size)
        yield AttendPart(torch.arange(topk.shape[0]), self.rows, indices)


def physical_rows(positions: torch.Tensor, block_tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Flat rows of a paged cache, int64 [t, K], for positions [t, K] (-1 stays) and block tables [t, B]."""
    logical = positions.clamp(min=0).long()
    where = block_tables.gather(1, logical // block_size).long() * block_size + logical % block_size
    return where.masked_fill_(positions < 0, -1)
