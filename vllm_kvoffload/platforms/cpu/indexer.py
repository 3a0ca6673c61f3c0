"""The lightning indexer on CPU: paged key cache in the model's dtype, fp32 scores, deterministic top-k.

Scores follow the published model: ``sum_h w_h * relu(q_h . k)`` with ``w`` scaled by
``index_head_dim**-0.5 * index_n_heads**-0.5``; no FP8 anywhere, so results can be compared with
Hugging Face's fp32 implementation.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvoffload.platforms.cpu.kernels import indexer_scores, select_topk
from vllm_kvoffload.platforms.cpu.layer_loads import await_layer
from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata, SparseMetadataBuilder
from vllm_kvoffload.sparse.step import StepBatch


class CPUIndexerBackend(AttentionBackend):
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


class CPUIndexerCache(DeepseekV32IndexerCache):
    """Key cache of one indexer, [num_blocks, block_size, index_head_dim].

    Ops can find the cache by name, so it also holds a reference to its MLA layer.
    """

    owner: weakref.ref[MultiHeadLatentAttentionWrapper]

    @property
    def mla(self) -> MultiHeadLatentAttentionWrapper:
        """The layer whose indexer fills this cache."""
        mla = self.owner()
        assert mla is not None
        return mla

    @property
    def topk_indices(self) -> torch.Tensor:
        """int32 [max_tokens, K], shared with attention. vLLM may replace that of a loaded draft model."""
        assert self.mla.indexer is not None
        buffer = self.mla.indexer.topk_indices_buffer
        assert isinstance(buffer, torch.Tensor)
        return buffer

    @property
    def topk_is_frozen(self) -> bool:
        """Whether a later draft of a step reuses the first one's top-k indices, already in the buffer."""
        return bool(self.mla.skip_topk)

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


class CPUIndexer(Indexer):
    """vLLM's indexer with this platform's forward. Parameters and their names are unchanged."""

    @staticmethod
    def adopt(mla: MultiHeadLatentAttentionWrapper) -> None:
        """Changes the class of an MLA layer's indexer and its cache to ours, before weights are loaded."""
        indexer = mla.indexer
        assert isinstance(indexer, Indexer)
        indexer.__class__ = CPUIndexer
        cache = indexer.k_cache
        cache.__class__ = CPUIndexerCache
        assert isinstance(cache, CPUIndexerCache)
        dtype = get_current_vllm_config().model_config.dtype
        assert isinstance(dtype, torch.dtype)
        cache.head_dim = indexer.head_dim
        cache.dtype = dtype
        cache.owner = weakref.ref(mla)

    def forward(  # type: ignore[override]  # called only by our MLA layer
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
        k_pe: torch.Tensor,
    ) -> torch.Tensor:
        """Writes the top-k indices to the shared buffer; returns ``k_pe``, which must not be used before
        that."""
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        kw = self.wk_weights_proj(hidden_states)[0]
        k = self.k_norm(kw[:, : self.head_dim])
        rope = self.rope_dim
        q_rope, k_rope = rotary_emb(positions, q[..., :rope], k[:, :rope].unsqueeze(1))
        q = torch.cat([q_rope.reshape(-1, self.n_head, rope), q[..., rope:]], dim=-1)
        k = torch.cat([k_rope.reshape(-1, rope), k[:, rope:]], dim=-1)
        weights = kw[:, self.head_dim :].float() * (self.softmax_scale * self.n_head_scale)
        ordered: torch.Tensor = torch.ops.kvoffload.sparse_indexer(q, k, weights, k_pe, self.prefix)
        return ordered


def gather_keys(cache: torch.Tensor, batch: StepBatch, request: int) -> torch.Tensor:
    """Gathers the keys [seq_len, D] of one request from its blocks."""
    length = int(batch.seq_lens[request])
    blocks = batch.block_table[request, : -(-length // batch.block_size)].long()
    return cache.index_select(0, blocks).flatten(0, 1)[:length]


def sparse_indexer(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, k_pe: torch.Tensor, prefix: str
) -> torch.Tensor:
    """Caches the step's keys and writes every query token's top-k indices to the indexer's shared buffer.

    The buffer, int32 [max_tokens, K], receives request-local positions in ascending order, padded with -1.

    Args:
        q: [T, H, D]; k: [T, D]; weights: fp32 [T, H].
        k_pe: any tensor that attention reads; a copy is returned (see the ``mla`` module).
        prefix: the indexer's name, by which its cache is found in vLLM's forward context.
    """
    metadata, layer, _, slot_mapping = get_attention_context(f"{prefix}.k_cache")
    if metadata is None or slot_mapping is None:
        return k_pe.clone(memory_format=torch.contiguous_format)  # profiling: there is no cache yet
    assert isinstance(metadata, SparseMetadata)
    assert isinstance(layer, CPUIndexerCache)
    if not layer.topk_is_frozen:
        await_layer(prefix)
        cache = layer.kv_cache
        rows = cache.view(-1, cache.shape[-1])
        rows.index_copy_(0, slot_mapping, k[: slot_mapping.numel()].to(cache.dtype))
        write_topk(q, weights, cache, metadata.batch, layer.topk_indices)
    return k_pe.clone(memory_format=torch.contiguous_format)


def write_topk(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, batch: StepBatch, topk_indices: torch.Tensor
) -> None:
    """Writes the top-k indices of a step's query tokens to the first T rows of ``topk_indices``."""
    topk, computed = topk_indices.shape[1], batch.computed
    for n in range(batch.num_requests):
        start, stop = int(batch.query_start_loc[n]), int(batch.query_start_loc[n + 1])
        if start == stop:
            continue
        if batch.seq_lens[n] <= topk:
            scores = torch.empty((stop - start, int(batch.seq_lens[n])))  # all are selected
        else:
            scores = indexer_scores(q[start:stop], weights[start:stop], gather_keys(cache, batch, n))
        select_topk(scores, int(computed[n]), topk, topk_indices[start:stop])


def sparse_indexer_fake(
    q: torch.Tensor,  # noqa: ARG001
    k: torch.Tensor,  # noqa: ARG001
    weights: torch.Tensor,  # noqa: ARG001
    k_pe: torch.Tensor,
    prefix: str,  # noqa: ARG001
) -> torch.Tensor:
    """Shape function of :func:`sparse_indexer` for torch.compile."""
    return k_pe.new_empty(k_pe.shape)


_LIBRARY = torch.library.Library("kvoffload", "FRAGMENT")  # type: ignore[no-untyped-call]
direct_register_custom_op(
    op_name="sparse_indexer",
    op_func=sparse_indexer,
    fake_impl=sparse_indexer_fake,
    target_lib=_LIBRARY,
    dispatch_key="CPU",
)
