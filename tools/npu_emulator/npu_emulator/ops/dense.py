"""Norms, rotary embeddings, activations and matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.ops import operator


def normalised(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x by its root mean square along the last dimension, in float, and the factor [..., 1]."""
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * factor, factor


@operator("npu::npu_rms_norm")
def rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    y, factor = normalised(self, epsilon)
    return y.to(self.dtype) * gamma, factor


@operator("npu::npu_add_rms_norm")
def add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    x = x1 + x2
    y, factor = rms_norm(x, gamma, epsilon)
    return y, factor, x


@operator("npu::npu_swiglu")
def swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, value = self.chunk(2, dim)
    return torch.nn.functional.silu(gate) * value


@operator("npu::npu_silu")
def silu(self: Tensor) -> Tensor:
    return torch.nn.functional.silu(self)


@operator("npu::npu_format_cast")
def format_cast(self: Tensor, acl_format: int, *_: object, **__: object) -> Tensor:
    """Memory of an emulated device has one layout, so a cast is a copy."""
    return self.clone()


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are the two halves of the last dimension; cos and sin are as wide as x."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-high, low], dim=-1) * sin).to(x.dtype)


def neighbours_as_halves(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


@operator("npu::npu_rotary_mul")
def rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    if rotate is not None:
        raise NotImplementedError("npu_emulator: npu_rotary_mul with a matrix")
    if rotary_mode == "half":
        return rotate_halves(self, r1, r2)
    if rotary_mode != "interleave":
        raise NotImplementedError(f"npu_emulator: rotary mode {rotary_mode}")
    even, odd = self[..., ::2], self[..., 1::2]
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return (self * r1 + turned * r2).to(self.dtype)


@operator("npu::npu_interleave_rope")
def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs are neighbours, and come out as halves."""
    return rotate_halves(neighbours_as_halves(x), cos, sin)


@operator("atb::_npu_rotary_embedding")
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> None:
    """In place, on the first dimensions of every head; cos_sin_cache: [positions, rotated size]."""
    cos, sin = cos_sin_cache[positions.flatten().long()].unsqueeze(1).chunk(2, -1)
    for tensor in (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)
        part = heads[..., : 2 * cos.shape[-1]]
        c, s = cos.to(tensor.dtype), sin.to(tensor.dtype)
        if is_neox_style:
            a, b = part.chunk(2, -1)
            turned = torch.cat([a * c - b * s, b * c + a * s], -1)
        else:
            a, b = part[..., ::2], part[..., 1::2]
            turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
        part.copy_(turned)


@operator("atb::_npu_matmul_add_fp32")
def matmul_add_fp32(x: Tensor, weight: Tensor, c: Tensor) -> None:
    """c += xᵀ · weight in float; shapes that don't fit, as in vllm-ascend's warm-up, do nothing."""
    if c.shape == (x.shape[1], weight.shape[1]):
        c.add_(x.float().t() @ weight.float())


@operator("npu::npu_transpose_batchmatmul")
def transpose_batchmatmul(
    input: Tensor, weight: Tensor, *, bias: Tensor | None = None, scale: Tensor | None = None,
    perm_x1: list[int] | None = None, perm_x2: list[int] | None = None, perm_y: list[int] | None = None,
    batch_split_factor: int | None = 1,
) -> Tensor:  # fmt: skip
    if bias is not None or scale is not None or (batch_split_factor or 1) != 1:
        raise NotImplementedError("npu_emulator: npu_transpose_batchmatmul with bias, scale or a split")
    x = input.permute(perm_x1) if perm_x1 else input
    w = weight.permute(perm_x2) if perm_x2 else weight
    return torch.bmm(x, w).permute(perm_y or [1, 0, 2]).contiguous()


@operator("_C_ascend::batch_matmul_transpose")
def batch_matmul_transpose(
    tensor_a: Tensor,
    tensor_b: Tensor,
    tensor_c: Tensor,
    format_mode: str | None = None,
    quant_mode: str | None = None,
) -> None:
    """tensor_c [tokens, heads, n] = tensor_a [tokens, heads, m] by tensor_b [heads, m, n], head by head."""
    if format_mode not in (None, "ND") or quant_mode is not None:
        raise NotImplementedError("npu_emulator: batch_matmul_transpose with a format or quantisation")
    tensor_c.copy_(torch.einsum("thm,hmn->thn", tensor_a, tensor_b))


@operator("npu::npu_scatter_nd_update_")
def scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Rows of the first dimension; negative indices, which pad a batch, are left out."""
    if indices.shape[-1] != 1:
        raise NotImplementedError("npu_emulator: npu_scatter_nd_update_ with more than one index")
    where = indices.reshape(-1).long()
    self[where[where >= 0]] = updates.reshape(len(where), *self.shape[1:])[where >= 0]
    return self
