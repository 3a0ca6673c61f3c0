"""Mixtures of experts: choice of experts, permutation of tokens, grouped products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_emulator.ops import operator
from npu_emulator.ops.dense import add_rms_norm


def in_best_groups(scores: Tensor, groups: int, kept: int, select_mode: int) -> Tensor:
    """scores [tokens, experts] with -inf in all but the ``kept`` best groups. Mode 0: a group by its best
    expert, 1: by the sum of its best two."""
    if groups <= 1 or kept >= groups:
        return scores
    grouped = scores.view(len(scores), groups, -1)
    value = grouped.max(-1).values if select_mode == 0 else grouped.topk(2, dim=-1).values.sum(-1)
    mask = torch.ones_like(value, dtype=torch.bool).scatter(1, value.topk(kept, dim=-1).indices, False)
    return grouped.masked_fill(mask.unsqueeze(-1), float("-inf")).flatten(1)


@operator("_C_ascend::moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor, k: int, k_group: int, group_count: int, group_select_mode: int, renorm: int, norm_type: int,
    out_flag: bool, routed_scaling_factor: float, eps: float, bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights [tokens, k], experts int32, scores if out_flag). norm_type 0: softmax, 1: sigmoid."""
    if norm_type not in (0, 1):
        raise NotImplementedError(f"npu_emulator: moe_gating_top_k with norm type {norm_type}")
    scores = x.float().softmax(-1) if norm_type == 0 else x.float().sigmoid()
    biased = scores if bias_opt is None else scores + bias_opt.float()
    candidates = in_best_groups(biased, group_count, k_group, group_select_mode)
    experts = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, experts)
    if renorm == 1 or norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else torch.empty(0)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), out


