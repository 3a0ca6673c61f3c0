"""A model runner of ours without a model, on vllm-ascend's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention import MLAAttention
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.attention.sfa_v1 import AscendSFABackend

from vllm_kvoffload.platforms.ascend.attention import KVOffloadSFAImpl
from vllm_kvoffload.platforms.ascend.runner import KVOffloadNPUModelRunner


def make_layer(latent: int, rope: int) -> MLAAttention:
    """An attention layer without weights."""
    layer = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(layer)
    layer.kv_lora_rank, layer.qk_rope_head_dim = latent, rope
    layer.impl = object.__new__(KVOffloadSFAImpl)
    return layer


def make_runner(config: Any, caches: KVCacheConfig) -> KVOffloadNPUModelRunner:
    """A runner without a model: its constructor needs an NPU."""
    runner = object.__new__(KVOffloadNPUModelRunner)
    names = caches.kv_cache_groups[0].layer_names
    specs = caches.kv_cache_groups[0].kv_cache_spec.kv_cache_specs
    layers = {name: make_layer(*specs[name].sparse_head_dim[:2]) for name in names}
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    groups = [AttentionGroup(AscendSFABackend, [name], specs[name], 0) for name in names]
    values = {
        "vllm_config": config, "device": torch.device("cpu"), "use_sparse": True, "use_compress": False,
        "use_hybrid_blocks": False, "runner_only_attn_layers": set(), "attn_groups": [groups],
        "attn_backend": AscendSFABackend, "shared_kv_cache_layers": {}, "model_config": config.model_config,
        "kv_caches": [], "kv_cache_config": caches, "enable_hamming_sparse": False,
        "compilation_config": config.compilation_config,
        "cache_config": config.cache_config, "kernel_block_sizes": [config.cache_config.block_size],
        "input_batch": SimpleNamespace(req_ids=[]),
    }  # fmt: skip
    values.update(c8_k_cache_dtype=torch.int8, c8_k_scale_cache_dtype=torch.float16)
    for name, value in values.items():
        setattr(runner, name, value)
    return runner
