"""Attention metadata of the CPU platform: one step's batch, for main attention and indexer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from vllm_kvoffload.sparse.step import StepBatch


@dataclass
class SparseMetadata(AttentionMetadata):
    """A :class:`StepBatch` in the form that vLLM's MLA layer expects.

    Every token takes the top-k path, so all are declared as decode tokens to vLLM.
    """

    batch: StepBatch
    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: None = None


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """Builds :class:`SparseMetadata` from vLLM's common metadata."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata:
        common = common_attn_metadata
        batch = StepBatch(
            query_start_loc=common.query_start_loc_cpu.numpy().astype("int32"),
            seq_lens=common.seq_lens.numpy().astype("int32"),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            block_size=self.kv_cache_spec.block_size,
        )
        tokens = common.num_actual_tokens
        return SparseMetadata(batch, tokens, common.num_reqs, tokens)
