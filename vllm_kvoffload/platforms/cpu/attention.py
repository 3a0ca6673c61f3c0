"""Sparse MLA attention on CPU over the :class:`LayerKV` that the runner bound to the layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import AttentionBackend, MLAAttentionImpl
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvoffload.platforms.cpu.kernels import sparse_mla_attend
from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata, SparseMetadataBuilder
from vllm_kvoffload.sparse.step import LayerKV


class CPUSparseMLABackend(AttentionBackend):
    """Top-k attention over latent rows, for prefill and decode alike."""

    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "KVOFFLOAD_CPU_SPARSE_MLA"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)  # every layer's pages are one contiguous array of rows

    @staticmethod
    def get_impl_cls() -> type[CPUSparseMLAImpl]:
        return CPUSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True


class CPUSparseMLAImpl(MLAAttentionImpl[SparseMetadata], SharedTopkIndicesBuffer):
    """Absorbed MLA: queries in the latent space, keys and values from selected rows."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_args: Any,
    ) -> None:
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap is not None:
            raise NotImplementedError("CPU sparse MLA supports neither ALiBi, sliding windows nor soft caps")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_args["kv_lora_rank"]
        self.kv: LayerKV | None = None  # bound by the runner after the caches are created
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Does nothing: indexer and attention run on one stream here."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        if self.kv is None:
            return  # profiling: no cache is bound yet
        tokens = slot_mapping.numel()
        rows = torch.cat([kv_c_normed[:tokens], k_pe[:tokens].flatten(1)], dim=-1)
        self.kv.append(rows, slot_mapping)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        assert self.kv is not None
        assert self.topk_indices_buffer is not None
        topk = self.topk_indices_buffer[: q.shape[0]]
        out = q.new_empty((q.shape[0], self.num_heads, self.kv_lora_rank))
        for part in self.kv.parts(topk, attn_metadata.batch):
            out[part.tokens] = sparse_mla_attend(
                q[part.tokens], part.rows, part.indices, self.scale, self.kv_lora_rank
            )
        return out, None
