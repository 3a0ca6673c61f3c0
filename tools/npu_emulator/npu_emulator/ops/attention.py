"""Dense attention over a paged cache, and writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_emulator.ops import operator


@operator("atb::_npu_reshape_and_cache")
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    """Caches: [blocks, block size, heads, head size]; slots below 0 are padding."""
    if slot_indices.dtype != torch.int32:
        raise TypeError(f"npu_emulator: slots are int32 on the device, not {slot_indices.dtype}")
    slots = slot_indices.flatten().long()
    used = slots >= 0
    for cache, rows in ((key_cache, key), (value_cache, value)):
        cache.view(-1, *cache.shape[2:])[slots[used]] = rows[: len(slots)][used]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """query: [queries, heads, size]; key, value: [tokens, KV heads, size]. The last query sees all tokens."""
    queries, tokens = len(query), len(key)
    groups = query.shape[1] // key.shape[1]
    k, v = (x.repeat_interleave(groups, 1).float() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), k) * scale
    if causal:
        seen = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)
        scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(query.dtype)


def pages(cache: Tensor, table: Tensor, length: int, block_size: int, heads: int) -> Tensor:
    """The first ``length`` tokens of a request: [length, heads, size]."""
    if cache.shape[1] != block_size:
        raise ValueError(f"npu_emulator: blocks of {cache.shape[1]} tokens, and block_size {block_size}")
    blocks = table[: -(-length // block_size)].long()
    return cache[blocks].flatten(0, 1)[:length].view(length, heads, -1)


def fused_infer_attention(
    query: Tensor, key: Tensor, value: Tensor, *, actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None, block_table: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, input_layout: str = "BSH", num_key_value_heads: int = 0, sparse_mode: int = 0,
    block_size: int = 0, **others: Any,
) -> Tensor:  # fmt: skip
    """Queries of requests one behind the other (TND), with cumulative lengths; those of a cache aren't."""
    if input_layout != "TND" or sparse_mode not in (0, 3):
        raise NotImplementedError(
            f"npu_emulator: attention of layout {input_layout}, sparse mode {sparse_mode}"
        )
    for name in ("pse_shift", "query_rope", "key_rope", "antiquant_scale", "key_antiquant_scale"):
        if others.get(name) is not None:
            raise NotImplementedError(f"npu_emulator: npu_fused_infer_attention_score with {name}")
    if block_table is not None and block_table.dtype != torch.int32:
        raise TypeError("npu_emulator: a block table is int32")
    kv_heads = num_key_value_heads or num_heads
    out = torch.zeros_like(query)
    start, kv_start = 0, 0
    for number, (stop, length) in enumerate(
        zip(actual_seq_lengths or (), actual_seq_lengths_kv or (), strict=True)
    ):
        if block_table is not None:
            k, v = (pages(x, block_table[number], length, block_size, kv_heads) for x in (key, value))
        else:  # lengths are cumulative, too
            k, v = key[kv_start:length], value[kv_start:length]
            kv_start = length
        if stop > start and len(k):
            out[start:stop] = attend(query[start:stop], k, v, scale, sparse_mode == 3)
        start = stop
    return out


@operator("npu::npu_fused_infer_attention_score")
def fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, **rest: Any
) -> tuple[Tensor, Tensor]:
    return fused_infer_attention(query, key, value, **rest), torch.empty(0)


@operator("npu::npu_fused_infer_attention_score.out")
def fused_infer_attention_score_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    out: list[Tensor],
    workspace: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    out[0].copy_(fused_infer_attention(query, key, value, **rest))
    return out[0], out[1]


@operator("npu::_npu_fused_infer_attention_score_get_max_workspace")
def get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return torch.empty(1, dtype=torch.uint8)
