"""The lightning indexer on CPU: paged key cache in the model's dtype, fp32 scores, deterministic top-k.

Scores follow the published model: ``sum_h w_h * relu(q_h . k)`` with ``w`` scaled by
``index_head_dim**-0.5 * index_n_heads**-0.5``; no FP8 anywhere, so results can be compared with
Hugging Face's fp32 implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvoffload.platforms.cpu.kernels import indexer_scores, select_topk
from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata, SparseMetadataBuilder
from vllm_kvoffload.sparse.step import StepBatch


class CPUIndexerBackend(AttentionBackend):  # type: ignore[misc]
    """Backend of the indexer's key cache: any block size, model dtype."""

    @staticmethod
    def get_name() -> str:
        return "KVOFFLOAD_CPU_INDEXER"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the indexer cache has no attention implementation of its own")

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder


class CPUIndexerCache(DeepseekV32IndexerCache):  # type: ignore[misc]
    """Key cache of one indexer, [num_blocks, block_size, index_head_dim]."""

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.head_dim,
            dtype=self.dtype,
            cache_role=SparseCacheRole.INDEXER,
        )

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CPUIndexerBackend


class CPUIndexer(Indexer):  # type: ignore[misc]
    """vLLM's indexer with this platform's forward. Parameters and their names stay vLLM's."""

    @staticmethod
    def adopt(indexer: Indexer) -> None:
        """Turns vLLM's instance, and its cache, into ours before any weight is loaded."""
        indexer.__class__ = CPUIndexer
        cache = indexer.k_cache
        cache.__class__ = CPUIndexerCache
        cache.head_dim = indexer.head_dim
        cache.dtype = get_current_vllm_config().model_config.dtype

    def forward(
        self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: Any
    ) -> torch.Tensor:
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        kw = self.wk_weights_proj(hidden_states)[0]
        k = self.k_norm(kw[:, : self.head_dim])
        rope = self.rope_dim
        q_pe, k_pe = rotary_emb(positions, q[..., :rope], k[:, :rope].unsqueeze(1))
        q = torch.cat([q_pe.reshape(-1, self.n_head, rope), q[..., rope:]], dim=-1)
        k = torch.cat([k_pe.reshape(-1, rope), k[:, rope:]], dim=-1)
        weights = kw[:, self.head_dim :].float() * (self.softmax_scale * self.n_head_scale)
        torch.ops.kvoffload.sparse_indexer(q, k, weights, self.topk_indices_buffer, self.k_cache.prefix)
        return self.topk_indices_buffer


def gather_keys(cache: torch.Tensor, batch: StepBatch, request: int) -> torch.Tensor:
    """[seq_len, D] keys of one request, from its blocks."""
    length = int(batch.seq_lens[request])
    blocks = batch.block_table[request, : -(-length // batch.block_size)].long()
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def sparse_indexer(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor, layer_name: str
) -> None:
    """Caches the step's keys and writes every query token's choice into ``topk_indices``.

    Args:
        q: [T, H, D]; k: [T, D]; weights: fp32 [T, H].
        topk_indices: int32 [max_tokens, K], rows 0..T-1 are written: request-local positions in
            ascending order, -1 padded.
        layer_name: name of the key cache layer in vLLM's forward context.
    """
    metadata, layer, _, slot_mapping = get_attention_context(layer_name)
    if metadata is None or slot_mapping is None:
        return  # profiling or compilation: there is no cache yet
    assert isinstance(metadata, SparseMetadata)
    batch = metadata.batch
    cache = layer.kv_cache
    tokens = slot_mapping.numel()
    cache[slot_mapping // batch.block_size, slot_mapping % batch.block_size] = k[:tokens].to(cache.dtype)
    topk = topk_indices.shape[1]
    for n in range(batch.num_requests):
        start, stop = int(batch.query_start_loc[n]), int(batch.query_start_loc[n + 1])
        if start == stop:
            continue
        first = int(batch.computed[n])
        out = topk_indices[start:stop]
        if batch.seq_lens[n] <= topk:
            scores = torch.empty((stop - start, int(batch.seq_lens[n])))  # all are chosen, no scores needed
        else:
            scores = indexer_scores(q[start:stop], weights[start:stop], gather_keys(cache, batch, n))
        select_topk(scores, first, topk, out)


def sparse_indexer_fake(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, topk_indices: torch.Tensor, layer_name: str
) -> None:
    return None


_LIBRARY = torch.library.Library("kvoffload", "FRAGMENT")
direct_register_custom_op(
    op_name="sparse_indexer",
    op_func=sparse_indexer,
    mutates_args=["topk_indices"],
    fake_impl=sparse_indexer_fake,
    target_lib=_LIBRARY,
    dispatch_key="CPU",
)
