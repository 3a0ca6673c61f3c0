"""Sparse attention: the lightning indexer, attention to chosen tokens, and writes of MLA rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from npu_emulator.ops import operator
from npu_emulator.ops.dense import interleave_rope, rms_norm, scatter_nd_update_

UNBOUNDED = 9223372036854775807
DECODE_QUERIES = 4  # of a request: rows of decode may be anywhere, so their order is that of the indices


def check_layout(query: str, cache: str, sparse_mode: int, pre_tokens: int, next_tokens: int) -> None:
    """What the released models use; everything else raises."""
    if (query, cache, sparse_mode) != ("TND", "PA_BSND", 3):
        raise NotImplementedError(f"npu_emulator: layouts {query}, {cache} with sparse mode {sparse_mode}")
    if pre_tokens != UNBOUNDED or next_tokens != UNBOUNDED:
        raise NotImplementedError("npu_emulator: a band of tokens")


def check_indices(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is None or tensor.dtype != torch.int32:
            raise TypeError(f"npu_emulator: int32 expected, not {getattr(tensor, 'dtype', None)}")


def requests(stops: Tensor, lengths: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(number, first query, end of queries, tokens) of every request that has queries and tokens: those that
    pad a graph's batch have none."""
    start = 0
    for number, (stop, length) in enumerate(zip(stops.tolist(), lengths.tolist(), strict=True)):
        if stop > start and length > 0:
            yield number, start, stop, length
        start = max(start, stop)


