"""Random weights with structure, for the demo checkpoints.

Plain Gaussian weights would make a poor stand-in for a DSA model: attention over many rows averages to
nothing, and the indexer would select a fresh random set in every step. So
- all embeddings share a *mean direction* m. A layer's input is a known multiple of m plus something
  random, which gives weight matrices a way to hold constants without biases;
- the indexer's queries are mostly constant (made from m): the content of a token decides how interesting it
  is, and the rotary part adds preferences for distances, so the selection drifts with the position. A
  smaller share depends on the query token. Consecutive selections overlap like those of trained models;
- attention latents, MLPs and logits are blind to m, so that outputs depend on the context and not on a
  constant; latents are also blind to the direction that the indexer reads.

An MTP layer gets the next token's embedding and the model's hidden state of the tokens before it. Its
attention is the first layer's, so that it knows as much of the next hidden state as that layer does; in a
model with MTP layers all outputs after the first attention are scaled by `after_attention`, which makes that
part large enough for drafts to be right now and then.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.demo import text

if TYPE_CHECKING:
    import torch

    from vllm_kvoffload.demo.spec import CheckpointSpec

VERSION = 2
"""Part of every checkpoint's digest; raise it whenever a weight changes."""

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scales:
    """Root mean squares that shape the model; tuned on the packaged text."""

    mean_share: float = 0.6  # of an embedding's unit rms, along m
    attention_logits: float = 3.0  # standard deviation of q.k over the attended rows
    attention_output: float = 1.3
    mlp_output: float = 0.7
    expert_output: float = 0.3
    router: float = 1.5
    logits: float = 2.5
    control_logit: float = -12.0  # control tokens must not be generated
    index_constant: float = 1.0
    index_content: float = 0.25
    index_distance: float = 0.6
    norm_jitter: float = 0.1
    after_attention: float = 0.2  # factor on all outputs after the first attention, in models with MTP layers
    mtp_hidden: float = 0.1  # an MTP layer's gain on the hidden state of the token before


class _Builder:
    def __init__(self, spec: CheckpointSpec, scales: Scales) -> None:
        self.spec = spec
        self.scales = scales
        self.tensors: dict[str, Array] = {}
        self.mean = np.where(self.normal("mean", spec.hidden_size) > 0, 1.0, -1.0).astype(np.float32)

    def normal(self, name: str, *shape: int) -> Array:
        """Standard normal, by seed and name only: specs that differ elsewhere share their weights."""
        seed = hashlib.sha256(f"{self.spec.seed}:{name}".encode()).digest()
        generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:16], "little")))
        return generator.standard_normal(shape, dtype=np.float32)

    def linear(self, name: str, out_features: int, in_features: int, gain: float = 1.0) -> Array:
        """Weight [out, in] that maps unit-rms input to output of rms `gain`."""
        weight: Array = self.normal(name, out_features, in_features) * np.float32(
            gain / math.sqrt(in_features)
        )
        self.tensors[name] = weight
        return weight

    def norm(self, name: str, size: int) -> Array:
        """Norm weight [size] near one: not exactly, or a forgotten weight would go unnoticed."""
        weight: Array = 1.0 + np.float32(self.scales.norm_jitter) * self.normal(name, size)
        self.tensors[name] = weight
        return weight

    def blind(self, name: str, *directions: Array) -> None:
        """Remove from the rows of a weight their components along `directions`, each [in] or [n, in]."""
        basis, _ = np.linalg.qr(np.vstack(directions).astype(np.float64).T)
        weight = self.tensors[name]
        self.tensors[name] = (weight - (weight @ basis) @ basis.T).astype(np.float32)


def random_weights(spec: CheckpointSpec, scales: Scales | None = None) -> dict[str, torch.Tensor]:
    """Hugging Face state dict of `spec` in its dtype (router bias float32), contiguous CPU tensors."""
    import torch

    builder = _Builder(spec, scales or Scales())
    _embeddings(builder)
    for layer in range(spec.num_layers):
        _layer(builder, layer)
    for layer in range(spec.num_layers, spec.num_layers + spec.num_mtp_layers):
        _mtp_layer(builder, layer)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.dtype]
    state: dict[str, torch.Tensor] = {}
    for name, array in builder.tensors.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        state[name] = tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
    return state