@operator("npu::npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None, k_group: int = 1, group_count: int = 1, group_select_mode: int = 0,
    renorm: int = 0, norm_type: int = 0, out_flag: bool = False,
    routed_scaling_factor: float = 1.0, eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if input_ids is not None or tid2eid is not None:
        raise NotImplementedError("npu_emulator: npu_moe_gating_top_k with a table of experts")
    numbers = (k, k_group, group_count, group_select_mode, renorm, norm_type)
    return moe_gating_top_k(x, *numbers, out_flag, routed_scaling_factor, eps, bias)


@operator("npu::npu_moe_gating_top_k_softmax")
def moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    if finished is not None:
        raise NotImplementedError("npu_emulator: npu_moe_gating_top_k_softmax with finished rows")
    weights, experts = x.float().softmax(-1).topk(k, dim=-1)
    rows = torch.arange(experts.numel(), dtype=torch.int32).view(k, -1).t().contiguous()
    return weights.to(x.dtype), experts.to(torch.int32), rows


@operator("_C_ascend::npu_moe_init_routing_custom", "npu::npu_moe_init_routing_v2")
def moe_init_routing(
    x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, offset: Tensor | None = None,
    active_num: int = -1, expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0, expert_tokens_num_flag: bool = False, quant_mode: int = -1,
    active_expert_range: Sequence[int] = (), row_idx_type: int = 0, x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Tokens in the order of experts: (rows, place of each choice or -1, tokens of each expert, nothing).

    x: [tokens, hidden]; expert_idx: int32 [tokens, k]; experts outside the range are another rank's.
    """
    if (
        quant_mode != -1
        or scale is not None
        or offset is not None
        or drop_pad_mode
        or row_idx_type
        or x_dtype
    ):
        raise NotImplementedError("npu_emulator: routing with quantisation, dropped tokens or scattered rows")
    if expert_idx.dtype != torch.int32:
        raise TypeError("npu_emulator: ids of experts are int32")
    first, last = tuple(active_expert_range) or (0, expert_num)
    chosen = expert_idx.flatten().long()
    ours = (chosen >= first) & (chosen < last)
    order = torch.where(ours, chosen, last).sort(stable=True).indices
    used = int(ours.sum())
    places = torch.full_like(chosen, -1)
    places[order[:used]] = torch.arange(used)
    rows = torch.zeros((len(chosen), x.shape[1]), dtype=x.dtype)
    rows[:used] = x[order[:used] // expert_idx.shape[1]]
    counts = torch.bincount(chosen[ours] - first, minlength=last - first)
    if expert_tokens_num_type == 0:
        counts = counts.cumsum(0)
    elif expert_tokens_num_type != 1:
        raise NotImplementedError("npu_emulator: counts of tokens with keys")
    return rows, places.to(torch.int32), counts.to(torch.int64), torch.empty(0)


@operator("npu::npu_moe_token_permute")
def moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    if padded_mode:
        raise NotImplementedError("npu_emulator: npu_moe_token_permute in padded mode")
    width = indices.shape[1] if indices.dim() == 2 else 1
    order = indices.flatten().sort(stable=True).indices
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order))
    kept = order[:num_out_tokens] if num_out_tokens else order
    return tokens[kept // width], places.to(torch.int32)


@operator("npu::npu_moe_token_unpermute")
def moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Each token's rows, weighted and added: [tokens, hidden]. A place below 0 has no row here."""
    if padded_mode:
        raise NotImplementedError("npu_emulator: npu_moe_token_unpermute in padded mode")
    width = probs.shape[1] if probs is not None else 1
    places = sorted_indices.long()
    rows = permuted_tokens[places.clamp(min=0)].float().masked_fill((places < 0).unsqueeze(1), 0)
    rows = rows.view(-1, width, rows.shape[1])
    if probs is not None:
        rows = rows * probs.float().unsqueeze(-1)
    return rows.sum(1).to(permuted_tokens.dtype)


def grouped_product(x: Tensor, weight: Tensor, group_list: Tensor, list_type: int) -> Tensor:
    """x: [rows, in], group after group; weight: [groups, in, out]. Rows behind the groups give 0."""
    counts = (
        group_list.tolist() if list_type == 1 else group_list.diff(prepend=group_list.new_zeros(1)).tolist()
    )
    out = torch.zeros((len(x), weight.shape[2]), dtype=x.dtype)
    start = 0
    for group, count in enumerate(counts):
        if count:
            out[start : start + count] = x[start : start + count] @ weight[group]
        start += count
    if start > len(x):
        raise ValueError(f"npu_emulator: groups of {start} rows, and {len(x)} rows")
    return out


@operator("npu::npu_grouped_matmul")
def grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, bias: list[Tensor] | None = None,
    group_list: Tensor | None = None, split_item: int | None = 0, group_type: int | None = None,
    group_list_type: int | None = 0, output_dtype: torch.dtype | None = None, **others: object,
) -> list[Tensor]:  # fmt: skip
    """One tensor of rows in groups and one weight of three dimensions, without quantisation."""
    given = [name for name, value in others.items() if value]
    if given or bias or group_list is None or (len(x), len(weight), group_type) != (1, 1, 0):
        raise NotImplementedError(f"npu_emulator: npu_grouped_matmul of this form ({', '.join(given)})")
    if split_item not in (2, 3):
        raise NotImplementedError("npu_emulator: npu_grouped_matmul with split results")
    if group_list.dtype != torch.int64:
        raise TypeError("npu_emulator: a group list is int64")
    return [grouped_product(x[0], weight[0], group_list, group_list_type or 0)]


@operator("_C_ascend::moe_grouped_matmul")
def moe_grouped_matmul(
    x: Tensor, weight: Tensor, group_list: Tensor, split_item: int, group_type: int, group_list_type: int
) -> list[Tensor]:
    if group_type != 0:
        raise NotImplementedError("npu_emulator: moe_grouped_matmul of another group type")
    return [grouped_product(x, weight, group_list, group_list_type)]


@operator("_C_ascend::npu_add_rms_norm_bias")
def add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, factor, x = add_rms_norm(x1, x2, gamma, epsilon)
    return (y if beta is None else y + beta), factor, x
