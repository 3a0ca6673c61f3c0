"""The batch of one engine step, and the rows of KV that attention reads in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.sparse.row_ops import Rows

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step, N of them with T query tokens in all.

    Attributes:
        query_start_loc: int32 [N+1], first query token of each request.
        seq_lens: int32 [N], context length including this step's query tokens.
        block_table: int32 [N, B] torch tensor, one block for every ``block_size`` tokens.
        slot_mapping: int64 [T], ``block * block_size + offset`` of every query token.
        block_size: tokens per block.
        req_ids: N request ids; empty if unused.
    """

    query_start_loc: Int32Array
    seq_lens: Int32Array
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    req_ids: tuple[str, ...] = ()

    def named(self, req_ids: Sequence[str]) -> StepBatch:
        """The same batch with its request ids. Raises ValueError when their number is wrong."""
        if len(req_ids) != len(self.seq_lens):
            raise ValueError(f"{len(req_ids)} request ids for {len(self.seq_lens)} requests")
        return replace(self, req_ids=tuple(req_ids))

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def query_lens(self) -> Int32Array:
        return np.diff(self.query_start_loc)

    @property
    def computed(self) -> Int32Array:
        """Length of each request's stable prefix: tokens whose KV existed before this step."""
        return self.seq_lens - self.query_lens


@dataclass(frozen=True)
class PoolSlots:
    """Pool slots of the decoding query tokens' top-k indices, shared by all layers of an index group.

    Attributes:
        slots: int [t, K] slot of every top-k index within the partition of the token's request, -1 for none.
        partitions: int32 [t] partition of each token's request.
        partition_slots: number of slots in a partition.
    """

    slots: torch.Tensor
    partitions: torch.Tensor
    partition_slots: int

    @cached_property
    def flat(self) -> torch.Tensor:
        """int64 [t, K] the same slots, numbered in the flattened pool, -1 for none."""
        first = self.partitions.long().unsqueeze(1) * self.partition_slots
        return (self.slots + first).masked_fill_(self.slots < 0, -1)


@dataclass(frozen=True)
class AttendPart:
    """A subset of a step's query tokens, and the flat rows they attend to.

    Attributes:
        tokens: int64 [t], query tokens of the step.
        rows: [N, D] key rows, or the platform's representation.
        topk_rows: int [t, K] row of every top-k index, -1 where there is none; or its slot of a pool.
        length: length in tokens, if the rows are those of one request by position.
    """

    tokens: torch.Tensor
    rows: Rows
    topk_rows: torch.Tensor | PoolSlots
    length: int = 0

    @property
    def indices(self) -> torch.Tensor:
        """int [t, K] flat row of every top-k index, -1 where there is none."""
        return self.topk_rows.flat if isinstance(self.topk_rows, PoolSlots) else self.topk_rows


class LayerKV(Protocol):
    """The main KV of one layer, independent of its location."""

    def append(self, rows: Rows, slot_mapping: torch.Tensor) -> None:
        """Takes ownership of the step's new rows, [T, D] or the platform's representation."""

    def parts(self, topk: torch.Tensor, batch: StepBatch) -> Iterator[AttendPart]:
        """Yields the step's query tokens with their top-k rows. topk: int32 [T, K] positions, -1 padded.

        A part's rows are valid until the next part is requested.
        """
