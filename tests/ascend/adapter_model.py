"""A tiny DSA model's attention layers on vllm-ascend's own code, with and without our offload.

Layers with and without an indexer, an MTP layer, heads shared by TP ranks; in fp32 or BF16; in memory that
behaves as a device's or in plain memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm_ascend.attention import sfa_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.attention.utils import AscendCommonAttentionMetadata
from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.ascend.attention import (
    KVOffloadSFAImpl,
    KVOffloadSFAMetadata,
    KVOffloadSFAMetadataBuilder,
)
from vllm_kvoffload.platforms.ascend.delivery import device_planning
from vllm_kvoffload.platforms.ascend.graphs import decode_graphs
from vllm_kvoffload.platforms.ascend.kernels import KernelRows
from vllm_kvoffload.platforms.ascend.offload import AscendOffload
from vllm_kvoffload.platforms.ascend.rows import PortableRows, SparseCopyRows, SplitRows
from vllm_kvoffload.platforms.ascend.runner import bind_offload
from vllm_kvoffload.runtime import CPURuntime, DelayPlan
from vllm_kvoffload.runtime.npu import NPURuntime
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.manager import SparseKVManager

from tests.ascend.simulated_device import NPU, device_op, on_npu, plain  # isort: skip
from tests.ascend.simulated_npu import SimulatedNPU, scatter_nd_update, sparse_copy  # isort: skip

HIDDEN, HEADS, Q_LORA, LATENT, ROPE, NOPE, VALUE = 48, 4, 32, 64, 16, 24, 24
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK, SLOTS, BLOCKS, MAX_LEN = 8, 32, 32, 16, 64, 24, 128
TYPES = ("full", "shared", "full", "shared")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """A run.

    movement: how rows move with the offload: "portable", "sparse_copy", or the kernels' stand-in; None is
    upstream without it. seed: of the delays of side streams. drafts: draft tokens, with an MTP layer behind
    the others. slots: of a hot row. kinds: which layers choose for themselves. seqs: most requests.
    """

    movement: str | None = None
    seed: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    delivery: str = "in_place"
    drafts: int = 0
    slots: int = SLOTS
    kernels: Callable[[SimulatedNPU], Any] | None = None
    kinds: tuple[str, ...] = TYPES
    seqs: int = 2

    @property
    def types(self) -> tuple[str, ...]:
        return (*self.kinds, "full") if self.drafts else self.kinds

    @property
    def geometry(self) -> KVGeometry:
        config = {
            "model_type": "glm_moe_dsa", "num_hidden_layers": len(TYPES), "indexer_types": list(self.kinds),
            "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "index_topk": TOPK, "index_head_dim": INDEX_DIM,
            "dtype": str(self.dtype).split(".")[1], "num_nextn_predict_layers": 1,
        }  # fmt: skip
        return KVGeometry.from_hf_config(
            config, layout="ascend", num_speculative_tokens=self.drafts, mtp=bool(self.drafts)
        )

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Onto the device."""
        return on_npu(tensor) if self.device is NPU else tensor


class Ranks:
    """TP ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._parts: list[Any] = [None] * size

    def barrier(self) -> None:
        self._barrier.wait()

    def all_reduce(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in their order on all of them."""
        self._parts[rank] = part
        self.barrier()
        total = self._parts[0]
        for other in self._parts[1:]:
            total = total + other
        self.barrier()
        return total


ALONE = Ranks(1)


class Linear:
    """[T, in] to ([T, out], None), as vLLM's linear layers. reduce: over the ranks, None without."""

    def __init__(
        self, weight: torch.Tensor, reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.weight = weight
        self._reduce = reduce

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = x @ self.weight.T
        return (out if self._reduce is None else self._reduce(out)), None


class Norm:
    """RMS norm with a weight."""

    variance_epsilon = 1e-6

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x.float() * scale).to(x.dtype) * self.weight


