"""Run inside the Ascend environment by test_ascend.py: where steps and draft passes begin.

The runner begins them around upstream's own forward passes: `NPUModelRunner._model_forward` and the
drafter's `_run_merged_draft` run here as they are released.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.spec_decode import llm_base_proposer
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from tests.ascend.adapter_model import (
    BLOCK,
    STEPS,
    TYPES,
    Adapter,
    Setup,
    common_metadata,
    make_builder,
    make_step,
    patch_tables,
)
from tests.ascend.kernel_stand_ins import CoreKernels
from tests.ascend.simulated_device import Device, on_npu, syncs
from tests.ascend.simulated_npu import install
from vllm_kvoffload.platforms.ascend.attention import KVOffloadSFABackend
from vllm_kvoffload.platforms.ascend.offload import describe_pass, describe_passes
from vllm_kvoffload.platforms.ascend.runner import KVOffloadNPUModelRunner
from vllm_kvoffload.platforms.runner import DraftModel
from vllm_kvoffload.sparse.manager import SparseKVManager

KERNELS = Setup("portable", kernels=CoreKernels)
DRAFTING = Setup("portable", drafts=3, slots=128)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, 32, [])
    patch_tables(monkeypatch)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps and draft passes as the manager begins them: "step" or the pass's index, and the requests."""
    calls: list[Any] = []
    step, draft = SparseKVManager.begin_step, SparseKVManager.begin_draft

    def begin_step(manager: Any, batch: Any) -> None:
        calls.append(("step", batch.req_ids))
        step(manager, batch)

    def begin_draft(manager: Any, batch: Any, index: int) -> None:
        calls.append((index, batch.req_ids))
        draft(manager, batch, index)

    monkeypatch.setattr(SparseKVManager, "begin_step", begin_step)
    monkeypatch.setattr(SparseKVManager, "begin_draft", begin_draft)
    return calls


# -------------------------------------------------------------------------------------------- target's steps


def runner_with(adapter: Adapter, common: Any, tokens: int) -> Any:
    """Our runner as far as it makes a step's metadata, for layers with an indexer and without, and runs the
    model, which is the adapter's layers."""
    groups = [
        AttentionGroup(KVOffloadSFABackend, [kind], None, 0, [builder])  # type: ignore[arg-type]
        for kind, builder in adapter.builders.items()
    ]
    table = SimpleNamespace(
        slot_mapping=SimpleNamespace(gpu=common.slot_mapping),
        get_device_tensor=lambda: common.block_table_tensor,
    )
    group = SimpleNamespace(kv_cache_spec=None, layer_names=list(adapter.builders))

    def model(input_ids: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        metadata = get_forward_context().attn_metadata
        return adapter._forward(range(len(TYPES)), input_ids, metadata, tokens)  # type: ignore[arg-type]

    compilation = SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE, static_forward_context={})
    runner = object.__new__(KVOffloadNPUModelRunner)
    runner.__dict__.update(
        offload=adapter.offload, model=model, enable_enpu=False, compilation_config=compilation,
        use_sparse=True, use_eagle=False,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]), attn_groups=[groups], pcp_size=1,
        optimistic_seq_lens_cpu=common.seq_lens.clone(), dcp_size=1, use_async_spec_decode=False,
        input_batch=SimpleNamespace(
            block_table=[table], num_computed_tokens_cpu_tensor=torch.zeros(tokens),
            num_prompt_tokens_cpu_tensor=torch.zeros(tokens), req_ids=list(adapter.names),
        ),
        model_config=SimpleNamespace(enable_return_routed_experts=False, is_encoder_decoder=False),
        query_start_loc=SimpleNamespace(gpu=common.query_start_loc, cpu=common.query_start_loc_cpu),
        seq_lens=common.seq_lens, actual_seq_lengths_q=[], positions=common.positions, use_compress=False,
        attn_state=common.attn_state, decode_token_per_req=1, _has_gdn=False, speculative_config=None,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False), enable_hamming_sparse=False,
        is_mm_prefix_lm=False, drafter=None, vllm_config=SimpleNamespace(compilation_config=compilation),
    )  # fmt: skip
    return runner