def _embeddings(builder: _Builder) -> None:
    spec, scales = builder.spec, builder.scales
    share = np.float32(scales.mean_share)
    noise = builder.normal("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    builder.tensors["model.embed_tokens.weight"] = share * builder.mean + np.sqrt(1 - share**2) * noise
    norm = builder.norm("model.norm.weight", spec.hidden_size)
    head = builder.linear("lm_head.weight", spec.vocab_size, spec.hidden_size, scales.logits)
    seen_mean = norm * builder.mean
    builder.blind("lm_head.weight", seen_mean)
    share_at_end = _mean_share(builder, spec.num_layers)
    head = builder.tensors["lm_head.weight"]
    head[: text.RESERVED] = scales.control_logit / share_at_end * seen_mean / float(seen_mean @ seen_mean)


def _mean_share(builder: _Builder, layer: int, after_attention: bool = False) -> float:
    """Expected rms share of m in the normalised input of a layer: blocks add variance, m stays."""
    scales = builder.scales
    blocks = layer * (0.6 + scales.mlp_output**2) + (0.6 if after_attention else 0.0)
    if builder.spec.num_mtp_layers:
        first = 0.6 if layer or after_attention else 0.0
        blocks = first + (blocks - first) * scales.after_attention**2
    return scales.mean_share / math.sqrt(1.0 + blocks)


def _volume(builder: _Builder, first_attention: bool = False) -> float:
    """Factor on the output of an attention or MLP."""
    return builder.scales.after_attention if builder.spec.num_mtp_layers and not first_attention else 1.0


def _layer(builder: _Builder, layer: int) -> None:
    spec = builder.spec
    prefix = f"model.layers.{layer}."
    norm = builder.norm(prefix + "input_layernorm.weight", spec.hidden_size)
    volume = _volume(builder, first_attention=layer == 0)
    _attention(builder, prefix + "self_attn.", norm * builder.mean, volume)
    if spec.has_indexer:
        owner = spec.layer_pattern.rindex("F", 0, layer + 1)
        if owner == layer:
            _indexer(builder, prefix + "self_attn.", norm * builder.mean, _mean_share(builder, layer))
        # else the selected rows would be alike, and attention would give nearly the same every time
        chosen_by = builder.tensors[f"model.layers.{owner}.self_attn.indexer.wk.weight"]
        builder.blind(prefix + "self_attn.kv_a_proj_with_mqa.weight", norm * builder.mean, chosen_by)
    _feed_forward(builder, layer)


def _feed_forward(builder: _Builder, layer: int) -> None:
    spec, scales, volume = builder.spec, builder.scales, _volume(builder)
    prefix = f"model.layers.{layer}."
    seen_mean = builder.norm(prefix + "post_attention_layernorm.weight", spec.hidden_size) * builder.mean
    mlp_output, expert_output = scales.mlp_output * volume, scales.expert_output * volume
    if layer < spec.num_dense_layers:
        _mlp(builder, prefix + "mlp.", spec.intermediate_size, mlp_output, seen_mean)
        return
    router = builder.linear(
        prefix + "mlp.gate.weight", spec.n_routed_experts, spec.hidden_size, scales.router
    )
    bias = 0.1 * builder.normal(prefix + "mlp.gate.e_score_correction_bias", router.shape[0])
    builder.tensors[prefix + "mlp.gate.e_score_correction_bias"] = bias
    _mlp(builder, prefix + "mlp.shared_experts.", spec.moe_intermediate_size, mlp_output, seen_mean)
    for expert in range(spec.n_routed_experts):
        name = f"{prefix}mlp.experts.{expert}."
        _mlp(builder, name, spec.moe_intermediate_size, expert_output, seen_mean)


def _mtp_layer(builder: _Builder, layer: int) -> None:
    """A layer that gets a hidden state and the next token's embedding, and predicts that token's state."""
    spec, scales = builder.spec, builder.scales
    prefix, hidden = f"model.layers.{layer}.", spec.hidden_size
    for name in [name for name in builder.tensors if name.startswith("model.layers.0.")]:
        part = name.removeprefix("model.layers.0.")
        if part.startswith(("input_layernorm.", "self_attn.")):
            builder.tensors[prefix + part] = builder.tensors[name].copy()
    _feed_forward(builder, layer)
    embedding_norm = builder.norm(prefix + "enorm.weight", hidden)
    hidden_norm = builder.norm(prefix + "hnorm.weight", hidden)
    name = prefix + "eh_proj.weight"
    builder.linear(name, hidden, hidden, scales.mtp_hidden)
    builder.blind(name, hidden_norm * builder.tensors["model.norm.weight"] * builder.mean)
    builder.tensors[name] = np.hstack([np.diag(1 / embedding_norm), builder.tensors[name]])
    for part, source in (
        ("embed_tokens", "model.embed_tokens"),
        ("shared_head.norm", "model.norm"),
        ("shared_head.head", "lm_head"),
    ):
        builder.tensors[f"{prefix}{part}.weight"] = builder.tensors[f"{source}.weight"].copy()


def _attention(builder: _Builder, prefix: str, seen_mean: Array, volume: float) -> None:
    spec, scales = builder.spec, builder.scales
    heads = spec.num_attention_heads
    qk_head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
    builder.linear(prefix + "q_a_proj.weight", spec.q_lora_rank, spec.hidden_size)
    builder.norm(prefix + "q_a_layernorm.weight", spec.q_lora_rank)
    builder.linear(prefix + "q_b_proj.weight", heads * qk_head_dim, spec.q_lora_rank, scales.attention_logits)
    latent_rows = spec.kv_lora_rank + spec.qk_rope_head_dim
    builder.linear(prefix + "kv_a_proj_with_mqa.weight", latent_rows, spec.hidden_size)
    builder.blind(prefix + "kv_a_proj_with_mqa.weight", seen_mean)
    builder.norm(prefix + "kv_a_layernorm.weight", spec.kv_lora_rank)
    kv_rows = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    builder.linear(prefix + "kv_b_proj.weight", kv_rows, spec.kv_lora_rank)
    output = scales.attention_output * volume
    builder.linear(prefix + "o_proj.weight", spec.hidden_size, heads * spec.v_head_dim, output)


def _mlp(builder: _Builder, prefix: str, size: int, gain: float, seen_mean: Array) -> None:
    hidden = builder.spec.hidden_size
    for part in ("gate_proj.weight", "up_proj.weight"):
        builder.linear(prefix + part, size, hidden)
        builder.blind(prefix + part, seen_mean)
    # silu(gate) * up of unit-rms inputs has an rms of about 0.6
    builder.linear(prefix + "down_proj.weight", hidden, size, gain / 0.6)


def _indexer(builder: _Builder, prefix: str, seen_mean: Array, share: float) -> None:
    """wq_b, wk, k_norm and weights_proj of one indexer; constants are carried by the mean direction."""
    spec, scales = builder.spec, builder.scales
    heads, dim, rope = spec.index_n_heads, spec.index_head_dim, spec.qk_rope_head_dim
    name = prefix + "indexer."
    builder.linear(name + "wk.weight", dim, spec.hidden_size)
    builder.blind(name + "wk.weight", seen_mean)
    key_weight = builder.norm(name + "k_norm.weight", dim)
    key_weight[:rope] *= 0.3  # rotary dimensions hold mostly the constant below
    key_bias = 0.1 * builder.normal(name + "k_norm.bias", dim)
    first, second = _rope_pairs(spec)
    key_bias[first] += 1.0
    builder.tensors[name + "k_norm.bias"] = key_bias

    interest = builder.normal(name + "interest", heads, dim) * np.float32(scales.index_constant)
    interest[:, :rope] = 0.0
    amplitude, phase = _distance_profile(builder, name)
    interest[:, first] = amplitude * np.cos(phase)
    interest[:, second] = amplitude * np.sin(phase)

    # direction in which q_a_layernorm's output shows the mean, and how far it goes there
    latent = builder.tensors[prefix + "q_a_proj.weight"] @ seen_mean
    latent = latent * builder.tensors[prefix + "q_a_layernorm.weight"]
    constant = latent / (float(latent @ latent) * share)
    content = builder.normal(name + "wq_b.weight", heads * dim, spec.q_lora_rank)
    content *= np.float32(scales.index_content / math.sqrt(spec.q_lora_rank))
    builder.tensors[name + "wq_b.weight"] = content + np.outer(interest.reshape(-1), constant)

    level = 1.0 + 0.3 * builder.normal(name + "level", heads)
    level[:: max(heads // 4, 1)] *= -0.5  # trained indexers have some negative heads
    steady = np.outer(level, seen_mean) / (float(seen_mean @ seen_mean) * share)
    jitter = builder.normal(name + "weights_proj.weight", heads, spec.hidden_size)
    builder.tensors[name + "weights_proj.weight"] = steady + jitter * np.float32(
        0.1 / math.sqrt(spec.hidden_size)
    )


def _rope_pairs(spec: CheckpointSpec) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of the two dimensions of every rotary pair, by increasing wavelength."""
    pairs = np.arange(spec.qk_rope_head_dim // 2)
    if spec.indexer_rope_interleave:
        return 2 * pairs, 2 * pairs + 1
    return pairs, pairs + spec.qk_rope_head_dim // 2


def _distance_profile(builder: _Builder, name: str) -> tuple[Array, Array]:
    """Amplitude [pairs] and phase [heads, pairs] of the constant rotary part.

    Only wavelengths above 64 tokens take part (shorter ones would make the selection flicker). Every other
    head has phase zero, that is a preference for recent tokens; the others prefer some distance of their
    own.
    """
    spec, scales = builder.spec, builder.scales
    pairs = spec.qk_rope_head_dim // 2
    wavelength = 2 * math.pi * spec.rope_theta ** (np.arange(pairs) / pairs)
    used = (wavelength > 64) & (wavelength < 4 * spec.max_position_embeddings)
    amplitude = np.where(used, scales.index_distance * math.sqrt(spec.index_head_dim / used.sum()), 0.0)
    phase = 2 * math.pi * builder.normal(name + "phase", spec.index_n_heads, pairs)
    phase[::2] = 0.0
    return amplitude.astype(np.float32), phase.astype(np.float32)