def make_impl(
    layer: int, buffer: torch.Tensor, setup: Setup, rank: int = 0, ranks: Ranks = ALONE
) -> KVOffloadSFAImpl:
    """A layer with random weights, the same ones every time, with this rank's heads. Its constructor needs a
    whole engine: left out.
    """
    g = torch.Generator().manual_seed(layer)

    def weight(out: int, width: int) -> torch.Tensor:
        return torch.randn((out, width), generator=g) / width**0.5

    def norm(width: int) -> Norm:
        return Norm(setup.put((1 + 0.1 * torch.randn(width, generator=g)).to(setup.dtype)))

    def linear(tensor: torch.Tensor, reduce: Any = None) -> Linear:
        return Linear(setup.put(tensor.to(setup.dtype).contiguous()), reduce)

    heads = HEADS // ranks.size
    mine = slice(rank * heads, (rank + 1) * heads)
    reduce = (lambda part: ranks.all_reduce(rank, part)) if ranks.size > 1 else None
    qkv, q_norm, kv_norm = weight(Q_LORA + LATENT + ROPE, HIDDEN), norm(Q_LORA), norm(LATENT)
    q = weight(HEADS * (NOPE + ROPE), Q_LORA).view(HEADS, NOPE + ROPE, Q_LORA)[mine].flatten(0, 1)
    o = weight(HIDDEN, HEADS * VALUE).view(HIDDEN, HEADS, VALUE)[:, mine].flatten(1)
    up_k, up_v = torch.randn((HEADS, NOPE, LATENT), generator=g) / 5, torch.randn(
        (HEADS, LATENT, VALUE), generator=g
    ) / 8  # fmt: skip
    owner = setup.types[layer] == "full"
    impl = object.__new__(KVOffloadSFAImpl)
    flags = (
        "enable_dsa_cp enable_sfa_prolog_v3 enable_mlapo enable_sp enable_dsa_cp_with_o_proj_tp "
        "is_kv_producer enable_dsa_cp_with_layer_shard enable_sparse_sfa_c8 enable_sparse_li_c8 "
        "is_rope_neox_style"
    )
    values: dict[str, Any] = {
        **dict.fromkeys(flags.split(), False),
        "layer_name": f"model.layers.{layer}.self_attn.attn", "layer_index": layer, "scale": 0.1,
        "num_kv_heads": 1, "local_num_heads": heads, "num_heads": heads, "q_lora_rank": Q_LORA,
        "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE,
        "qk_head_dim": NOPE + ROPE, "has_indexer": owner, "skip_topk": not owner, "use_index_cache": True,
        "topk_indices_buffer": buffer, "use_torch_npu_lightning_indexer": True, "n_head": INDEX_HEADS,
        "head_dim": INDEX_DIM, "fused_qkv_a_proj": linear(qkv), "q_a_layernorm": q_norm,
        "kv_a_layernorm": kv_norm, "q_proj": linear(q), "o_proj": linear(o, reduce),
        "W_UK_T": setup.put(up_k[mine].to(setup.dtype)), "W_UV": setup.put(up_v[mine].to(setup.dtype)),
        "wk_weights_proj": linear(weight(INDEX_DIM + INDEX_HEADS, HIDDEN)), "k_norm": norm(INDEX_DIM),
        "wq_b": linear(weight(INDEX_HEADS * INDEX_DIM, Q_LORA)),
    }  # fmt: skip
    for name, value in values.items():
        setattr(impl, name, value)
    return impl


