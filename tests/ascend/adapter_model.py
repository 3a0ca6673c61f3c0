"""A tiny DSA model's attention layers on vllm-ascend's own code, with and without our offload."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm_ascend.attention import sfa_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata

from vllm_kvoffload.config import SparseOffloadConfig
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.ascend.attention import (
    KVOffloadSFAImpl,
    KVOffloadSFAMetadata,
    KVOffloadSFAMetadataBuilder,
)
from vllm_kvoffload.platforms.ascend.offload import AscendOffload
from vllm_kvoffload.platforms.ascend.rows import KernelRows, PortableRows, SparseCopyRows, SplitRows
from vllm_kvoffload.platforms.ascend.runner import bind_offload
from vllm_kvoffload.runtime import CpuRuntime, DelayPlan
from vllm_kvoffload.runtime.npu import NpuRuntime
from vllm_kvoffload.sparse.manager import SparseKVManager

from simulated_npu import SimulatedNpu, scatter_nd_update, serve_rows, sparse_copy  # isort: skip

HIDDEN, HEADS, Q_LORA, LATENT, ROPE, NOPE, VALUE = 48, 4, 32, 64, 16, 24, 24
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK, SLOTS, BLOCKS, MAX_LEN = 8, 32, 32, 16, 64, 24, 128
TYPES = ("full", "shared", "full", "shared")
CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": len(TYPES), "indexer_types": list(TYPES),
    "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "index_topk": TOPK, "index_head_dim": INDEX_DIM,
    "dtype": "float32",
}  # fmt: skip


class Linear:
    """[T, in] to ([T, out], None), as vLLM's linear layers."""

    def __init__(self, generator: torch.Generator, width: int, out: int) -> None:
        self.weight = torch.randn((out, width), generator=generator) / width**0.5

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None


class Norm:
    """RMS norm with a weight."""

    variance_epsilon = 1e-6

    def __init__(self, generator: torch.Generator, width: int) -> None:
        self.weight = 1 + 0.1 * torch.randn(width, generator=generator)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def make_impl(layer: int, buffer: torch.Tensor) -> KVOffloadSFAImpl:
    """A layer with random weights, the same ones every time. Its constructor needs a whole engine: left
    out.
    """
    g = torch.Generator().manual_seed(layer)
    owner = TYPES[layer] == "full"
    impl = object.__new__(KVOffloadSFAImpl)
    flags = (
        "enable_dsa_cp enable_sfa_prolog_v3 enable_mlapo enable_sp enable_dsa_cp_with_o_proj_tp "
        "is_kv_producer enable_dsa_cp_with_layer_shard enable_sparse_sfa_c8 enable_sparse_li_c8 "
        "is_rope_neox_style"
    )
    values: dict[str, Any] = {
        **dict.fromkeys(flags.split(), False),
        "layer_name": f"model.layers.{layer}.self_attn.attn", "layer_index": layer, "scale": 0.1,
        "num_kv_heads": 1, "local_num_heads": HEADS, "num_heads": HEADS, "q_lora_rank": Q_LORA,
        "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
        "qk_head_dim": NOPE + ROPE, "has_indexer": owner, "skip_topk": not owner, "use_index_cache": True,
        "topk_indices_buffer": buffer, "use_torch_npu_lightning_indexer": True, "n_head": INDEX_HEADS,
        "head_dim": INDEX_DIM, "fused_qkv_a_proj": Linear(g, HIDDEN, Q_LORA + LATENT + ROPE),
        "q_a_layernorm": Norm(g, Q_LORA), "kv_a_layernorm": Norm(g, LATENT),
        "q_proj": Linear(g, Q_LORA, HEADS * (NOPE + ROPE)), "o_proj": Linear(g, HEADS * VALUE, HIDDEN),
        "W_UK_T": torch.randn((HEADS, NOPE, LATENT), generator=g) / 5,
        "W_UV": torch.randn((HEADS, LATENT, VALUE), generator=g) / 8,
        "wk_weights_proj": Linear(g, HIDDEN, INDEX_DIM + INDEX_HEADS), "k_norm": Norm(g, INDEX_DIM),
        "wq_b": Linear(g, Q_LORA, INDEX_HEADS * INDEX_DIM),
    }  # fmt: skip
    for name, value in values.items():
        setattr(impl, name, value)
    return impl


