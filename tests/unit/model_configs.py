"""HF configs of real DSA models, reduced to the values that KV geometry depends on."""

from __future__ import annotations

from typing import Any


def glm_5_3(**changes: Any) -> dict[str, Any]:
    """GLM-5.2 and GLM-5.3: 78 layers, three of four reuse the choice of the one before."""
    full = {0, 1, 2, *range(6, 78, 4)}
    config: dict[str, Any] = {
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 78,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "indexer_types": ["full" if layer in full else "shared" for layer in range(78)],
        "index_topk_pattern": None,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
        "index_kpool": 1,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 1048576,
        "dtype": "bfloat16",
    }
    return config | changes


def deepseek_v3_2(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3.2: 61 layers, each with an indexer of its own."""
    config: dict[str, Any] = {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 163840,
        "torch_dtype": "bfloat16",
    }
    return config | changes
