"""Reference kernels of the CPU platform: sparse MLA attention, indexer scores, top-k selection.

Plain torch, written for clarity and determinism. Each works on blocks of query tokens so that a
long prefill chunk needs bounded scratch memory. Nothing here knows about paging or offload: callers
pass flat rows and row numbers.
"""

from __future__ import annotations

import torch

SCRATCH_BYTES = 64 << 20
"""Upper bound for one intermediate tensor of a kernel below."""


def _block(tokens: int, bytes_per_token: int) -> int:
    return max(1, min(tokens, SCRATCH_BYTES // max(bytes_per_token, 1)))


def sparse_mla_attend(
    q: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, scale: float, value_width: int
) -> torch.Tensor:
    """Multi-query attention of every token over its own rows.

    Args:
        q: [T, H, D] query, already projected into the latent space (nope part first, rope last).
        rows: [N, D] flat key rows; the first ``value_width`` columns are also the value.
        indices: int [T, K] row of every top-k position, -1 for none.
        scale: softmax scale.
        value_width: V, the latent width.

    Returns:
        [T, H, V] in q's dtype. A token without any valid position gets zeros.
    """
    tokens, heads, width = q.shape
    out = q.new_zeros((tokens, heads, value_width))
    topk = indices.shape[1]
    step = _block(tokens, topk * width * 4)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        index = indices[start:stop].long()
        missing = index < 0
        keys = rows.index_select(0, index.clamp(min=0).flatten()).view(stop - start, topk, width).float()
        # A missing row's placeholder may be another request's: weight 0 would not hide its NaN.
        if bool(missing.any()):
            keys.masked_fill_(missing.unsqueeze(-1), 0.0)
        scores = torch.matmul(q[start:stop].float(), keys.transpose(1, 2)) * scale
        scores.masked_fill_(missing.unsqueeze(1), float("-inf"))
        weights = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
        out[start:stop] = torch.matmul(weights, keys[..., :value_width]).to(out.dtype)
    return out


def indexer_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Lightning-indexer score of every key for every query token, in fp32.

    ``score[t, s] = sum_h weights[t, h] * relu(q[t, h] . keys[s])``

    Args:
        q: [T, H, D]; weights: fp32 [T, H] with all constant factors multiplied in; keys: [S, D].

    Returns:
        fp32 [T, S].
    """
    tokens, heads, width = q.shape
    keys = keys.float()
    out = torch.empty((tokens, keys.shape[0]), dtype=torch.float32)
    step = _block(tokens, heads * keys.shape[0] * 4)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        dots = torch.matmul(q[start:stop].float().reshape(-1, width), keys.t()).relu_()
        dots = dots.view(stop - start, heads, -1)
        torch.sum(dots.mul_(weights[start:stop].unsqueeze(-1)), dim=1, out=out[start:stop])
    return out


def select_topk(scores: torch.Tensor, first_position: int, topk: int, out: torch.Tensor) -> None:
    """Selects the ``topk`` best causal positions of every query token; ties go to the lower position.

    Args:
        scores: fp32 [T, S], S >= first_position + T; overwritten.
        first_position: position of query token 0; token t may choose positions <= first_position + t.
        topk: K.
        out: int32 [T, K]; chosen positions in ascending order, then -1.
    """
    tokens, length = scores.shape
    position = torch.arange(length)
    last = first_position + torch.arange(tokens)
    out.fill_(-1)
    if length <= topk:
        causal = position.to(torch.int32).expand(tokens, length)
        out[:, :length] = torch.where(causal <= last.unsqueeze(1), causal, -1)
        return
    scores.masked_fill_(position > last.unsqueeze(1), float("-inf"))
    threshold = torch.topk(scores, topk, dim=-1, sorted=True).values[:, -1:]
    above = scores > threshold
    tied = (scores == threshold) & (position <= last.unsqueeze(1))
    room = topk - above.sum(-1, keepdim=True)
    chosen = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    token, where = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(-1)
    rank = torch.arange(token.numel()) - (counts.cumsum(0) - counts)[token]
    out[token, rank] = where.to(torch.int32)
