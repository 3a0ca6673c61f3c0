"""Out-of-tree MLA layer: runs a model's indexer on CPU, in an order that torch.compile cannot change.

vLLM's own ``Indexer`` quantises to FP8 with a Triton-only kernel. Its weights and names are kept; only the
class of two instances (indexer and cache) is replaced, so that forward, cache spec and backend are ours.

The indexer passes its top-k indices to attention through a buffer that the compiled graph does not know as
an input of attention. Inductor may move or copy back a mutation without a reader in the graph, so the
indexer op returns the layer's rope keys, which attention does read: this dependency fixes the order.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import Indexer

from vllm_kvoffload.platforms.cpu.indexer import CPUIndexer

LAYER = "MultiHeadLatentAttentionWrapper"


class CPUMultiHeadLatentAttention(MultiHeadLatentAttentionWrapper):
    """vLLM's MLA layer whose indexer, if it has one, is a :class:`CPUIndexer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(self.indexer, Indexer):
            CPUIndexer.adopt(self)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden_size] to [T, hidden_size]. Layers without an indexer run vLLM's code.

        An MTP layer's `skip_topk` changes between the drafts of a step. The indexer op reads it: a branch
        here would be fixed when the model is compiled.
        """
        if self.indexer is None or self.q_lora_rank is None or llama_4_scaling is not None:
            return super().forward(positions, hidden_states, llama_4_scaling)
        assert self.fused_qkv_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        assert self.rotary_emb is not None
        widths = [self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim]
        q_latent, kv_latent, k_pe = self.fused_qkv_a_proj(hidden_states)[0].split(widths, dim=-1)
        q_latent = self.q_a_layernorm(q_latent)
        kv_latent = self.kv_a_layernorm(kv_latent)
        q = self.q_b_proj(q_latent)[0].view(-1, self.num_heads, self.qk_head_dim)
        q_nope, q_pe = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_pe, k_pe = self.rotary_emb(positions, q_pe, k_pe.unsqueeze(1))
        k_pe = self.indexer(hidden_states, q_latent, positions, self.indexer_rope_emb, k_pe)
        heads = self.mla_attn(
            torch.cat([q_nope, q_pe], dim=-1),
            kv_latent,
            k_pe,
            output_shape=(hidden_states.shape[0], self.num_heads * self.v_head_dim),
        )
        projected: torch.Tensor = self.o_proj(heads)[0]
        return projected


def register_mla_layer() -> None:
    """Registers the layer once per process."""
    if LAYER not in op_registry_oot:
        PluggableLayer.register_oot(CPUMultiHeadLatentAttention, name=LAYER)
