"""A step's batch, split into decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from vllm_kvoffload.sparse.partitions import PartitionLease


@dataclass(frozen=True)
class PrefillSpan:
    """A prefilling request of a step. request: batch index. start, stop: its range of query tokens.
    computed, length: its tokens before and after the step."""

    request: int
    start: int
    stop: int
    computed: int
    length: int


@dataclass(frozen=True)
class StepState:
    """A step's batch, split. N' decoding requests with T' query tokens in all.

    Attributes:
        decode: batch indices of the decoding requests; prefill: the other requests.
        decode_prefix_in_step: whether a decoding request's prefix is computed in this step.
        fresh: requests that have not run before.
        decode_ids: N' request ids.
        decode_tokens: int64 [T'] query tokens of the step; token_partitions: int32 [T'] the
            partition of each one's request.
        decode_start_loc: int32 [N'+1]; decode_seq_lens, decode_partitions: int32 [N'].
        decode_block_table: int32 [N', B]; decode_slots: int64 [T'], see ``StepBatch.slot_mapping``.
        leases: the partitions' leases; queued work must check them when it runs (I-1).
        in_graph: the step runs in a device graph, see :meth:`padded`.
    """

    decode: npt.NDArray[np.int64]
    prefill: tuple[PrefillSpan, ...]
    decode_prefix_in_step: bool
    fresh: tuple[str, ...]
    decode_ids: tuple[str, ...]
    decode_tokens: torch.Tensor
    token_partitions: torch.Tensor
    decode_start_loc: torch.Tensor
    decode_seq_lens: torch.Tensor
    decode_partitions: torch.Tensor
    decode_block_table: torch.Tensor
    decode_slots: torch.Tensor
    leases: tuple[PartitionLease, ...]
    in_graph: bool = False

    @classmethod
    def dummy(cls, requests: int = 0, queries: int = 1) -> StepState:
        """A dummy step: requests of ``queries`` tokens each, without partitions, slots or blocks."""
        tokens = requests * queries
        return cls(
            decode=np.arange(requests),
            prefill=(),
            decode_prefix_in_step=False,
            fresh=(),
            decode_ids=(),
            decode_tokens=torch.arange(tokens),
            token_partitions=torch.full((tokens,), -1, dtype=torch.int32),
            decode_start_loc=torch.arange(0, tokens + 1, queries, dtype=torch.int32),
            decode_seq_lens=torch.full((requests,), queries, dtype=torch.int32),
            decode_partitions=torch.full((requests,), -1, dtype=torch.int32),
            decode_block_table=torch.zeros((requests, 0), dtype=torch.int32),
            decode_slots=torch.full((tokens,), -1, dtype=torch.int64),
            leases=(),
        )

    @property
    def ends(self) -> torch.Tensor:
        """int32 [T'], causal limit (exclusive) per query token."""
        lengths = self.decode_start_loc.diff()
        first = self.decode_seq_lens - lengths - self.decode_start_loc[:-1] + 1
        tokens = torch.arange(len(self.decode_tokens), dtype=torch.int32)
        return torch.repeat_interleave(first, lengths) + tokens

    def can_pad(self, requests: int, queries: int) -> bool:
        """Whether :meth:`padded` applies: every request decodes ``queries`` tokens, none needs rows computed
        in this step, and there are at most ``requests`` of them."""
        if self.prefill or self.decode_prefix_in_step or len(self.decode) > requests:
            return False
        return bool((self.decode_start_loc.diff() == queries).all())

    def padded(self, requests: int, queries: int) -> StepState:
        """The step for a graph of ``requests`` requests. The padding has neither partitions nor slots."""
        more = requests - len(self.decode)
        tokens = more * queries
        return replace(
            self,
            decode=np.arange(requests),
            decode_tokens=torch.arange(requests * queries),
            token_partitions=pad(self.token_partitions, (0, tokens), value=-1),
            decode_start_loc=torch.arange(0, requests * queries + 1, queries, dtype=torch.int32),
            decode_seq_lens=pad(self.decode_seq_lens, (0, more), value=queries),
            decode_partitions=pad(self.decode_partitions, (0, more), value=-1),
            decode_block_table=pad(self.decode_block_table, (0, 0, 0, more)),
            decode_slots=pad(self.decode_slots, (0, tokens), value=-1),
            in_graph=True,
        )
