"""CANN's plan and install, reproduced exactly on this project's residency.

``dsa_plan`` and ``dsa_install`` of its inference recipes (cann-recipes-infer, as of August 2026), for
comparison with published behaviour only: 16 ways, ``fifo``, compact delivery, a plan that writes no metadata
and an install that replays the FIFO pointers. Per decode step and index group:

1. the owner (full) layer calls :func:`plan` once;
2. every layer gathers its own rows, ``ops.dsa_serve_compact`` with ``out.kinds``;
3. every follower then installs: :func:`install_slots` with ``metadata_update=False`` and ``ops.dsa_install``
   with ``out.miss_positions``, ``out.miss_slots`` and ``out.miss_counts``; the owner does the same last, with
   ``metadata_update=True``. All replay the same pointers, so all get the same slots.

An id's slot is looked up in its set, whereas CANN keeps a table of all ids; the results are equal. Properties
of CANN's plan that this project's plan avoids: padding must be trailing (a chunk of an eighth of the
positions starts afresh unless the position before it is negative), token 0 is never new, and more than 16 new
ids in a set overwrite each other. A step's own tokens are never installed, so rejected drafts need no
roll-back.
"""

from __future__ import annotations

from typing import Final

import torch

from vllm_kvoffload.ops import _C
from vllm_kvoffload.ops.types import Residency

CHUNKS: Final = 8


class ConformanceOut:
    """Output buffers of :func:`plan` and :func:`install_slots`, allocated once for the largest step.

    Only the step's part is written. Symbols: q query tokens of a request, C = ceil(K / 8), M = q * 8 * C.

    Attributes:
        kinds: int32 [T, K, 2], (kind, number) of every position, see ``ops.Kind``.
        actual: int32 [T], ids within reach before the first negative one.
        records: int32 [N, q, 8, C, 4], (set, id, query, position) of each chunk's old misses.
        record_counts: int32 [N, q, 8].
        miss_positions, miss_slots: int32 [N, M], positions and slots for ``ops.dsa_install``.
        miss_counts: int32 [N].
    """

    def __init__(self, max_tokens: int, max_requests: int, topk: int, max_query_len: int) -> None:
        self.chunk_capacity: Final = -(-topk // CHUNKS)
        capacity = max_query_len * CHUNKS * self.chunk_capacity
        chunks = (max_requests, max_query_len, CHUNKS)
        self.kinds: Final = torch.full((max_tokens, topk, 2), -1, dtype=torch.int32)
        self.actual: Final = torch.zeros(max_tokens, dtype=torch.int32)
        self.records: Final = torch.full((*chunks, self.chunk_capacity, 4), -1, dtype=torch.int32)
        self.record_counts: Final = torch.zeros(chunks, dtype=torch.int32)
        self.miss_positions: Final = torch.full((max_requests, capacity), -1, dtype=torch.int32)
        self.miss_slots: Final = torch.full((max_requests, capacity), -1, dtype=torch.int32)
        self.miss_counts: Final = torch.zeros(max_requests, dtype=torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = (
            self.kinds,
            self.actual,
            self.records,
            self.record_counts,
            self.miss_positions,
            self.miss_slots,
            self.miss_counts,
        )
        return sum(int(buffer.nbytes) for buffer in buffers)


def plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    out: ConformanceOut,
) -> None:
    """Determines the location of every position's row. Does not change the residency.

    Of a request with q query tokens and sequence length L, query s may see ids up to ``L - q + s``; ids
    above ``max(L - q - 1, 0)`` are the step's own and never hit. In order of position: after a stop
    (INVALID, -1); negative: NEGATIVE_STOP and stop; beyond sight, or L <= 0: FUTURE_SKIP; the step's own:
    DECODE_WINDOW; resident: POOL_HIT with its slot; else OLD_MISS, and a record. Stops hold to the end of a
    chunk of C positions; the next chunk starts stopped if the position before it is negative.

    Args:
        topk: int32 [T, K].
        query_start_loc: int32 [N + 1], starts at 0.
        seq_lens: int32 [N], any value.
        rows: int32 [N], the request's partition; negative: the request is skipped.
        residency: 16 ways, policy ``fifo``, placement ``one_set``.
        id_range: ids from here on never hit, and are not installed.
        out: overwritten.

    Raises:
        ValueError: a wrong type, shape or range; outputs are then as before.
    """
    _C.conformance_plan(
        topk,
        query_start_loc,
        seq_lens,
        rows,
        residency.handle,
        id_range,
        out.kinds,
        out.actual,
        out.records,
        out.record_counts,
    )


def install_slots(
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    id_range: int,
    out: ConformanceOut,
    *,
    metadata_update: bool,
) -> None:
    """Replays the FIFO pointers over a plan's records and lists the rows to install and their slots.

    By query, chunk and record: the first record of an id takes the way its set's hand points at, and the hand
    moves on by one. Records out of range are dropped, counts clamped.

    Args:
        query_start_loc, rows: as for :func:`plan`. A partition must not appear twice.
        residency: tags and hands are committed if ``metadata_update``, else they stay as they are.
        id_range: ids from here on are dropped.
        out: ``records`` and ``record_counts`` are read, the ``miss_`` buffers overwritten.

    Raises:
        ValueError: a wrong type, shape or range; state and outputs are then as before.
    """
    _C.conformance_install(
        query_start_loc,
        rows,
        residency.handle,
        id_range,
        int(out.kinds.shape[1]),
        out.records,
        out.record_counts,
        out.miss_positions,
        out.miss_slots,
        out.miss_counts,
        metadata_update,
    )