def rows_of(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of a request from [blocks, block size, 1, width]."""
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].squeeze(1)


def choose(query: Tensor, weights: Tensor, keys: Tensor, count: int) -> Tensor:
    """int32 [queries, count]: the best positions in descending order of score, then -1. Causal: the
    last query sees all keys.

    query: [queries, heads, width]; weights: [queries, heads]; keys: [tokens, width].
    """
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys.float()).relu_()
    totals = torch.einsum("qhk,qh->qk", scores, weights.float())
    last = len(keys) - len(query) + torch.arange(len(query))
    totals.masked_fill_(torch.arange(len(keys)) > last.unsqueeze(1), float("-inf"))
    found, order = totals.sort(dim=-1, descending=True, stable=True)
    chosen = order[:, :count].masked_fill(found[:, :count].isneginf(), -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[1]), value=-1).to(torch.int32)


@operator("npu::npu_lightning_indexer", "_C_ascend::npu_lightning_indexer")
def lightning_indexer(
    query: Tensor, key: Tensor, weights: Tensor, *, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_key: Tensor | None = None, block_table: Tensor | None = None,
    layout_query: str = "BSND",
    layout_key: str = "BSND", sparse_count: int = 2048, sparse_mode: int = 3, pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED, return_value: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([queries, 1, sparse_count] int32, nothing). What follows a request's last query is left as -1."""
    check_layout(layout_query, layout_key, sparse_mode, pre_tokens, next_tokens)
    check_indices(actual_seq_lengths_query, actual_seq_lengths_key, block_table)
    if return_value:
        raise NotImplementedError("npu_emulator: npu_lightning_indexer with values")
    if sparse_count > 2048:
        raise ValueError("npu_emulator: npu_lightning_indexer chooses at most 2048 tokens")
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_key is not None
    assert block_table is not None
    out = torch.full((len(query), 1, sparse_count), -1, dtype=torch.int32)
    for number, start, stop, length in requests(actual_seq_lengths_query, actual_seq_lengths_key):
        keys = rows_of(key, block_table[number], length)
        out[start:stop, 0] = choose(query[start:stop], weights[start:stop], keys, sparse_count)
    return out, torch.empty(0)


def attend_chosen(query: Tensor, rows: Tensor, indices: Tensor, scale: float, width: int) -> Tensor:
    """query: [queries, heads, row width]; indices: [queries, n], -1 for none; [queries, heads, width]."""
    missing = indices < 0
    keys = rows[indices.clamp(min=0).long()].float().masked_fill(missing.unsqueeze(-1), 0)
    scores = torch.einsum("qhd,qnd->qhn", query.float(), keys) * scale
    weights = scores.masked_fill(missing.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num(0)
    return torch.einsum("qhn,qnd->qhd", weights, keys[..., :width]).to(query.dtype)


def attend_masked(query: Tensor, rows: Tensor, indices: Tensor, scale: float, width: int) -> Tensor:
    """The same in the order of the rows and not of the indices: faster for many queries."""
    scores = torch.einsum("qhd,kd->qhk", query.float(), rows.float()) * scale
    hidden = torch.ones((len(query), len(rows) + 1), dtype=torch.bool)
    hidden.scatter_(1, indices.masked_fill(indices < 0, len(rows)), False)
    weights = scores.masked_fill(hidden[:, None, :-1], float("-inf")).softmax(-1).nan_to_num(0)
    return torch.einsum("qhk,kd->qhd", weights, rows[:, :width].float()).to(query.dtype)


@operator("npu::npu_sparse_flash_attention", "_C_ascend::npu_sparse_flash_attention")
def sparse_flash_attention(
    query: Tensor, key: Tensor, value: Tensor | None, sparse_indices: Tensor, scale_value: float, *,
    block_table: Tensor | None = None, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    sparse_block_size: int = 1, layout_query: str = "BSND", layout_kv: str = "BSND", sparse_mode: int = 3,
    pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED, attention_mode: int = 2,
    return_softmax_lse: bool = False, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """MLA attention to the chosen tokens of a paged cache. A query's indices end with the first -1."""
    check_layout(layout_query, layout_kv, sparse_mode, pre_tokens, next_tokens)
    check_indices(sparse_indices, block_table, actual_seq_lengths_query, actual_seq_lengths_kv)
    if sparse_block_size != 1 or attention_mode != 2 or return_softmax_lse or sinks is not None:
        raise NotImplementedError("npu_emulator: npu_sparse_flash_attention of another mode")
    if value is None or value.data_ptr() != key.data_ptr():
        raise ValueError("npu_emulator: MLA's values are its keys")
    assert block_table is not None
    assert query_rope is not None
    assert key_rope is not None
    assert actual_seq_lengths_query is not None
    assert actual_seq_lengths_kv is not None
    for tensor in (key, key_rope, sparse_indices, block_table):
        if not tensor.is_contiguous():
            raise ValueError("npu_emulator: npu_sparse_flash_attention reads contiguous tensors")
    queries = torch.cat([query, query_rope], dim=-1)
    out = torch.zeros_like(query)
    for number, start, stop, length in requests(actual_seq_lengths_query, actual_seq_lengths_kv):
        indices = sparse_indices[start:stop].squeeze(1).long()
        if torch.any((indices[:, 1:] >= 0) & (indices[:, :-1] < 0)):
            raise ValueError("npu_emulator: npu_sparse_flash_attention would ignore indices behind a -1")
        seen = length - (stop - start) + torch.arange(stop - start) + 1
        indices = indices.masked_fill(indices >= seen.unsqueeze(1), -1)
        parts = [rows_of(cache, block_table[number], length) for cache in (key, key_rope)]
        rows = torch.cat(parts, dim=-1)
        if stop - start > DECODE_QUERIES:
            for first in range(start, stop, 64):  # bounded scratch
                last = min(first + 64, stop)
                chosen = indices[first - start : last - start]
                out[first:last] = attend_masked(queries[first:last], rows, chosen, scale_value, key.shape[-1])
            continue
        for first in range(start, stop):
            last = first + 1
            chosen = indices[first - start : last - start]
            used = (chosen >= 0).any(0).nonzero().flatten()
            chosen = chosen[:, : int(used[-1]) + 1 if len(used) else 1]
            out[first:last] = attend_chosen(queries[first:last], rows, chosen, scale_value, key.shape[-1])
    return out, torch.empty(0), torch.empty(0)


@operator("npu::npu_kv_rmsnorm_rope_cache")
def kv_rmsnorm_rope_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
    k_rope_scale: Tensor | None = None, c_kv_scale: Tensor | None = None, k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None, v: Tensor | None = None, epsilon: float = 1e-5,
    cache_mode: str = "Norm", is_output_kv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Norm of the latent, rotation of the rest, a write of both. kv: [tokens, 1, 1, latent + rope]."""
    if cache_mode != "PA":
        raise NotImplementedError(f"npu_emulator: npu_kv_rmsnorm_rope_cache with cache mode {cache_mode}")
    if any(x is not None for x in (k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset, v)):
        raise NotImplementedError("npu_emulator: npu_kv_rmsnorm_rope_cache with quantisation")
    if index.dtype != torch.int64:
        raise TypeError("npu_emulator: npu_kv_rmsnorm_rope_cache takes slots of int64")
    width = ckv_cache.shape[-1]
    latent = rms_norm(kv[..., :width], gamma, epsilon)[0]
    rope = interleave_rope(kv[..., width:], cos, sin)
    for cache, rows in ((ckv_cache, latent), (k_cache, rope)):
        flat = cache.view(-1, cache.shape[-1])
        scatter_nd_update_(flat, index.view(-1, 1), rows.reshape(-1, cache.shape[-1]))
    if not is_output_kv:
        return k_cache, ckv_cache, rope.new_empty(0), latent.new_empty(0)
    return k_cache, ckv_cache, rope, latent
