"""Calls into the compiled core. :mod:`vllm_kvoffload.ops.oracle` is the specification of each op.

The arguments ``rows`` are numbers of partitions of the hot pool, not of rows of KV.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.ops import _C
from vllm_kvoffload.ops.types import PlanOut, Residency, Workspace

ISA_ENV = "KVOFFLOAD_ISA"


def dsa_plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    out: PlanOut,
    workspace: Workspace,
) -> None:
    """Determines, for one step of one index group, the slot of every top-k token and the tokens to fetch.

    Args:
        topk: int32 [T, K], top-k token ids per query token, -1 anywhere for padding.
        query_start_loc: int32 [N + 1], starts at 0; tokens past its end are padding and get slots of -1.
        seq_lens: int32 [N], tokens of the request including this step's.
        rows: int32 [N], the request's partition; negative: the request is skipped.
        residency: updated in place. No partition may be planned by two threads at once.
        out: overwritten; kinds and positions of misses too if it was made with ``compact=True``.
        workspace: scratch of the calling thread, reused from call to call.

    Raises:
        ValueError: a wrong type, shape or range; a partition used twice; more ids than a partition has slots.
            State and outputs are then as before.
    """
    _C.dsa_plan(topk, query_start_loc, seq_lens, rows, residency.handle, out.handle, workspace)


def dsa_serve(
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
) -> int:
    """Copies one layer's misses from the host pool into their slots; returns the bytes copied.

    Args:
        host: uint8 [num_blocks, block_size, row_bytes].
        hot: uint8 [R, P, row_bytes].
        block_table: int32 [at least N, B], host blocks of each request.
        rows: int32 [N], the request's partition; negative: skip.
        miss_ids: int32 [at least N, M]; with ``miss_slots`` and ``miss_counts`` as the plan wrote them.

    Raises:
        ValueError: a wrong type, shape or range; nothing was copied then.
    """
    return _C.dsa_serve(host, hot, block_table, rows, miss_ids, miss_slots, miss_counts)


def dsa_serve_compact(
    kinds: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    new_rows: torch.Tensor,
    selection: torch.Tensor,
) -> int:
    """Gathers one layer's top-k rows, hits included, in order of position; returns the bytes fetched.

    Args:
        kinds: int32 [at least T, K, 2], as the plan wrote them.
        query_start_loc: int32 [N + 1], starts at 0.
        seq_lens: int32 [N].
        host: uint8 [num_blocks, block_size, row_bytes].
        hot: uint8 [R, P, row_bytes].
        block_table: int32 [at least N, B], host blocks of each request.
        rows: int32 [N], the request's partition; negative: skip.
        new_rows: uint8 [T, row_bytes], the step's new tokens.
        selection: uint8 [at least T, K, row_bytes]; its first T are overwritten, with zeros where no row is.

    Raises:
        ValueError: a wrong type, shape or range; nothing was copied then.
    """
    return _C.dsa_serve_compact(
        kinds, query_start_loc, seq_lens, host, hot, block_table, rows, new_rows, selection
    )


def dsa_install(
    selection: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    miss_positions: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    hot: torch.Tensor,
) -> int:
    """Refills one layer's pool with the misses of a gathered selection; returns the bytes copied.

    Args:
        selection: uint8 [at least T, K, row_bytes], as ``dsa_serve_compact`` left it.
        query_start_loc: int32 [N + 1], starts at 0.
        rows: int32 [N], the request's partition; negative: skip.
        miss_positions: int32 [at least N, M]; with ``miss_slots`` and ``miss_counts`` as the plan wrote them.
        hot: uint8 [R, P, row_bytes].

    Raises:
        ValueError: a wrong type, shape or range; nothing was copied then.
    """
    return _C.dsa_install(selection, query_start_loc, rows, miss_positions, miss_slots, miss_counts, hot)


def gather_selection(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    host: torch.Tensor,
    block_table: torch.Tensor,
    new_rows: torch.Tensor,
    selection: torch.Tensor,
    status: torch.Tensor,
    lengths: torch.Tensor,
) -> int:
    """The baseline: one layer's top-k rows, reusing those of the previous step; returns the bytes fetched.

    The order of a selection is arbitrary: ``status`` lists the id at each place. A partition starts with a
    status of -1 and lengths (the last entry) of 0.

    Args:
        topk: int32 [T, K], -1 anywhere for padding.
        query_start_loc: int32 [N + 1], starts at 0.
        seq_lens: int32 [N], tokens of the request including this step's.
        rows: int32 [N], the request's partition; negative: skip.
        host: uint8 [num_blocks, block_size, row_bytes].
        block_table: int32 [at least N, B], host blocks of each request; must cover every top-k id.
        new_rows: uint8 [T, row_bytes], the step's new tokens.
        selection: uint8 [R, Q, K, row_bytes], updated in place; Q: most query tokens of a request.
        status: int32 [R, Q, K + 1], updated in place: the id at each place, -1 behind them, their number.
        lengths: int32 [at least T], the number of ids of each query token's selection.

    Raises:
        ValueError: a wrong type, shape or range; a partition used twice. Nothing was written then.
    """
    return _C.gather_selection(
        topk, query_start_loc, seq_lens, rows, host, block_table, new_rows, selection, status, lengths
    )


def gather_reuse(
    status: torch.Tensor, rows: torch.Tensor, query_start_loc: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Reads the lengths of the selections as they are: draft steps that keep the first one's top-k.

    Args:
        status: int32 [R, Q, K + 1].
        rows: int32 [N], the request's partition; negative: skip.
        query_start_loc: int32 [N + 1], starts at 0.
        lengths: int32 [T], 0 where there is no request.

    Raises:
        ValueError: a wrong type, shape or range; nothing was written then.
    """
    _C.gather_reuse(status, rows, query_start_loc, lengths)


