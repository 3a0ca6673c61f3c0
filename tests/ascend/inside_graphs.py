"""Run inside the Ascend environment by test_ascend.py: graph modes, by upstream's own splitting.

A captured graph is simulated: the operators that ran while it was captured run again on the same memory, and
no Python does. So whatever a graph holds of attention would keep the step it was captured in.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from torch.fx.experimental.proxy_tensor import make_fx
from vllm.compilation.backends import split_graph
from vllm.compilation.cuda_graph import CUDAGraphOptions
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm_ascend import platform as platform_module
from vllm_ascend.attention.sfa_v1 import AscendSFAImpl, AscendSFAMetadataBuilder
from vllm_ascend.compilation import acl_graph, compiler_interface
from vllm_ascend.ops import mla
from vllm_ascend.platform import NPUPlatform
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from tests.ascend.adapter_model import (
    HIDDEN,
    STEPS,
    TYPES,
    Adapter,
    Setup,
    common_metadata,
    make_step,
    patch_tables,
)
from tests.ascend.kernel_stand_ins import CoreKernels
from tests.ascend.simulated_graph import Graph, add_graphs
from tests.ascend.simulated_npu import SimulatedNPU, install
from vllm_kvoffload.platforms.ascend.checks import ATTENTION_OP, check_graphs

TOKENS = 4  # of the graph; steps are padded to it
PREFIXES = [f"model.layers.{layer}.self_attn" for layer in range(len(TYPES))]


# --------------------------------------------------------------------------------------- upstream's splitting


def configured(mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration after upstream's platform has been at it."""
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode)
    config = MagicMock()
    config.compilation_config = compilation
    config.model_config.enforce_eager = False
    config.model_config.is_encoder_decoder = False
    config.kv_transfer_config = config.speculative_config = None
    config.additional_config = {"ascend_compilation_config": {}}
    config.device_config.device_type = "npu"
    parallel = config.parallel_config
    parallel.tensor_parallel_size = parallel.pipeline_parallel_size = parallel.data_parallel_size = 1
    parallel.decode_context_parallel_size = parallel.prefill_context_parallel_size = 1
    parallel.worker_cls = "auto"
    ascend = MagicMock()
    ascend.xlite_graph_config.enabled = False
    ascend.recompute_scheduler_enable = ascend.enable_balance_scheduling = False
    ascend.enable_mc2_hierarchy_comm = False
    ascend.SLO_limits_for_dynamic_batch = -1
    ascend.profiling_chunk_config.enabled = False
    ascend.ascend_fusion_config = {}
    monkeypatch.setattr(platform_module, "init_ascend_config", lambda _: ascend)
    for name in (
        "enable_sp",
        "refresh_block_size",
        "model_uses_sfa_sparse",
        "enable_sfa_dcp_replicated_indexer",
    ):
        monkeypatch.setattr(platform_module, name, lambda *_: False)
    monkeypatch.setattr(NPUPlatform, "_fix_incompatible_config", lambda _: None)
    monkeypatch.setattr("vllm_ascend.quantization.utils.maybe_auto_detect_quantization", lambda _: None)
    for name in ("configure_ascend_file_logging", "configure_ascend_logging"):
        monkeypatch.setattr(f"vllm_ascend.logger.{name}", lambda: None)
    ascend.ascend_compilation_config = SimpleNamespace(enable_npugraph_ex=True, enable_static_kernel=False)
    NPUPlatform.check_and_update_config(config)
    return config


