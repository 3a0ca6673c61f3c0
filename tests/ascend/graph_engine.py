"""A decode engine in full graphs: upstream's runner, dispatcher and graph wrapper over the adapter's layers.

Upstream's own code makes dummy runs, captures, chooses a step's mode, pads it and makes its metadata, in
buffers that stay; what `execute_model` does in between is repeated here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.attention import sfa_v1
from vllm_ascend.attention.attention_v1 import AscendAttentionState
from vllm_ascend.compilation import acl_graph
from vllm_ascend.ops import mla
from vllm_ascend.worker import model_runner_v1

from tests.ascend.adapter_model import BLOCK, HIDDEN, MAX_LEN, TYPES, Adapter, Setup, cos_and_sin
from vllm_kvoffload.platforms.ascend.attention import KVOffloadSFABackend
from vllm_kvoffload.platforms.ascend.checks import ATTENTION_OP
from vllm_kvoffload.platforms.ascend.runner import KVOffloadNPUModelRunner

from tests.ascend.simulated_graph import Graph, add_graphs  # isort: skip

MAX_TOKENS, SIZES = 96, [1, 2, 4]
WIDTH = MAX_LEN // BLOCK


class Model(torch.nn.Module):
    """The adapter's layers. Hidden states stand for token ids."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        hidden = input_ids
        for layer in range(len(TYPES)):
            output = torch.empty((hidden.shape[0], HIDDEN), dtype=hidden.dtype, device=hidden.device)
            mla.mla_forward(hidden, False, output, prefix(layer))
            hidden = hidden + output
        return hidden


def prefix(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def configuration(mode: CUDAGraphMode, setup: Setup, sizes: list[int]) -> tuple[Any, CompilationConfig]:
    """As much of vLLM's as runner and dispatcher look at."""
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1], splitting_ops=[*CompilationConfig._attention_ops, ATTENTION_OP],
    )  # fmt: skip
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1)
    scheduler = SimpleNamespace(max_num_seqs=setup.seqs, max_num_batched_tokens=MAX_TOKENS)
    speculative = SimpleNamespace(method="mtp", num_speculative_tokens=setup.drafts)
    if not setup.drafts:
        speculative = None  # type: ignore[assignment]
    config: Any = SimpleNamespace(
        compilation_config=compilation, scheduler_config=scheduler, speculative_config=speculative,
        lora_config=None, observability_config=SimpleNamespace(cudagraph_metrics=False),
        model_config=SimpleNamespace(use_mla=True), parallel_config=parallel,
    )  # fmt: skip
    return config, compilation