def cos_and_sin(positions: torch.Tensor, use_cache: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, 1, 1, ROPE] each; stands for upstream's tables."""
    del use_cache
    where = plain(positions).float().unsqueeze(1)
    angles = where / 10000 ** (torch.arange(ROPE // 2) / (ROPE // 2))
    angles = torch.cat([angles, angles], dim=-1).view(-1, 1, 1, ROPE)
    tables = angles.cos(), angles.sin()
    return tuple(map(on_npu, tables)) if positions.device == NPU else tables  # type: ignore[return-value]


def make_builder() -> KVOffloadSFAMetadataBuilder:
    """A metadata builder whose constructor, which needs an engine, was left out."""
    builder = object.__new__(KVOffloadSFAMetadataBuilder)
    builder.kernel_block_size = BLOCK
    builder.enable_dsa_cp = False
    builder.metadata_cls = KVOffloadSFAMetadata
    builder.model_config = SimpleNamespace(get_head_size=lambda: LATENT + ROPE)
    builder.attn_mask_builder = SimpleNamespace(get_attention_mask=lambda *_: None)
    return builder


def make_proposer(builder: KVOffloadSFAMetadataBuilder, setup: Setup) -> Any:
    """Upstream's proposer as far as it makes the metadata of a step's later draft passes."""
    proposer: Any = object.__new__(AscendSpecDecodeBaseProposer)
    group = SimpleNamespace(get_metadata_builder=lambda: builder)
    count = setup.drafts + 1

    def buffers(size: int) -> list[torch.Tensor]:
        return [setup.put(torch.zeros(size, dtype=torch.int32)) for _ in range(count)]

    values = {
        "method": "mtp", "uses_mrope": False, "max_model_len": MAX_LEN, "has_gdn": False, "block_size": BLOCK,
        "runner": SimpleNamespace(), "use_compress": False, "draft_attn_groups": [group],
        "arange": setup.put(torch.arange(9, dtype=torch.int32)),
        "token_arange_np": torch.arange(9, dtype=torch.int32).numpy(), "slot_mapping_group": buffers(96),
        "seq_lens_group": buffers(8), "query_start_loc_group": buffers(9),
    }  # fmt: skip
    proposer.__dict__.update(values)
    return proposer


def common_metadata(step: dict[str, Any], pad: int, setup: Setup) -> AscendCommonAttentionMetadata:
    """Upstream's real common metadata of a step, padded as for a graph."""
    starts = torch.tensor(step["starts"], dtype=torch.int32)
    tokens = int(starts[-1])
    lengths = torch.tensor(step["lengths"], dtype=torch.int32)
    slots = torch.nn.functional.pad(step["slots"].to(torch.int32), (0, pad), value=-1)
    return AscendCommonAttentionMetadata(
        query_start_loc=setup.put(starts),
        query_start_loc_cpu=starts.clone(),
        seq_lens=setup.put(lengths),
        num_reqs=len(step["lengths"]),
        num_actual_tokens=tokens,
        max_query_len=int(starts.diff().max()),
        max_seq_len=max(step["lengths"]),
        block_table_tensor=setup.put(step["blocks"]),
        slot_mapping=setup.put(slots),
        causal=True,
        positions=setup.put(torch.nn.functional.pad(step["positions"], (0, pad))),
        attn_state=AscendAttentionState.ChunkedPrefill,
        num_input_tokens=tokens + pad,
        _seq_lens_cpu=lengths.clone(),
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


def forward_context(metadata: dict[str, Any], drafts: Sequence[dict[str, Any]] = ()) -> Any:
    """Upstream's forward context as far as a pass without graphs looks at it."""
    return SimpleNamespace(
        attn_metadata=metadata, draft_attn_metadatas=drafts, cudagraph_runtime_mode=CUDAGraphMode.NONE
    )


class Adapter:
    """All layers of a rank. host: the host pool of rank 0, for the others."""

    def __init__(
        self, setup: Setup, rank: int = 0, ranks: Ranks = ALONE, host: Sequence[SplitRows] | None = None
    ) -> None:
        self.setup, self.npu = setup, SimulatedNPU()
        buffer = setup.put(torch.zeros((96, TOPK), dtype=torch.int32))
        layers = range(len(setup.types))
        self.impls = [make_impl(layer, buffer, setup, rank, ranks) for layer in layers]
        # As upstream has them: one for the layers with an indexer, one for those without.
        self.builders = {kind: make_builder() for kind in ("full", "shared")}
        self.proposer = make_proposer(self.builders["full"], setup)
        self.caches = [self._caches(kind) for kind in setup.types]
        self.names: tuple[str, ...] = ()
        self.watch: Callable[[str], None] = lambda _: None
        self.offload: AscendOffload | None = None
        if setup.movement is not None:
            self._offload(rank, ranks, host)

    def _caches(self, kind: str) -> tuple[torch.Tensor, ...]:
        """(latent, rope[, indexer key]); with the offload the first two are host memory."""
        setup = self.setup
        main = [torch.zeros((BLOCKS, BLOCK, 1, width), dtype=setup.dtype) for width in (LATENT, ROPE)]
        keys = [torch.zeros((BLOCKS, BLOCK, 1, INDEX_DIM), dtype=setup.dtype)] if kind == "full" else []
        if setup.movement is None:
            return tuple(map(setup.put, (*main, *keys)))
        return (*main, *map(setup.put, keys))

    def _offload(self, rank: int, ranks: Ranks, host: Sequence[SplitRows] | None) -> None:
        setup = self.setup
        geometry = setup.geometry
        config = SparseOffloadConfig(
            enabled=True, topk_buffer_size=setup.slots, delivery=setup.delivery, policy="rrip"
        )
        sizes = tuple(c.row_bytes for c in geometry.main_components)
        basics = (sizes, setup.dtype, setup.device, device_op(scatter_nd_update))
        copies = setup.movement == "sparse_copy"
        self.kernels = setup.kernels(self.npu) if setup.kernels is not None else None
        row_ops = PortableRows(*basics)
        if copies:
            row_ops = SparseCopyRows(*basics, device_op(sparse_copy))
        elif self.kernels is not None:
            row_ops = KernelRows(*basics, self.kernels)
        if host is None:
            host = []
            for latent, rope, *_ in self.caches:  # the same tuple positions, but host memory
                parts = [part.view(BLOCKS, BLOCK, -1).view(torch.uint8) for part in (latent, rope)]
                host.append(SplitRows(parts, [part.data_ptr() for part in parts]))
        self.host = host
        delays = None if setup.seed is None else DelayPlan(setup.seed, max_ms=3)
        self.runtime = NPURuntime(self.npu, 0, CPURuntime(delays))
        planning = None
        if self.kernels is not None:
            planning = device_planning(self.kernels, setup.device, geometry, config, MAX_LEN // BLOCK)
        try:
            manager = SparseKVManager(
                geometry, config, max_num_seqs=setup.seqs, max_model_len=MAX_LEN, prefill_buffers=2,
                host_layers=list(host), block_size=BLOCK, runtime=self.runtime, row_ops=row_ops,
                planning=planning, writer=rank == 0, barrier=ranks.barrier if ranks.size > 1 else None,
            )  # fmt: skip
        except ConfigError:
            self.runtime.shutdown()
            raise
        self.offload = offload = object.__new__(AscendOffload)
        offload.manager, offload.graphs = manager, decode_graphs(manager)
        for layer, impl in enumerate(self.impls):
            bind_offload(impl, offload, layer)

    @property
    def manager(self) -> SparseKVManager:
        assert self.offload is not None
        return self.offload.manager

    def target(self, metadata: dict[str, Any], hidden: torch.Tensor, count: int) -> list[torch.Tensor]:
        """The target's forward pass with metadata by kind of layer; outputs of all layers."""
        with self.target_pass(forward_context(metadata)):
            return self._forward(range(len(TYPES)), hidden, metadata, count)

    def target_pass(self, context: Any) -> AbstractContextManager[None]:
        """What the runner opens around it."""
        return nullcontext() if self.offload is None else self.offload.target_pass(context, self.names)

    def run(self, step: dict[str, Any], pad: int = 0) -> list[torch.Tensor]:
        """One step through upstream's forward; outputs of all layers, without padding."""
        self.names = step["names"]
        self.common = common_metadata(step, pad, self.setup)
        metadata = {kind: builder.build(0, self.common) for kind, builder in self.builders.items()}
        hidden = torch.nn.functional.pad(step["hidden"], (0, 0, 0, pad)).to(self.setup.dtype)
        return self.target(metadata, self.setup.put(hidden), len(step["hidden"]))

    def _forward(
        self, layers: range, hidden: torch.Tensor, metadata: dict[str, Any], count: int
    ) -> list[torch.Tensor]:
        outputs = []
        self.watch("prepared")
        for layer in layers:
            output = torch.empty_like(hidden)
            impl, given = self.impls[layer], metadata[self.setup.types[layer]]
            impl.forward(impl.layer_name, hidden, self.caches[layer], given, False, output)
            self.watch(f"layer {layer}")
            outputs.append(output)
            hidden = hidden + output  # layers see each other's results
        return [plain(output)[:count].clone() for output in outputs]

    def draft(self, step: dict[str, Any], rejected: Sequence[int], pad: int = 0) -> list[torch.Tensor]:
        """Runs the draft passes after a step with `rejected` drafts rejected; returns the MTP layer's
        outputs."""
        setup, mtp, builder = self.setup, range(len(TYPES), len(TYPES) + 1), self.builders["full"]
        common, count = self.common, len(step["names"])
        common = replace(common, seq_lens=common.seq_lens.clone(), slot_mapping=common.slot_mapping.clone())
        metadata = [builder.build(0, common)]
        last = torch.tensor(step["starts"][1:]) - 1 - torch.tensor(rejected)
        positions = setup.put(step["positions"][last].clone())
        for index in range(1, setup.drafts):
            common, made = self.proposer.attn_update_stack_num_spec_norm(
                index, metadata[-1], common, count, count + pad, positions, CUDAGraphMode.NONE,
                attn_group=self.proposer.draft_attn_groups[0],
            )  # fmt: skip
            if self.offload is None:  # upstream counts the rejected drafts, see the builder
                made.seq_lens = torch.minimum(made.seq_lens, (common.positions[:count] + 1).to(torch.int32))
            metadata.append(made)
        outputs = []
        passes = [{"full": made} for made in metadata]
        for index, made in enumerate(metadata):
            tokens = int(made.num_actual_tokens)
            g = torch.Generator().manual_seed(sum(step["lengths"]) + 1000 * index)
            hidden = torch.randn((made.num_input_tokens, HIDDEN), generator=g).to(setup.dtype)
            context = forward_context(passes[index], passes)
            with nullcontext() if self.offload is None else self.offload.draft_pass(context, self.names):
                outputs += self._forward(mtp, setup.put(hidden), passes[index], tokens)
        return outputs

    def run_all(self, steps: int | None = None) -> Iterator[list[torch.Tensor]]:
        """Outputs of STEPS, some of them padded: with other padding a projection rounds otherwise."""
        for number, step in enumerate(STEPS[:steps]):
            yield self.run(make_step(step), pad=number % 3)

    def run_drafting(self) -> Iterator[list[torch.Tensor]]:
        """Outputs of DRAFTED with their draft passes, target layers first."""
        for number, (step, rejected) in enumerate(drafted(self.setup.drafts)):
            made, pad = make_step(step), number % 3
            yield [*self.run(made, pad), *self.draft(made, rejected, pad)]

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


def drafted(count: int) -> Iterator[tuple[dict[str, tuple[int, int]], list[int]]]:
    """Steps of a run with ``count`` drafts, and how many were rejected in each, for each request."""
    g = torch.Generator().manual_seed(count)
    computed = {"a": 0, "b": 0}
    yield {"a": (0, 40), "b": (0, 25)}, [0, 0]
    computed.update(a=40, b=25)
    for number in range(14):
        step = {name: (done, 1 + count) for name, done in computed.items()}
        if number == 6:
            del step["a"]
        if number == 8:
            step["a"] = (computed["a"], 11)  # a session that goes on with more input
        rejected = [int(torch.randint(0, 1 + count, (1,), generator=g)) for _ in step]
        if number == 8:
            rejected[0] = 0
        yield step, rejected
        for (name, (done, queries)), lost in zip(step.items(), rejected, strict=True):
            computed[name] = done + queries - lost


def patch_tables(monkeypatch: Any) -> None:
    """Rope tables of this model instead of upstream's globals."""
    monkeypatch.setattr(sfa_v1, "get_cos_and_sin_mla", cos_and_sin)
