"""A step's batch, sorted into decode and prefill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.sparse.rows import RowLease


@dataclass(frozen=True)
class PrefillSpan:
    """A prefilling request of a step: batch index, query tokens ``start .. stop``, and its length in tokens
    before and after the step."""

    request: int
    start: int
    stop: int
    computed: int
    length: int


@dataclass(frozen=True)
class StepState:
    """A step's batch, sorted. N' decoding requests with T' query tokens in all.

    Attributes:
        decode: batch indices of the decoding requests; prefill: the others.
        decode_late: whether a decoding request's prefix is written in this very step.
        fresh: requests that had not run before.
        decode_ids: N' request ids.
        decode_tokens: int64 [T'] query tokens of the step; token_rows: int32 [T'] their rows.
        first_slots: int64 [T', 1] flat number of the first slot of each token's row.
        decode_start_loc: int32 [N'+1]; decode_seq_lens, decode_rows: int32 [N'].
        decode_block_table: int32 [N', B].
        leases: N' claims on those rows; work that is queued with them must check them when it runs (I-1).
    """

    decode: npt.NDArray[np.int64]
    prefill: tuple[PrefillSpan, ...]
    decode_late: bool
    fresh: tuple[str, ...]
    decode_ids: tuple[str, ...]
    decode_tokens: torch.Tensor
    token_rows: torch.Tensor
    first_slots: torch.Tensor
    decode_start_loc: torch.Tensor
    decode_seq_lens: torch.Tensor
    decode_rows: torch.Tensor
    decode_block_table: torch.Tensor
    leases: tuple[RowLease, ...]
