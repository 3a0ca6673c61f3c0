"""The ops as torch custom ops ``torch.ops.kvoffload.*``, for code that torch.compile captures.

Importing this module registers them; :mod:`vllm_kvoffload.ops` does not. They take tensors only, say which of
them they write, and return nothing. Elsewhere the plain functions of :mod:`vllm_kvoffload.ops` are better: a
custom op's dispatch costs some 10 us more.

Inductor (torch 2.13) drops a bare copy (``clone``, ``copy_``) of a buffer between two custom ops that write
it, whichever ops they are: the copy then shows the later write. A result computed from the buffer is right.

Arguments and errors are those of the plain functions. A :class:`~vllm_kvoffload.ops.Residency` is passed as
its four tensors and its policy, and must have the placement ``one_set``; a
:class:`~vllm_kvoffload.ops.PlanOut` is passed as its buffers in the order of ``PlanOut.buffers``.
"""

from __future__ import annotations

import threading

import torch

from vllm_kvoffload.ops import _C, native

NAMESPACE = "kvoffload"


class _Thread(threading.local):
    """Per-thread state reused from call to call."""

    def __init__(self) -> None:
        self.workspace = _C.Workspace()


_thread = _Thread()


@torch.library.custom_op(
    f"{NAMESPACE}::dsa_plan",
    mutates_args=(
        "tags",
        "ages",
        "hands",
        "high",
        "slots",
        "new_slots",
        "miss_ids",
        "miss_slots",
        "miss_counts",
        "stats",
        "kinds",
        "miss_positions",
    ),
    device_types="cpu",
)
def dsa_plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    tags: torch.Tensor,
    ages: torch.Tensor,
    hands: torch.Tensor,
    high: torch.Tensor,
    policy: str,
    slots: torch.Tensor,
    new_slots: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    stats: torch.Tensor,
    kinds: torch.Tensor,
    miss_positions: torch.Tensor,
) -> None:
    """:func:`vllm_kvoffload.ops.dsa_plan`; empty ``kinds`` and ``miss_positions``: no compact delivery."""
    residency = _C.Residency(tags, ages, hands, high, policy)
    out = _C.PlanOut(slots, new_slots, miss_ids, miss_slots, miss_counts, stats, kinds, miss_positions)
    _C.dsa_plan(topk, query_start_loc, seq_lens, rows, residency, out, _thread.workspace)


@torch.library.custom_op(f"{NAMESPACE}::dsa_serve", mutates_args=("hot",), device_types="cpu")
def dsa_serve(
    host: torch.Tensor,
    hot: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    miss_ids: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
) -> None:
    """:func:`vllm_kvoffload.ops.dsa_serve`."""
    native.dsa_serve(host, hot, block_table, rows, miss_ids, miss_slots, miss_counts)


@torch.library.custom_op(f"{NAMESPACE}::dsa_serve_compact", mutates_args=("selection",), device_types="cpu")
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
) -> None:
    """:func:`vllm_kvoffload.ops.dsa_serve_compact`."""
    native.dsa_serve_compact(
        kinds, query_start_loc, seq_lens, host, hot, block_table, rows, new_rows, selection
    )


@torch.library.custom_op(f"{NAMESPACE}::dsa_install", mutates_args=("hot",), device_types="cpu")
def dsa_install(
    selection: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: torch.Tensor,
    miss_positions: torch.Tensor,
    miss_slots: torch.Tensor,
    miss_counts: torch.Tensor,
    hot: torch.Tensor,
) -> None:
    """:func:`vllm_kvoffload.ops.dsa_install`."""
    native.dsa_install(selection, query_start_loc, rows, miss_positions, miss_slots, miss_counts, hot)


@torch.library.custom_op(
    f"{NAMESPACE}::gather_selection", mutates_args=("selection", "status", "lengths"), device_types="cpu"
)
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
) -> None:
    """:func:`vllm_kvoffload.ops.gather_selection`."""
    native.gather_selection(
        topk, query_start_loc, seq_lens, rows, host, block_table, new_rows, selection, status, lengths
    )


@torch.library.custom_op(f"{NAMESPACE}::write_rows", mutates_args=("hot",), device_types="cpu")
def write_rows(hot: torch.Tensor, rows: torch.Tensor, new_rows: torch.Tensor, slots: torch.Tensor) -> None:
    """:func:`vllm_kvoffload.ops.write_rows`."""
    native.write_rows(hot, rows, new_rows, slots)


@torch.library.custom_op(f"{NAMESPACE}::host_write", mutates_args=("host",), device_types="cpu")
def host_write(host: torch.Tensor, new_rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """:func:`vllm_kvoffload.ops.host_write`."""
    native.host_write(host, new_rows, slot_mapping)


def _writes_nothing(*args: object, **kwargs: object) -> None:
    """Fake implementation of every op: writes and returns nothing."""


_OPS = {
    "dsa_plan": dsa_plan,
    "dsa_serve": dsa_serve,
    "dsa_serve_compact": dsa_serve_compact,
    "dsa_install": dsa_install,
    "gather_selection": gather_selection,
    "write_rows": write_rows,
    "host_write": host_write,
}
NAMES = tuple(_OPS)
for _op in _OPS.values():
    _op.register_fake(_writes_nothing)