def context_with(metadata: Any, **more: Any) -> Any:
    return SimpleNamespace(
        attn_metadata=metadata, cudagraph_runtime_mode=CUDAGraphMode.NONE, capturing=False,
        flash_comm_v1_enabled=False, **more,
    )  # fmt: skip


class StepRunner:
    """Runs steps of `make_step` through our runner's `_model_forward`. runner: that of the last step."""

    def __init__(self, setup: Setup) -> None:
        self.adapter = Adapter(setup)
        self.runner: Any = None

    def prepare(self, made: dict[str, Any]) -> Any:
        """The step's metadata, from upstream's code."""
        adapter, tokens = self.adapter, len(made["hidden"])
        adapter.names = made["names"]
        adapter.common = common = common_metadata(made, 0, adapter.setup)
        self.runner = runner_with(adapter, common, tokens)
        return self.runner._build_attention_metadata(
            tokens, len(made["names"]), common.max_query_len, num_scheduled_tokens={}
        )[0]

    def run(self, made: dict[str, Any], metadata: Any) -> list[torch.Tensor]:
        with override_forward_context(context_with(metadata)):
            return self.runner._model_forward(len(made["hidden"]), made["hidden"])  # type: ignore[no-any-return]

    def step(self, made: dict[str, Any]) -> list[torch.Tensor]:
        return self.run(made, self.prepare(made))


def all_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def test_two_builders_in_one_step_begin_it_once(begun: list[Any]) -> None:
    """Layers that differ in their caches get metadata of their own."""
    engine, without = StepRunner(KERNELS), Adapter(Setup())
    for step in STEPS[:8]:
        made = make_step(step)
        metadata = engine.prepare(made)
        assert metadata["full"] is not metadata["shared"]
        assert all_equal(engine.run(made, metadata), without.run(made))
    assert begun == [("step", tuple(step)) for step in STEPS[:8]]
    engine.adapter.close()


def test_control_a_step_that_begins_anew_between_layers() -> None:
    engine = StepRunner(KERNELS)
    made = make_step(STEPS[0])
    metadata, manager = engine.prepare(made), engine.adapter.manager
    batch = describe_pass(metadata["shared"]).batch.named(made["names"])
    engine.adapter.watch = lambda where: manager.begin_step(batch) if where == "layer 0" else None
    with pytest.raises(RuntimeError, match=r"layer 1, request 0\) out of order"):
        engine.run(made, metadata)
    engine.adapter.close()


