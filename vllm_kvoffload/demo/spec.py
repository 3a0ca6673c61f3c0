"""The inputs that determine a demo checkpoint: the model's shape and the seed of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointSpec:
    """Everything that determines a checkpoint's bytes. Sizes in elements, lengths in tokens.

    `layer_pattern` has one letter per layer: F runs an indexer, S reuses the top-k indices of the last F
    before it. It is written to config.json under the key that `sharing_key` names. `model_type` "deepseek_v3"
    is plain MLA: it has no indexer and no `index_topk`, and its pattern counts layers only.

    `num_mtp_layers` layers that predict the token after the next one follow the pattern's. They make drafts
    that are right now and then; for that, the outputs of the model's own layers are smaller than in a
    checkpoint without MTP. With `mtp_index_share` an engine makes all drafts of a step with the first one's
    top-k indices.
    """

    model_type: Literal["glm_moe_dsa", "deepseek_v32", "deepseek_v3"] = "glm_moe_dsa"
    layer_pattern: str = "FFSSFS"
    sharing_key: Literal["indexer_types", "index_topk_pattern"] = "indexer_types"
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    vocab_size: int = 2048
    max_position_embeddings: int = 32768
    hidden_size: int = 256
    num_attention_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 32
    index_topk: int = 256
    index_n_heads: int = 32
    index_head_dim: int = 64
    num_dense_layers: int = 1
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    rope_theta: float = 10000.0
    num_mtp_layers: int = 0
    mtp_index_share: bool = False

    def __post_init__(self) -> None:
        pattern = self.layer_pattern
        if not pattern or set(pattern) - {"F", "S"} or pattern[0] != "F":
            raise ValueError(f"layer_pattern: {pattern!r} must be letters F and S and begin with F")
        if "S" in pattern and self.model_type != "glm_moe_dsa":
            raise ValueError(f"layer_pattern: {self.model_type} has no shared layers, got {pattern!r}")
        if not 0 < self.num_dense_layers <= self.num_layers:
            raise ValueError(f"num_dense_layers: {self.num_dense_layers} must lie in 1..{self.num_layers}")
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError(
                f"qk_rope_head_dim: {self.qk_rope_head_dim} must be even and at most index_head_dim "
                f"({self.index_head_dim})"
            )
        if self.num_mtp_layers < 0:
            raise ValueError(f"num_mtp_layers: {self.num_mtp_layers} must not be negative")
        if self.mtp_index_share and (not self.num_mtp_layers or self.model_type != "glm_moe_dsa"):
            raise ValueError("mtp_index_share: needs MTP layers and model_type glm_moe_dsa")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers, MTP layers not counted."""
        return len(self.layer_pattern)

    @property
    def has_indexer(self) -> bool:
        """Whether the model is a DSA model."""
        return self.model_type != "deepseek_v3"

    @property
    def indexer_rope_interleave(self) -> bool:
        """GLM rotates pairs (2i, 2i+1) in the indexer, DeepSeek-V3.2 pairs (i, i + half)."""
        return self.model_type == "glm_moe_dsa"
