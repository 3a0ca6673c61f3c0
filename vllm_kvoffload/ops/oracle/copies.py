"""Row copies between the host pool, the hot pool, selections and freshly computed rows."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.ops.types import Kind


def host_row(host: torch.Tensor, table: torch.Tensor, token: int) -> torch.Tensor:
    """The host row of one token of the request with that block table."""
    block, offset = divmod(token, host.shape[1])
    return host[int(table[block]), offset]


def dsa_serve(
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
) -> int:
    """Every miss: the host row of token ``id`` goes to its slot of partition ``rows[n]``."""
    copied = 0
    for n, partition in enumerate(rows.tolist()):
        for i in range(int(miss_counts[n]) if partition >= 0 else 0):
            hot[partition, int(miss_slots[n, i])] = host_row(host, block_table[n], int(miss_ids[n, i]))
            copied += host.shape[2]
    return copied


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
    """Every position's row, hits included, goes to its place of the selection; zeros where there is none.

    Requests without a partition and tokens past the last request get zeros, whatever the kinds.
    """
    selection[: len(new_rows)] = 0
    fetched = 0
    for n, partition in enumerate(rows.tolist()):
        first, last = query_start_loc[n : n + 2].tolist()
        stable = int(seq_lens[n]) - (last - first)
        for t in range(first, last if partition >= 0 else first):
            for k, (kind, index) in enumerate(kinds[t].tolist()):
                if kind == Kind.POOL_HIT:
                    selection[t, k] = hot[partition, index]
                elif kind == Kind.OLD_MISS:
                    selection[t, k] = host_row(host, block_table[n], index)
                    fetched += host.shape[2]
                elif kind == Kind.DECODE_WINDOW:
                    selection[t, k] = new_rows[first + index - stable]
    return fetched


def dsa_install(
    selection: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    miss_positions: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    hot: torch.Tensor,
) -> int:
    """Every miss, in order: the selection's row at its position goes to its slot of partition ``rows[n]``."""
    width = selection.shape[1]
    copied = 0
    for n, partition in enumerate(rows.tolist()):
        for i in range(int(miss_counts[n]) if partition >= 0 else 0):
            t, k = divmod(int(miss_positions[n, i]), width)
            hot[partition, int(miss_slots[n, i])] = selection[int(query_start_loc[n]) + t, k]
            copied += hot.shape[2]
    return copied


def write_rows(hot: torch.Tensor, rows: torch.Tensor, new_rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Token by token; slot -1 is skipped."""
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            hot[int(rows[t]), slot] = new_rows[t]


def host_write(host: torch.Tensor, new_rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Token by token; -1 is skipped."""
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, host.shape[1])
            host[block, offset] = new_rows[t]


def host_read(
    host: torch.Tensor, block_table: torch.Tensor, start: int, count: int, dst: torch.Tensor
) -> None:
    """Token by token."""
    for i in range(count):
        dst[i] = host_row(host, block_table, start + i)


def copy_spans(
    to: npt.NDArray[np.int64],
    source: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    to_ranges: npt.NDArray[np.int64],  # noqa: ARG001  # checked by the core only
    source_ranges: npt.NDArray[np.int64],  # noqa: ARG001
) -> int:
    """Every span, in order: its bytes go from its source to its destination."""
    for target, origin, count in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        ctypes.memmove(target, origin, count)
    return int(nbytes.sum())