def test_attention_runs_outside_piecewise_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(CUDAGraphMode.PIECEWISE, monkeypatch)
    assert ATTENTION_OP in config.compilation_config.splitting_ops
    check_graphs(config, "what is tested")
    source = inspect.getsource(mla.AscendMultiHeadLatentAttention.forward)
    assert "torch.ops.vllm.mla_forward(" in source  # the one way to attention's forward


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL])
def test_attention_runs_inside_full_graphs(mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """With npugraph_ex or without, which captures nothing itself."""
    config = configured(mode, monkeypatch)
    assert config.compilation_config.splitting_ops == []
    assert config.additional_config["ascend_compilation_config"].get("enable_npugraph_ex", True)


def test_vllms_default_mode_splits_at_attention_and_has_no_npugraph_ex(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = configured(CUDAGraphMode.FULL_AND_PIECEWISE, monkeypatch)
    assert ATTENTION_OP in config.compilation_config.splitting_ops
    assert config.additional_config["ascend_compilation_config"]["enable_npugraph_ex"] is False


def test_only_decodes_run_in_full_graphs() -> None:
    """Sparse attention has them for uniform batches only, for which vLLM changes mode FULL."""
    support = AscendSFAMetadataBuilder.get_cudagraph_support(MagicMock(), MagicMock())
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL, splitting_ops=[]
    )
    compilation.resolve_cudagraph_mode_and_sizes(support, "ASCEND_SFA")
    assert compilation.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


def test_upstream_leaves_sparse_attentions_parameters_in_a_graph_alone() -> None:
    """So that addresses which stay are all that a replay needs."""
    assert AscendSFAImpl.update_graph_params(None, None, TOKENS) is None
    runner: Any = object.__new__(NPUModelRunner)
    runner.use_sparse, runner.attn_backend = True, None
    context = SimpleNamespace(cudagraph_runtime_mode=CUDAGraphMode.FULL, capturing=False)
    runner._update_full_graph_params_if_needed(context, TOKENS, None)  # else it would want positions


def test_no_graph_mode_of_this_release_converts_to_ge() -> None:
    """torchair is used for ACL graphs only: converters for our operators would never be called."""
    options = SimpleNamespace(enable_static_kernel=False)
    config = MagicMock()
    compiler_interface._configure_backend(config, options, None)
    assert config.mode == "reduce-overhead"
    assert config.debug.run_eagerly is True
    given: dict[str, Any] = {}
    compiler_interface._configure_backend(config, options, None, lambda _, kwargs: given.update(kwargs))
    assert given["options"]["force_eager"] is True
    assert "max-autotune" not in inspect.getsource(compiler_interface)


# ---------------------------------------------------------------------------------- capture and replay


class Model(torch.nn.Module):
    """The adapter's layers, with something between them that a graph may hold."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1.0
        for prefix in PREFIXES:
            output = torch.empty((hidden.shape[0], HIDDEN), dtype=hidden.dtype, device=hidden.device)
            torch.ops.vllm.mla_forward(hidden, False, output, prefix)
            hidden = hidden + output.view(-1, HIDDEN)
        return hidden


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Graph]]:
    """The graphs that are captured; upstream's operator runs on CPU tensors."""
    install(monkeypatch, 32, [])
    patch_tables(monkeypatch)
    graphs: list[Graph] = []
    simulated = SimulatedNPU()
    add_graphs(simulated, graphs, strict=False)
    monkeypatch.setattr(torch, "npu", simulated)
    monkeypatch.setattr(acl_graph, "weak_ref_tensors", lambda tensors: tensors)
    monkeypatch.setattr(acl_graph.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    monkeypatch.setattr(acl_graph, "_EXTRA_CTX", SimpleNamespace(is_draft_model=False))
    library = torch.library.Library("vllm", "IMPL")
    library.impl("mla_forward", mla.mla_forward, "CPU")
    yield graphs
    library._destroy()


def piecewise(config: Any) -> tuple[Any, int]:
    """The model split by vLLM, its pieces wrapped as vLLM wraps them; and their number."""
    traced = make_fx(Model(), tracing_mode="fake")(torch.zeros((TOKENS, HIDDEN)))
    split, items = split_graph(traced, ["vllm::mla_forward"])
    pieces = [item for item in items if not item.is_splitting_graph]
    for item in items:
        called = [node.target for node in item.graph.graph.nodes if node.op == "call_function"]
        attends = [target for target in called if target is torch.ops.vllm.mla_forward.default]
        assert bool(attends) == item.is_splitting_graph
    for item in pieces:
        wrapper = acl_graph.ACLGraphWrapper(
            item.graph, config, CUDAGraphMode.PIECEWISE, CUDAGraphOptions(gc_disable=False)
        )
        split.__dict__[item.submod_name] = wrapper
    return split, len(pieces)


def context_of(adapter: Adapter, metadata: dict[str, Any], mode: CUDAGraphMode) -> Any:
    """vLLM's forward context as far as graphs and attention look at it."""
    layers = {
        prefix: SimpleNamespace(
            mla_attn=SimpleNamespace(layer_name=impl.layer_name, impl=impl, kv_cache=cache)
        )
        for prefix, impl, cache in zip(PREFIXES, adapter.impls, adapter.caches, strict=True)
    }
    given = {impl.layer_name: metadata[kind] for impl, kind in zip(adapter.impls, TYPES, strict=True)}
    return SimpleNamespace(
        no_compile_layers=layers, attn_metadata=given, cudagraph_runtime_mode=mode,
        batch_descriptor=TOKENS, capturing=False,
    )  # fmt: skip


def run_in_graphs(model: Any, adapter: Adapter, mode: CUDAGraphMode) -> Iterator[torch.Tensor]:
    """The last hidden states of every decode step, without padding. Prefill chunks run without graphs."""
    static = torch.zeros((TOKENS, HIDDEN))
    for step in STEPS:
        made = make_step(step)
        count = len(made["hidden"])
        if count > TOKENS:
            adapter.run(made)
            continue
        adapter.names = made["names"]
        common = common_metadata(made, TOKENS - count, adapter.setup)
        metadata = {kind: builder.build(0, common) for kind, builder in adapter.builders.items()}
        static.zero_()[:count] = made["hidden"]
        context = context_of(adapter, metadata, mode)
        with override_forward_context(context), adapter.target_pass(context):
            out = model(static)
        yield (out[0] if isinstance(out, tuple) else out)[:count].clone()


def run_eager(setup: Setup) -> list[torch.Tensor]:
    adapter, results = Adapter(setup), []
    for step in STEPS:
        made = make_step(step)
        count = len(made["hidden"])
        hidden = made["hidden"]
        for output in adapter.run(made, pad=max(TOKENS - count, 0)):
            hidden = hidden + output
        if count <= TOKENS:
            results.append(hidden)
    adapter.close()
    return results


def queries_of(step: dict[str, tuple[int, int]]) -> list[int]:
    return [queries for _, queries in step.values()]


SETUPS = {"portable": Setup("portable"), "kernels": Setup("portable", kernels=CoreKernels)}


@pytest.mark.parametrize("name", SETUPS)
def test_piecewise_graphs_give_what_eager_gives(name: str, npu: list[Graph]) -> None:
    """Captured in the first decode step and replayed in all others; attention runs in each of them."""
    expected = run_eager(Setup())
    config = SimpleNamespace(compilation_config=None)
    model, pieces = piecewise(config)
    adapter = Adapter(SETUPS[name])
    with pytest.MonkeyPatch.context() as enabled:
        enabled.setattr(acl_graph, "validate_cudagraph_capturing_enabled", lambda: None)
        found = list(run_in_graphs(model, adapter, CUDAGraphMode.PIECEWISE))
    assert len(found) == len(expected) > 10
    assert all(map(torch.equal, found, expected))
    assert len(npu) == pieces > len(TYPES) - 1
    assert {graph.replays for graph in npu} == {len(found) - 1}
    assert adapter.manager.stats.decode_steps == sum(1 in queries_of(step) for step in STEPS)
    adapter.close()
