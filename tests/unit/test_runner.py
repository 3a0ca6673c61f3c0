"""What the runners of all platforms share: when steps and draft passes begin, what is waited for before
blocks are filled from outside, and the blocks that a step lost; tensors of layers that share memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import kv_transfer
from vllm.forward_context import override_forward_context
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_kvoffload import ops
from vllm_kvoffload.layerwise.buffer_plan import BufferOptions, CacheLayer, plan_buffers
from vllm_kvoffload.platforms.parts import ForwardPass, WorkerOffload
from vllm_kvoffload.platforms.runner import DraftModel, OffloadRunnerMixin
from vllm_kvoffload.platforms.shared_caches import shared_caches
from vllm_kvoffload.runtime import CPURuntime
from vllm_kvoffload.sparse.host_rows import HostRows

pytestmark = pytest.mark.timeout(60)

ROW_BYTES = 8


class Manager:
    """Records what it is told. store: of one layer with 4 blocks of 2 tokens."""

    def __init__(self, runtime: CPURuntime, barrier: Any = None) -> None:
        self.calls: list[Any] = []
        self.geometry = SimpleNamespace(num_mtp_layers=1)
        layers = [torch.zeros((4, 2, ROW_BYTES), dtype=torch.uint8)]
        self.host_rows = HostRows(layers, runtime, writer=True, barrier=barrier, deadline_s=20)

    def begin_step(self, batch: Any) -> None:
        self.calls.append(("step", batch))

    def begin_draft(self, batch: Any, index: int) -> None:
        self.calls.append((index, batch))

    def release(self, req_ids: Any) -> None:
        self.calls.append(("release", sorted(req_ids)))


class Offload(WorkerOffload[ForwardPass]):
    """An offload without a pool, whose metadata are numbers of requests."""

    def __init__(self, runtime: CPURuntime, barrier: Any = None) -> None:
        self.told = Manager(runtime, barrier)
        self.manager = self.told  # type: ignore[assignment]
        self._runtime = runtime

    def publish(self) -> None:
        self.told.calls.append("published")

    def describe(self, attn_metadata: Any) -> ForwardPass:
        (requests,) = attn_metadata.values()
        return ForwardPass(SimpleNamespace(num_requests=requests, named=tuple))  # type: ignore[arg-type]


class Upstream:
    """Stands for vLLM's runner. It copies blocks in the host pool, as vLLM's does in the caches that it was
    given."""

    def __init__(self, offload: Offload) -> None:
        self.offload: Any = offload
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.drafter = SimpleNamespace(model=lambda: offload.running)

    def _model_forward(self) -> Any:
        return self.offload.running

    def _dummy_run(self, metadata: Any) -> list[Any]:
        with context(metadata):
            return [self._model_forward(), self.drafter.model()]

    def sample_tokens(self, output: Any) -> Any:
        return output

    def _update_states(self, scheduler_output: Any) -> None:
        for source, target in scheduler_output.kv_cache_block_copies or ():
            for blocks in self.offload.manager.host_rows.layers:
                blocks[target] = blocks[source]


class Runner(OffloadRunnerMixin, Upstream):  # type: ignore[misc]  # the same names, without types
    """As a platform's runner is put together."""


def context_of(metadata: Any) -> Any:
    return SimpleNamespace(attn_metadata=metadata)


def context(metadata: Any) -> Any:
    return override_forward_context(context_of(metadata))


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    with CPURuntime() as runtime:
        yield runtime


@pytest.fixture
def runner(runtime: CPURuntime) -> Any:
    made = Runner(Offload(runtime))
    made.watch_drafter()
    return made


# ---------------------------------------------------------------------------------- steps and draft passes


def test_a_step_and_its_draft_passes_begin_around_the_models(runner: Any) -> None:
    for _ in range(2):
        runner.offload.told.calls.clear()
        with context({"layer": 2}):
            assert runner._model_forward().batch.num_requests == 2
        for requests in (2, 1):
            with context({"layer": requests}):
                assert runner.drafter.model().batch.num_requests == requests
        assert runner.offload.running is None
        assert runner.offload.told.calls == [("step", ("a", "b")), (0, ("a", "b")), (1, ("a",))]


def test_what_fails_leaves_no_pass_open_and_counts_no_draft(runner: Any) -> None:
    offload = runner.offload

    def broken() -> None:
        assert offload.running is not None
        raise OSError("planted")

    for begin in (offload.target_pass, offload.draft_pass):
        with pytest.raises(AttributeError), begin(context_of(None), ["a"]):
            pytest.fail("no layer may run")  # what can't be read can't begin
        assert offload.running is None
        with pytest.raises(OSError, match="planted"), begin(context_of({"layer": 1}), ["a"]):
            broken()
        assert offload.running is None
    assert offload.told.calls == [("step", ("a",)), (0, ("a",))]


def test_passes_without_metadata_and_dummy_runs_begin_none(runner: Any) -> None:
    with context(None):
        assert runner._model_forward() is None
        assert runner.drafter.model() is None
    assert runner._dummy_run({"layer": 2}) == [None, None]
    assert runner.offload.told.calls == []
    assert not runner.offload.dummy