class Engine:
    """Runs steps of `make_step`. sizes: requests of the graphs. graphs: those that were captured."""

    def __init__(
        self,
        setup: Setup,
        monkeypatch: Any,
        mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY,
        sizes: list[int] = SIZES,
    ) -> None:
        self.setup, self.queries = setup, 1 + setup.drafts
        self.graphs: list[Graph] = []
        self.adapter = Adapter(setup)
        self._builds = True  # metadata, in its buffers
        add_graphs(self.adapter.npu, self.graphs)
        monkeypatch.setattr(torch, "npu", self.adapter.npu)
        self._patch_upstream(monkeypatch)
        self.runner = self._make_runner(mode, [size * self.queries for size in sizes])
        self.modes: list[str] = []
        self._capture()
        self._builds = False

    def _patch_upstream(self, monkeypatch: Any) -> None:
        tables = [torch.zeros((MAX_TOKENS, 1, 1, 16)) for _ in range(2)]
        tables = [self.setup.put(table) for table in tables]

        def at_fixed_addresses(positions: torch.Tensor, use_cache: bool) -> Any:
            if not self._builds:
                return cos_and_sin(positions)
            assert use_cache
            for table, made in zip(tables, cos_and_sin(positions), strict=True):
                table[: len(positions)].copy_(made)
            return [table[: len(positions)] for table in tables]

        monkeypatch.setattr(sfa_v1, "get_cos_and_sin_mla", at_fixed_addresses)
        monkeypatch.setattr(acl_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(acl_graph.current_platform, "get_global_graph_pool", lambda: None, raising=False)
        monkeypatch.setattr(acl_graph, "_EXTRA_CTX", SimpleNamespace(is_draft_model=False))
        monkeypatch.setattr(acl_graph, "validate_cudagraph_capturing_enabled", lambda: None)
        monkeypatch.setattr(model_runner_v1, "set_ascend_forward_context", self._context)
        for name in ("enable_sp", "enable_sp_by_pass", "lmhead_tp_enable", "using_paged_attention"):
            monkeypatch.setattr(model_runner_v1, name, lambda *_: False)
        monkeypatch.setattr(model_runner_v1, "update_cos_sin", lambda _: None)
        first_rank = SimpleNamespace(is_first_rank=True)
        monkeypatch.setattr(model_runner_v1, "get_pp_group", lambda: first_rank)

    @contextlib.contextmanager
    def _context(self, metadata: Any, _: Any, **given: Any) -> Iterator[None]:
        """vLLM's forward context as far as graphs and attention look at it."""
        adapter = self.adapter
        layers = {
            prefix(n): SimpleNamespace(
                mla_attn=SimpleNamespace(layer_name=impl.layer_name, impl=impl, kv_cache=cache)
            )
            for n, (impl, cache) in enumerate(zip(adapter.impls, adapter.caches, strict=True))
        }
        context: Any = SimpleNamespace(
            no_compile_layers=layers, attn_metadata=metadata, capturing=False, flash_comm_v1_enabled=False,
            cudagraph_runtime_mode=given["aclgraph_runtime_mode"], batch_descriptor=given["batch_descriptor"],
        )  # fmt: skip
        with override_forward_context(context):
            yield
        self.ran_as = context.cudagraph_runtime_mode.name

    def _groups(self) -> list[AttentionGroup]:
        adapter = self.adapter
        names = {
            kind: [
                impl.layer_name
                for impl, own in zip(adapter.impls, self.setup.types, strict=True)
                if own == kind
            ]
            for kind in adapter.builders
        }
        return [
            AttentionGroup(KVOffloadSFABackend, names[kind], None, 0, [builder])  # type: ignore[arg-type]
            for kind, builder in adapter.builders.items()
        ]

    def _make_runner(self, mode: CUDAGraphMode, sizes: list[int]) -> Any:
        adapter, put, seqs = self.adapter, self.setup.put, self.setup.seqs

        def ints(*size: int) -> torch.Tensor:
            return put(torch.zeros(size, dtype=torch.int32))

        def buffer(size: int) -> CpuGpuBuffer:
            made = CpuGpuBuffer(size, dtype=torch.int32, device=torch.device("cpu"), pin_memory=False)
            made.gpu = put(made.gpu)
            return made

        for builder in adapter.builders.values():
            builder.reorder_batch_threshold = self.queries
        config, compilation = configuration(mode, self.setup, sizes)
        self.hidden = put(torch.zeros((MAX_TOKENS, HIDDEN), dtype=self.setup.dtype))
        self.table, self.slots = ints(seqs, WIDTH), put(torch.full((MAX_TOKENS,), -1, dtype=torch.int32))
        blocks = SimpleNamespace(
            slot_mapping=SimpleNamespace(gpu=self.slots), get_device_tensor=lambda: self.table
        )

        class Tables(list):  # type: ignore[type-arg]
            def commit_block_table(self, count: int) -> None:
                pass

        dispatcher = CudagraphDispatcher(config)
        dispatcher.initialize_cudagraph_keys(mode, self.queries)
        runner: Any = object.__new__(KVOffloadNPUModelRunner)
        runner.__dict__.update(
            offload=adapter.offload, vllm_config=config, compilation_config=compilation,
            scheduler_config=config.scheduler_config, cudagraph_dispatcher=dispatcher,
            uniform_decode_query_len=self.queries, parallel_config=config.parallel_config,
            max_num_tokens=MAX_TOKENS,
            model_config=SimpleNamespace(enable_return_routed_experts=False, is_encoder_decoder=False),
            cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
            speculative_config=config.speculative_config,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=None, layer_names=list(adapter.builders))
            ]),
            attn_groups=[self._groups()], pcp_size=1, dcp_size=1, use_async_spec_decode=False,
            use_compress=False,
            input_batch=SimpleNamespace(
                block_table=Tables([blocks]), num_computed_tokens_cpu_tensor=torch.zeros(seqs),
                num_prompt_tokens_cpu_tensor=torch.zeros(seqs), num_computed_tokens_cpu=np.ones(seqs),
                lora_id_to_lora_request={}, req_ids=(),
            ),
            query_start_loc=buffer(MAX_TOKENS + 1), query_pos=buffer(MAX_TOKENS),
            arange_np=np.arange(MAX_TOKENS), seq_lens=ints(seqs),
            positions=put(torch.zeros(MAX_TOKENS).long()),
            optimistic_seq_lens_cpu=torch.zeros(seqs, dtype=torch.int32), actual_seq_lengths_q=[],
            attn_state=AscendAttentionState.ChunkedPrefill, decode_token_per_req=1, _has_gdn=False,
            enable_hamming_sparse=False, is_mm_prefix_lm=False, drafter=None, dynamic_eplb=False,
            lora_config=None, supports_mm_inputs=False, enable_prompt_embeds=False, uses_mrope=False,
            uses_xdrope_dim=0, use_aux_hidden_state_outputs=False, max_model_len=MAX_LEN, debugger=None,
            input_ids=SimpleNamespace(gpu=self.hidden), enable_enpu=False, use_sparse=True, use_eagle=False,
            device=self.setup.device,
        )  # fmt: skip
        runner.__dict__["_has_sinks"] = False
        runner.model = acl_graph.ACLGraphWrapper(Model(), config, CUDAGraphMode.FULL)
        return runner

    def _capture(self) -> None:
        """As vLLM does at start."""
        self.runner.compilation_config.cudagraph_num_of_warmups = 1
        for mode, descriptors in self.runner.cudagraph_dispatcher.get_capture_descs():
            for descriptor in descriptors:
                if mode == CUDAGraphMode.FULL:
                    GPUModelRunner._warmup_and_capture(self.runner, descriptor, mode)

    def load(self, made: dict[str, Any]) -> None:
        """A step's inputs into upstream's buffers."""
        runner, count, requests = self.runner, len(made["hidden"]), len(made["names"])
        self.adapter.names = runner.input_batch.req_ids = made["names"]
        starts = runner.query_start_loc
        starts.np[: requests + 1] = made["starts"]
        starts.np[requests + 1 :] = count
        starts.gpu.copy_(starts.cpu)
        runner.optimistic_seq_lens_cpu.zero_()[:requests] = torch.tensor(made["lengths"], dtype=torch.int32)
        runner.seq_lens.copy_(runner.optimistic_seq_lens_cpu)
        for target, values in (
            (self.hidden, made["hidden"].to(self.setup.dtype)), (self.table, made["blocks"]),
            (self.slots, made["slots"].to(torch.int32)), (runner.positions, made["positions"]),
        ):  # fmt: skip
            target[: len(values)].copy_(values)

    @torch.inference_mode()
    def run(self, made: dict[str, Any]) -> torch.Tensor:
        """The last hidden states of a step, without padding."""
        runner, count, requests = self.runner, len(made["hidden"]), len(made["names"])
        self.load(made)
        queries = np.diff(made["starts"])
        mode, descriptor, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=count, num_reqs=requests, num_scheduled_tokens_np=queries,
            max_num_scheduled_tokens=int(queries.max()), use_cascade_attn=False,
        )  # fmt: skip
        padded, requests_padded = descriptor.num_tokens, descriptor.num_reqs or requests
        if mode == CUDAGraphMode.FULL:
            requests_padded = runner._pad_query_start_loc_for_fia(
                runner.query_start_loc, padded, requests_padded, requests, mode, descriptor.num_reqs
            )
        self._builds = True
        metadata, _ = runner._build_attention_metadata(
            count, requests, int(queries.max()), padded, requests_padded, num_scheduled_tokens={}
        )
        self._builds = False
        with self._context(metadata, None, aclgraph_runtime_mode=mode, batch_descriptor=descriptor):
            out = runner._model_forward(padded, self.hidden[:padded], runner.positions[:padded])
        self.modes.append(self.ran_as)
        self.padded = padded
        return out[:count].clone()

    def dummy(self) -> None:
        """Runs a rank without work while other DP ranks have some."""
        self._builds = True
        self.runner._dummy_run(1, uniform_decode=True)
        self._builds = False

    def close(self) -> None:
        self.adapter.close()
