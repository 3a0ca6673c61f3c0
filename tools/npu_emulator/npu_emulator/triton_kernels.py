"""Triton kernels in plain code, in the place where a module of vLLM looks for them."""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


class PlainKernel:
    """Called like a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._function


def slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    stride: int,
    block_size: int,
    out: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """Slots of tokens at ``positions`` [tokens], by request; what is behind them gets PAD_ID."""
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("npu_emulator: slot mapping of context parallelism")
    starts = query_start_loc.tolist()
    out[num_tokens:max_num_tokens] = PAD_ID
    for row, (first, last) in enumerate(pairwise(starts)):
        if last > first:
            where = positions[first:last].long()
            blocks = block_table[row, where // block_size].long()
            out[first:last] = (blocks * block_size + where % block_size).to(out.dtype)


KERNELS = {"_compute_slot_mapping_kernel": slot_mapping}


def replace(module: types.ModuleType) -> None:
    for name, function in KERNELS.items():
        if hasattr(module, name):
            setattr(module, name, PlainKernel(function))