def test_an_engine_without_offload_begins_none(runner: Any) -> None:
    told, runner.offload = runner.offload.told, None
    runner.__dict__["drafter"].model = DraftModel(lambda: "drafted", runner._open_draft_pass)
    with context({"layer": 2}):
        assert runner.drafter.model() == "drafted"
    assert told.calls == []


def test_a_drafters_model_is_the_model_otherwise() -> None:
    model = SimpleNamespace(model=SimpleNamespace(layers=3), compute_logits=lambda hidden: hidden + 1)
    wrapped = DraftModel(model, lambda: pytest.fail("no pass"))
    assert wrapped.model.layers == 3
    assert wrapped.compute_logits(1) == 2
    assert not hasattr(wrapped, "get_top_tokens")
    assert wrapped.unwrap() is model


# ------------------------------------------------------------------------------ blocks filled from outside


def output(**values: Any) -> SchedulerOutput:
    made = SchedulerOutput.make_empty()
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control: does not"])
def test_blocks_are_copied_after_what_is_still_being_written(
    waits: bool, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix that ends within a block is copied when a request continues it: its last row may be on its
    way to the host pool."""
    may_write, write = threading.Event(), ops.host_write

    def held(*args: torch.Tensor) -> None:
        assert may_write.wait(20)
        write(*args)

    monkeypatch.setattr(ops, "host_write", held)
    store = runner.offload.manager.host_rows
    store.write(0, torch.full((1, ROW_BYTES), 7, dtype=torch.uint8), torch.tensor([2]))  # of block 1
    threading.Timer(0.2, may_write.set).start()
    if not waits:
        monkeypatch.setattr(type(runner.offload), "settle", lambda _: None)
    runner._update_states(output(kv_cache_block_copies=[(1, 3)]))
    copied = store.layers[0][3, 0].tolist()
    assert copied == [7 if waits else 0] * ROW_BYTES
    assert may_write.wait(20)
    store.join()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 0),
        ({"kv_cache_block_copies": [(1, 3)]}, 1),
        ({"kv_connector_metadata": SimpleNamespace(receives=["a"])}, 1),
        ({"kv_connector_metadata": SimpleNamespace(receives=[])}, 0),
    ],
    ids=["nothing", "copies", "receives", "a connector without receives"],
)
def test_ranks_wait_for_each_other_only_before_blocks_are_filled_from_outside(
    values: dict[str, Any], expected: int, runtime: CPURuntime
) -> None:
    met: list[int] = []
    runner: Any = Runner(Offload(runtime, lambda: met.append(1)))
    runner._update_states(output(finished_req_ids={"a"}, preempted_req_ids={"b"}, **values))
    assert len(met) == expected
    assert runner.offload.told.calls == [("release", ["a"]), ("release", ["b"])]


# --------------------------------------------------------------------------------------------- lost blocks


@pytest.mark.parametrize("with_offload", [True, False])
@pytest.mark.parametrize("connector", [True, False])
def test_blocks_that_a_step_lost_are_in_its_own_result(
    with_offload: bool, connector: bool, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with drafts ends the connector's step after vLLM has asked for them."""
    group = SimpleNamespace(get_block_ids_with_load_errors=lambda: {5})
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: group)
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: connector)
    told = runner.offload.told
    if not with_offload:
        runner.offload = None
    reported = SimpleNamespace(invalid_block_ids={3})
    result = SimpleNamespace(kv_connector_output=reported)
    assert runner.sample_tokens(result) is result
    assert reported.invalid_block_ids == ({3, 5} if connector else {3})
    assert runner.sample_tokens(None) is None  # a step without output, as in a pipeline
    assert told.calls == ["published"] * (2 * with_offload)


# ------------------------------------------------------------------------------------------- shared caches


def test_layers_of_a_slot_share_a_cache_and_others_do_not() -> None:
    plan = plan_buffers([CacheLayer(n, "main", 8) for n in range(5)], BufferOptions(2, (0,)))
    layouts = {f"model.layers.{n}.attn": "wide" for n in range(5)}
    caches = shared_caches(plan, layouts, lambda layout: [layout])
    found = list(caches.values())
    assert list(caches) == list(layouts)
    assert len({id(cache) for cache in found}) == 3
    assert found[1] is found[3]
    assert found[2] is found[4]
    some = {name: layout for name, layout in layouts.items() if "1" in name or "4" in name}
    assert len({id(cache) for cache in shared_caches(plan, some, lambda layout: [layout]).values()}) == 2


def test_caches_of_one_slot_that_differ_are_refused() -> None:
    plan = plan_buffers([CacheLayer(n, "main", 8) for n in range(3)], BufferOptions(1, (0,)))
    layouts = {"model.layers.0.attn": 4, "model.layers.1.attn": 5, "model.layers.2.attn": 6}
    with pytest.raises(RuntimeError, match=r"layers\.2\.attn: 6 differs from the cache .* with: 5"):
        shared_caches(plan, layouts, lambda width: [width])