def cos_and_sin(positions: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 1, 1, ROPE] each; stands for upstream's tables."""
    del use_cache
    angles = positions.float().unsqueeze(1) / 10000 ** (torch.arange(ROPE // 2) / (ROPE // 2))
    angles = torch.cat([angles, angles], dim=-1).view(-1, 1, 1, ROPE)
    return angles.cos(), angles.sin()


def make_builder() -> KVOffloadSFAMetadataBuilder:
    """A metadata builder whose constructor, which needs an engine, was left out."""
    builder = object.__new__(KVOffloadSFAMetadataBuilder)
    builder.kernel_block_size = BLOCK
    builder.enable_dsa_cp = False
    builder.metadata_cls = KVOffloadSFAMetadata
    builder.model_config = SimpleNamespace(get_head_size=lambda: LATENT + ROPE)
    builder.attn_mask_builder = SimpleNamespace(get_attention_mask=lambda *_: None)
    return builder


def common_metadata(step: dict[str, Any], pad: int) -> AscendCommonAttentionMetadata:
    """Upstream's real common metadata of a step, padded as for a graph."""
    starts = torch.tensor(step["starts"], dtype=torch.int32)
    tokens = int(starts[-1])
    return AscendCommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(step["lengths"], dtype=torch.int32),
        num_reqs=len(step["lengths"]),
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=max(step["lengths"]),
        block_table_tensor=step["blocks"],
        slot_mapping=torch.nn.functional.pad(step["slots"].to(torch.int32), (0, pad), value=-1),
        causal=True,
        positions=torch.nn.functional.pad(step["positions"], (0, pad)),
        attn_state=AscendAttentionState.ChunkedPrefill,
        num_input_tokens=tokens + pad,
    )


def make_step(requests: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """A step over requests "a", "b", ...: (tokens computed before, query tokens) each. Blocks are fixed."""
    starts, lengths, positions, slots, blocks = [0], [], [], [], []
    for name, (computed, queries) in requests.items():
        first = 1 + (ord(name) - ord("a")) * (MAX_LEN // BLOCK)
        table = torch.arange(first, first + MAX_LEN // BLOCK, dtype=torch.int32)
        where = torch.arange(computed, computed + queries)
        starts.append(starts[-1] + queries)
        lengths.append(computed + queries)
        positions.append(where)
        slots.append(table[where // BLOCK].long() * BLOCK + where % BLOCK)
        blocks.append(table)
    g = torch.Generator().manual_seed(sum(lengths) * 100 + starts[-1])
    hidden = torch.randn((starts[-1], HIDDEN), generator=g)
    return {
        "names": tuple(requests), "starts": starts, "lengths": lengths, "positions": torch.cat(positions),
        "slots": torch.cat(slots), "blocks": torch.stack(blocks), "hidden": hidden,
    }  # fmt: skip


class Adapter:
    """All layers. movement: how rows move with the offload; None is upstream without it."""

    def __init__(self, movement: str | None, seed: int | None = None) -> None:
        buffer = torch.zeros((96, TOPK), dtype=torch.int32)
        self.impls = [make_impl(layer, buffer) for layer in range(len(TYPES))]
        self.builder = make_builder()
        indexer = torch.zeros((BLOCKS, BLOCK, 1, INDEX_DIM))
        self.caches: list[tuple[torch.Tensor, ...]] = [
            (
                torch.zeros((BLOCKS, BLOCK, 1, LATENT)),
                torch.zeros((BLOCKS, BLOCK, 1, ROPE)),
                *([indexer.clone()] if kind == "full" else []),
            )
            for kind in TYPES
        ]
        self.names: tuple[str, ...] = ()
        self.offload: AscendOffload | None = None
        if movement is not None:
            self._offload(movement, seed)

    def _offload(self, movement: str, seed: int | None) -> None:
        geometry = KVGeometry.from_hf_config(CONFIG, layout="ascend")
        sizes = tuple(c.row_bytes for c in geometry.main_components)
        basics = (sizes, torch.float32, torch.device("cpu"), scatter_nd_update)
        kernels = SimpleNamespace(dsa_serve_rows=serve_rows)
        row_ops = {
            "portable": lambda: PortableRows(*basics),
            "sparse_copy": lambda: SparseCopyRows(*basics, sparse_copy),
            "kernels": lambda: KernelRows(*basics, kernels),
        }[movement]()
        host = []
        for latent, rope, *_ in self.caches:  # the same tuple positions, but host memory
            parts = [part.view(BLOCKS, BLOCK, -1).view(torch.uint8) for part in (latent, rope)]
            host.append(SplitRows(parts, [part.data_ptr() for part in parts]))
        delays = None if seed is None else DelayPlan(seed, max_ms=3)
        self.runtime = NpuRuntime(SimulatedNpu(), 0, CpuRuntime(delays))
        manager = SparseKVManager(
            geometry, SparseOffloadConfig(enabled=True, topk_buffer_size=SLOTS), max_num_seqs=2,
            max_model_len=MAX_LEN, prefill_buffers=2, host_layers=host, block_size=BLOCK,
            runtime=self.runtime, row_ops=row_ops,
        )  # fmt: skip
        self.offload = offload = object.__new__(AscendOffload)
        offload.geometry, offload.manager = geometry, manager
        offload._target = offload._draft = None
        offload._drafts = 0
        offload._req_ids = lambda: self.names
        for layer, impl in enumerate(self.impls):
            bind_offload(impl, offload, layer)

    def run(self, step: dict[str, Any], pad: int = 0) -> list[torch.Tensor]:
        """One step through upstream's forward; outputs of all layers, without padding."""
        self.names = step["names"]
        metadata = self.builder.build(0, common_metadata(step, pad))
        hidden = torch.nn.functional.pad(step["hidden"], (0, 0, 0, pad))
        outputs = []
        for impl, cache in zip(self.impls, self.caches, strict=True):
            output = torch.empty_like(hidden)
            impl.forward(impl.layer_name, hidden, cache, metadata, False, output)
            outputs.append(output[: len(step["hidden"])].clone())
            hidden = hidden + output  # layers see each other's results
        return outputs

    def run_all(self, steps: int | None = None) -> Iterator[list[torch.Tensor]]:
        """Outputs of STEPS, some of them padded: with other padding a projection rounds otherwise."""
        for number, step in enumerate(STEPS[:steps]):
            yield self.run(make_step(step), pad=number % 3)

    def close(self) -> None:
        if self.offload is not None:
            self.runtime.shutdown()


STEPS = [
    {"a": (0, 40), "b": (0, 25)},
    {"a": (40, 23), "b": (25, 1)},
    {"a": (63, 1), "b": (26, 1)},
    *({"a": (64 + n, 1), "b": (27 + n, 1)} for n in range(12)),
    {"b": (39, 1)},
    {"b": (40, 9), "a": (76, 1)},
]


def patch_tables(monkeypatch: Any) -> None:
    """Rope tables of this model instead of upstream's globals."""
    monkeypatch.setattr(sfa_v1, "get_cos_and_sin_mla", cos_and_sin)