def write_rows(hot: torch.Tensor, rows: torch.Tensor, new_rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes each token's new row into its slot of the hot pool.

    Args:
        hot: uint8 [R, P, row_bytes].
        rows: int32 [T], the partition of each token's request.
        new_rows: uint8 [T, row_bytes].
        slots: int32 [T], -1: skip (its partition is then not looked at).

    Raises:
        ValueError: a wrong type, shape or range; nothing was written then.
    """
    _C.write_rows(hot, rows, new_rows, slots)


def host_write(host: torch.Tensor, new_rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes each token's new row into the host pool.

    Args:
        host: uint8 [num_blocks, block_size, row_bytes].
        new_rows: uint8 [T, row_bytes].
        slot_mapping: int64 [T], ``block * block_size + offset``; -1: skip.

    Raises:
        ValueError: a wrong type, shape or range; nothing was written then.
    """
    _C.host_write(host, new_rows, slot_mapping)


def host_read(
    host: torch.Tensor, block_table: torch.Tensor, start: int, count: int, dst: torch.Tensor
) -> None:
    """Copies tokens ``start .. start + count`` of one request into the first ``count`` rows of ``dst``.

    Args:
        host: uint8 [num_blocks, block_size, row_bytes].
        block_table: int32 [B], the request's host blocks.
        dst: uint8 [at least count, row_bytes].

    Raises:
        ValueError: a wrong type, shape or range; nothing was copied then.
    """
    _C.host_read(host, block_table, start, count, dst)


def copy_spans(
    to: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    to_ranges: npt.NDArray[np.int64],
    source_ranges: npt.NDArray[np.int64],
) -> int:
    """Copies spans of raw memory of this process, in order; returns the bytes copied.

    Args:
        to: int64 [N], addresses. source: int64 [N], addresses. nbytes: int64 [N], above 0.
        to_ranges: int64 [R, 2], start and end of each piece of memory that may be written, sorted and apart;
            every span must lie in one of them. The ranges themselves are not checked.
        source_ranges: int64 [Q, 2], the same for reading.

    Raises:
        ValueError: a wrong type, shape or range, or a span that overlaps its source; nothing was copied then.
    """
    arrays = [np.require(array, requirements=("C", "W")) for array in (to, source, nbytes)]
    ranges = [np.require(array, requirements=("C", "W")) for array in (to_ranges, source_ranges)]
    return _C.copy_spans(*arrays, *ranges)


def available_isas() -> list[str]:
    """Instruction sets compiled in and supported here, slowest first: of portable, avx2, avx512, neon."""
    return _C.available_isas()


def isa() -> str:
    """The instruction set that plans use."""
    return _C.isa()


def set_isa(name: str) -> None:
    """Selects the plan's instruction set for the whole process; ``auto`` takes the best.

    All give the same results. The environment variable ``KVOFFLOAD_ISA`` does the same at import.

    Raises:
        ValueError: unknown, or this processor lacks it.
    """
    _C.set_isa(name)


if os.environ.get(ISA_ENV):
    set_isa(os.environ[ISA_ENV])