def test_a_failed_forward_pass_leaves_nothing_begun(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, without = StepRunner(KERNELS), Adapter(Setup())
    offload = engine.adapter.offload
    assert offload is not None
    for number, step in enumerate(STEPS[:6]):
        made = make_step(step)
        if number in (2, 4):
            with monkeypatch.context() as broken:
                broken.setattr(engine.adapter.impls[2], "_attend", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.step(made)
            assert offload.running is None
            metadata = engine.prepare(made)
            with pytest.raises(RuntimeError, match="begun neither a step nor a draft pass"):
                engine.adapter._forward(range(1), made["hidden"], metadata, len(made["hidden"]))
        assert all_equal(engine.step(made), without.run(made))
        assert offload.running is None
    assert len(begun) == 6 + 2
    engine.adapter.close()


def test_a_step_that_can_not_begin_runs_no_layer() -> None:
    engine, made = StepRunner(KERNELS), make_step(STEPS[0])
    metadata = engine.prepare(made)
    offload, ran = engine.adapter.offload, []
    assert offload is not None
    engine.adapter.watch = ran.append
    engine.runner.input_batch.req_ids = ["a"]  # the metadata's batch has two
    with pytest.raises(ValueError, match="1 request ids for 2 requests"):
        engine.run(made, metadata)
    assert offload.running is None
    assert ran == []
    engine.adapter.close()


@pytest.mark.parametrize("setup", [Setup("portable"), KERNELS], ids=["plans on the host", "on the device"])
def test_a_dummy_run_begins_none_and_outputs_zeros(
    setup: Setup, begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that has metadata, over blocks of requests that are alive."""
    engine, without = StepRunner(setup), Adapter(Setup())
    for step in STEPS[:4]:
        made = make_step(step)
        assert all_equal(engine.step(made), without.run(made))
        dummy = make_step({"a": (0, 4), "b": (0, 4)})  # more tokens than any graph's requests decode
        metadata = engine.prepare(dummy)

        def run(_: Any, dummy: Any = dummy, metadata: Any = metadata) -> Any:
            return engine.run(dummy, metadata)

        monkeypatch.setattr(NPUModelRunner, "_dummy_run", run)
        outputs = engine.runner._dummy_run()
        assert len(outputs) == len(TYPES)
        assert not any(output.any() for output in outputs)
    assert begun == [("step", tuple(step)) for step in STEPS[:4]]
    engine.adapter.close()


def test_a_dummy_run_without_metadata_begins_none(begun: list[Any]) -> None:
    engine, made = StepRunner(KERNELS), make_step(STEPS[0])
    engine.prepare(made)
    engine.runner.model = lambda **_: "profiled"
    assert engine.run(made, None) == "profiled"
    assert begun == []
    engine.adapter.close()


def test_a_step_that_only_runs_the_connector_begins_none(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream's `execute_model` of a step without tokens ends before any forward pass."""
    engine, made = StepRunner(KERNELS), make_step(STEPS[0])
    engine.step(made)
    begun.clear()
    runner, published, order = engine.runner, [], []
    runner.__dict__.update(
        ascend_config=SimpleNamespace(profiling_chunk_config=SimpleNamespace(need_timing=False)),
        execute_model_state=None, use_async_scheduling=False, num_spec_tokens=0, supports_mm_inputs=False,
        parallel_config=SimpleNamespace(distributed_executor_backend="mp", data_parallel_size=1),
        synchronize_input_prep=nullcontext, debugger=None,
        kv_connector_no_forward=lambda *_: order.append("connector") or "of the connector",
    )  # fmt: skip
    runner.vllm_config.model_config = runner.model_config
    module = "vllm_ascend.worker.model_runner_v1."
    group = SimpleNamespace(world_size=1, is_last_rank=True, is_first_rank=True)
    connector = SimpleNamespace(handle_preemptions=lambda _: order.append("preemptions"))
    monkeypatch.setattr(module + "get_pp_group", lambda: group)
    monkeypatch.setattr(module + "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(module + "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(module + "has_ec_transfer", lambda: False)
    monkeypatch.setattr(GPUModelRunner, "_update_states", lambda *_: order.append("states"))
    monkeypatch.setattr(type(runner.offload), "publish", lambda _: published.append(1))
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = SimpleNamespace(receives=["c"])  # type: ignore[assignment]
    monkeypatch.setattr(type(runner.offload), "settle", lambda _: order.append("settled"))
    output.finished_req_ids = {"b"}
    assert runner.execute_model(output) == "of the connector"
    assert order == ["preemptions", "settled", "states", "connector"]
    assert (begun, published) == ([], [1])
    assert engine.adapter.manager.partitions.lookup("b") is None
    engine.adapter.close()


# ---------------------------------------------------------------------------------------------- draft passes


class MtpModel:
    """The adapter's MTP layer. seen: what upstream called it with, and the pass that was open."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.seen = adapter, []
        self.fails_at = -1

    def __call__(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        assert self.adapter.offload is not None
        metadata: Any = get_forward_context().attn_metadata
        self.seen.append(self.adapter.offload.current())
        mtp = range(len(TYPES), len(TYPES) + 1)
        self.adapter._forward(mtp, hidden_states, metadata, len(hidden_states))
        if len(self.seen) == self.fails_at:
            raise OSError("planted")
        return hidden_states

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class DraftRunner(StepRunner):
    """Runs upstream's `_run_merged_draft` behind each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(DRAFTING)
        self.model = MtpModel(self.adapter)
        self.drafter = drafter = self.adapter.proposer
        drafter.model = self.model
        values = {
            "num_speculative_tokens": 3, "pass_hidden_states_to_model": True, "supports_mm_inputs": False,
            "uses_xdrope_dim": 0, "draft_uses_xdrope_dim": 0,
            "use_cuda_graph": False, "parallel_drafting": False, "_share_mtp_indices": False, "pcp_size": 1,
            "vllm_config": SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=128, uses_mrope=False)
            ), "device": "cpu",
            "input_ids": torch.zeros(96, dtype=torch.int32), "hidden_states": torch.zeros((96, 48)),
            "positions": torch.zeros(96, dtype=torch.int64), "model_returns_tuple": lambda: False,
            "maybe_pad_and_reduce": lambda hidden, positions: (hidden, positions),
            "maybe_all_gather_and_unpad": lambda last, positions, hidden: (last, positions, hidden),
        }  # fmt: skip
        drafter.__dict__.update(values)
        monkeypatch.setattr(llm_base_proposer, "lmhead_tp_enable", lambda: False)
        config = SimpleNamespace(enable_reduce_sample=False)
        monkeypatch.setattr(llm_base_proposer, "get_ascend_config", lambda: config)
        monkeypatch.setattr(llm_base_proposer, "_EXTRA_CTX", SimpleNamespace())

    def prepare(self, made: dict[str, Any]) -> Any:
        found = super().prepare(made)
        self.runner.drafter = self.drafter
        if not isinstance(self.drafter.model, DraftModel):
            self.runner.watch_drafter()
        self.drafter.model._open_pass = self.runner._open_draft_pass  # each step has a runner of its own
        return found

    def draft(self, made: dict[str, Any], metadata: list[dict[str, Any]] | None) -> None:
        """The draft passes of a step; without metadata as in a dummy run."""
        tokens, count = len(made["hidden"]), len(made["names"])
        self.drafter.hidden_states[:tokens] = made["hidden"]
        context = context_with(
            metadata[0] if metadata else None, draft_attn_metadatas=metadata, moe_layer_index=0
        )
        with override_forward_context(context):
            self.drafter._run_merged_draft(
                tokens, count, torch.tensor(made["starts"][1:]) - 1, None, None, metadata or [], tokens
            )

    def draft_metadata(self, made: dict[str, Any]) -> list[dict[str, Any]]:
        """By upstream's code, for all passes before the first one runs."""
        builder, common, count = self.adapter.builders["full"], self.adapter.common, len(made["names"])
        tokens = len(made["hidden"])
        found = [builder.build(0, common)]
        positions = made["positions"][torch.tensor(made["starts"][1:]) - 1].clone()
        for index in (1, 2):
            common, next_ = self.drafter.attn_update_stack_num_spec_norm(
                index, found[-1], common, count, tokens, positions, CUDAGraphMode.NONE,
                attn_group=self.drafter.draft_attn_groups[0],
            )  # fmt: skip
            found.append(next_)
        return [{"full": one} for one in found]


DRAFTED = [{"a": (0, 40), "b": (0, 25)}, {"a": (40, 4), "b": (25, 4)}, {"b": (29, 4)}]


def test_draft_passes_begin_in_order(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DraftRunner(monkeypatch)
    for step in DRAFTED:
        made = make_step(step)
        begun.clear()
        engine.model.seen.clear()
        engine.step(made)
        metadata = engine.draft_metadata(made)
        engine.draft(made, metadata)
        names = tuple(step)
        assert begun == [("step", names), (0, names), (1, names), (2, names)]
        passes = [describe_pass(one["full"]).batch for one in metadata]
        assert len(engine.model.seen) == len(passes) == 3
        for seen, batch in zip(engine.model.seen, passes, strict=True):
            assert seen is not None
            assert seen.batch.seq_lens.tolist() == batch.seq_lens.tolist()
            assert torch.equal(seen.batch.slot_mapping, batch.slot_mapping)
        ends = [computed + queries for computed, queries in step.values()]
        assert [one.seq_lens.tolist() for one in passes] == [[end + n for end in ends] for n in range(3)]
    engine.adapter.close()


def test_the_passes_are_read_before_the_first_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read later, each would make the host wait for the one before."""
    engine, made = DraftRunner(monkeypatch), make_step(DRAFTED[0])
    engine.step(made)
    metadata, read = engine.draft_metadata(made), []

    def describe(passes: Any) -> Any:
        read.append((len(passes), len(engine.model.seen)))
        return describe_passes(passes)

    monkeypatch.setattr("vllm_kvoffload.platforms.ascend.offload.describe_passes", describe)
    engine.draft(made, metadata)
    assert read == [(3, 0)]
    engine.adapter.close()


def test_a_draft_pass_that_failed_leaves_nothing_begun(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made = DraftRunner(monkeypatch), make_step(DRAFTED[0])
    engine.step(made)
    engine.model.fails_at = 2
    with pytest.raises(OSError, match="planted"):
        engine.draft(made, engine.draft_metadata(made))
    assert engine.adapter.offload is not None
    assert engine.adapter.offload.running is None
    engine.model.fails_at = -1
    begun.clear()
    engine.step(made)
    engine.draft(made, engine.draft_metadata(made))
    assert [index for index, _ in begun] == ["step", 0, 1, 2]
    engine.adapter.close()


def test_dummy_draft_passes_begin_none(begun: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = DraftRunner(monkeypatch), make_step(DRAFTED[0])
    metadata = engine.prepare(made)
    assert engine.adapter.offload is not None
    with engine.adapter.offload.dummy_run():
        engine.draft(made, engine.draft_metadata(made))
    assert engine.model.seen == [None] * 3
    engine.model.seen.clear()
    monkeypatch.setattr(engine.adapter, "_forward", lambda *_: None)
    monkeypatch.setattr(engine.adapter.offload, "current", lambda: None)
    engine.draft(made, None)
    assert (engine.model.seen, begun) == ([None] * 3, [])
    del metadata
    engine.adapter.close()


def test_shutdown_gives_the_drafter_its_model_back_and_unbinds_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when upstream's fails; upstream empties its dictionary of layers."""
    engine = DraftRunner(monkeypatch)
    engine.prepare(make_step(DRAFTED[0]))
    layers = {impl.layer_name: SimpleNamespace(impl=impl) for impl in engine.adapter.impls}
    engine.runner.compilation_config.static_forward_context.update(layers)
    closed: list[Any] = []
    monkeypatch.setattr(type(engine.runner.offload), "close", lambda offload: closed.extend([offload]))

    def shutdown(runner: Any) -> None:
        runner.compilation_config.static_forward_context.clear()
        raise OSError("planted")

    monkeypatch.setattr(GPUModelRunner, "shutdown", shutdown)
    with pytest.raises(OSError, match="planted"):
        engine.runner.shutdown()
    assert engine.drafter.model is engine.model
    assert all(impl.kv is None and impl.offload is None for impl in engine.adapter.impls)
    assert closed == [engine.adapter.offload]
    assert engine.runner.offload is None
    engine.adapter.close()


def test_a_models_own_hooks_would_not_see_a_pass() -> None:
    """Which is why the drafter's model is wrapped: the release's class calls its forward without them."""
    assert DeepSeekMTP.__call__ is not torch.nn.Module.__call__

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    decorated: Any = support_torch_compile(dynamic_arg_dims={"input_ids": 0})(Model)
    model = decorated.__new__(decorated)
    torch.nn.Module.__init__(model)
    model.do_not_compile = True
    called: list[Any] = []
    model.register_forward_pre_hook(lambda *_: called.append("hook"))
    wrapped = DraftModel(model, lambda: called.append("pass") or nullcontext())
    assert torch.equal(wrapped(torch.ones(1)), torch.ones(1))
    assert called == ["pass"]


# -------------------------------------------------------------------------------------------------- metadata


def test_a_pass_is_read_off_real_metadata() -> None:
    step = make_step({"a": (5, 3), "b": (0, 2)})
    common = common_metadata(step, 3, Setup())
    padded = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)  # two requests that are padding
    common.query_start_loc, common.query_start_loc_cpu, common.num_reqs = padded, padded, 4
    common.seq_lens = torch.tensor([8, 2, 0, 0], dtype=torch.int32)
    common.block_table_tensor = torch.cat([step["blocks"], step["blocks"]])
    made = describe_pass(make_builder().build(0, common))
    batch = made.batch
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert batch.seq_lens.tolist() == [8, 2]
    assert torch.equal(batch.slot_mapping, step["slots"])
    assert torch.equal(batch.block_table, step["blocks"])
    assert batch.block_size == BLOCK
    assert made.causal_ends.tolist() == [6, 7, 8, 1, 2]


@pytest.mark.parametrize("wide", [False, True])
def test_the_host_waits_once_for_the_inputs_of_all_passes(wide: bool) -> None:
    passes = []
    for lengths in ({"a": (5, 3), "b": (0, 2)}, {"a": (7, 1)}):
        step = make_step(lengths)
        metadata = make_builder().build(0, common_metadata(step, 3, Setup()))
        for name in ("seq_lens", "block_table", "slot_mapping"):
            tensor = getattr(metadata, name)
            widened = tensor.long() if wide and name == "slot_mapping" else tensor
            setattr(metadata, name, on_npu(widened))
        passes.append((metadata, step))
    syncs.take()
    with Device():
        made = describe_passes([metadata for metadata, _ in passes])
    assert syncs.take() == ["cpu"]
    for (_, step), one in zip(passes, made, strict=True):
        assert torch.equal(one.batch.slot_mapping, step["slots"])
        assert torch.equal(one.batch.block_table, step["blocks"])
        assert one.batch.block_table.dtype == step["blocks"].dtype
    assert [one.batch.seq_lens.tolist() for one in made] == [[8, 2], [8]]


def test_layers_with_and_without_indexer_have_specs_that_differ() -> None:
    """By which upstream sorts them into groups."""
    specs = [
        AscendMLAAttentionSpec(
            block_size=128, num_kv_heads=1, head_size=sum(dims), sparse_head_dim=dims, dtype=torch.bfloat16
        )
        for dims in ((512, 64, 128), (512, 64, 0))
    ]
    assert specs[0] != specs[1]
    source = inspect.getsource(KVOffloadNPUModelRunner.initialize_attn_backend)
    assert "key = (full_cls_name, layer_kv_cache_spec)" in source


def test_later_drafts_do_not_see_rejected_ones() -> None:
    """Upstream's lengths count them; ours end at the query's own position."""
    adapter = Adapter(Setup(drafts=2))
    step = make_step({"a": (40, 3), "b": (25, 3)})
    adapter.names = step["names"]
    adapter.common = common = common_metadata(step, 0, adapter.setup)
    builder = adapter.builders["full"]
    positions = step["positions"][torch.tensor([0, 4])]  # two drafts of a were rejected, one of b
    metadata = adapter.proposer.attn_update_stack_num_spec_norm(
        1, builder.build(0, common), common, 2, 2, positions, None,
        attn_group=adapter.proposer.draft_attn_groups[0],
    )[1]  # fmt: skip
    made = describe_pass(metadata)
    assert made.batch.seq_lens.tolist() == metadata.seq_lens.tolist() == [42, 28]
    assert made.causal_ends.tolist() == [42, 28]
    assert common.seq_lens.tolist() == [43, 28]  # and upstream adds one


# ------------------------------------------------------------------------------------------- copies of blocks


def test_this_release_has_the_scheduler_order_no_copies_of_blocks() -> None:
    """Later ones do, in `SchedulerOutput.kv_cache_block_copies`: vLLM's runner then copies within the
    caches it was given, which is the host pool, on which our kernels may still write. The runner waits for
    them before such copies, as on CPU; who copies host memory on an NPU is to be looked at then."""
    assert "kv_cache_block_copies" not in {field.name for field in fields(SchedulerOutput)}
    for kind in (GPUModelRunner, NPUModelRunner):
        assert "block_copies" not in inspect.getsource(inspect.getmodule(kind))


@pytest.fixture(autouse=True)
def no_context() -> Iterator[None]:
    with override_forward_context(None):
        yield
