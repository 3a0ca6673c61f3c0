"""Run inside the Ascend environment by test_ascend.py: decode in full graphs.

Captured by upstream's graph wrapper in upstream's dummy runs, as vLLM does at start; a replay runs what was
written down then, and no layer (`simulated_graph.py`). Results must be those of the same steps layer by
layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from vllm.config import CUDAGraphMode

from tests.ascend.adapter_model import TOPK, Adapter, Setup, common_metadata, drafted, make_step, patch_tables
from tests.ascend.graph_engine import SIZES, Engine
from tests.ascend.kernel_stand_ins import CoreKernels, TwinKernels
from vllm_kvoffload.platforms.ascend import offload
from vllm_kvoffload.platforms.ascend.attention import KVOffloadSFAImpl
from vllm_kvoffload.platforms.ascend.kernels import DeviceBatch, StepBuffers
from vllm_kvoffload.runtime.npu import DeviceLane
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.step_state import StepState

from tests.ascend.simulated_device import NPU, plain, syncs, watched  # isort: skip
from tests.ascend.simulated_graph import Graph  # isort: skip
from tests.ascend.simulated_npu import install  # isort: skip

TWIN = os.environ.get("KVOFFLOAD_KERNELS_TWIN", "")
SETUP = Setup("portable", device=NPU, kernels=CoreKernels, seqs=4)
SETUPS = {
    "rows by torch": SETUP,
    "rows by MemFabric": replace(SETUP, movement="sparse_copy"),
    "bf16": replace(SETUP, dtype=torch.bfloat16),
    "every layer chooses": replace(SETUP, kinds=("full",) * 4),
}

Step = dict[str, tuple[int, int]]


def decodes(first: Step, count: int) -> list[Step]:
    return [{name: (done + n, 1) for name, (done, _) in first.items()} for n in range(count)]


STEPS: list[Step] = [
    {"a": (0, 40), "b": (0, 25)},
    *decodes({"a": (40, 1), "b": (25, 1)}, 3),
    {"a": (43, 1), "b": (28, 1), "c": (0, 30)},
    *decodes({"a": (44, 1), "b": (29, 1), "c": (30, 1)}, 22),  # three run as four
    *decodes({"c": (52, 1), "a": (66, 1)}, 3),  # b is finished, and the others change places
    *decodes({"a": (69, 1)}, 2),
    {"a": (71, 1), "b": (0, 20)},  # another b, in the row that was freed last
    *decodes({"b": (20, 1), "a": (72, 1), "c": (55, 1)}, 8),
    {"b": (28, 1), "a": (80, 9)},  # a session continues: a graph's host pool rows are read back
    *decodes({"b": (29, 1), "a": (89, 1)}, 3),
]
"""Positions cross blocks of 16 tokens; rows have 64 slots, so that a's tokens no longer all fit."""
ENDS = {27: "b"}
"""Requests that finish before each step."""


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch, TOPK, [])
    patch_tables(monkeypatch)
    yield from (None for _ in watched())


def in_graphs(engine: Engine, steps: int | None = None) -> list[torch.Tensor]:
    results = []
    for number, step in enumerate(STEPS[:steps]):
        if number in ENDS:
            engine.adapter.manager.release(ENDS[number])
        results.append(plain(engine.run(make_step(step))))
    return results


def padding(number: int) -> int:
    """Padding of a step that runs in a graph: a projection of other tokens rounds differently."""
    queries = [queries for _, queries in STEPS[number].values()]
    return min(size for size in SIZES if size >= len(queries)) - len(queries) if max(queries) == 1 else 0


def layer_by_layer(adapter: Adapter, steps: int | None = None) -> list[torch.Tensor]:
    results = []
    for number, step in enumerate(STEPS[:steps]):
        if number in ENDS and adapter.offload is not None:
            adapter.manager.release(ENDS[number])
        made = make_step(step)
        hidden = made["hidden"].to(adapter.setup.dtype)
        for output in adapter.run(made, padding(number)):
            hidden = hidden + output
        results.append(hidden)
    return results


def counters(adapter: Adapter) -> dict[str, float]:
    for _ in range(2):  # counters of the device are read back one join late
        adapter.manager.release(())
    return adapter.manager.stats.as_dict()


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[int]:
    pairs = zip(found, expected, strict=True)
    return [number for number, pair in enumerate(pairs) if not torch.equal(*pair)]


def host_pool(adapter: Adapter) -> list[torch.Tensor]:
    adapter.manager.host_rows.join()
    return [part for rows in adapter.host for part in rows.parts]


# ---------------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("name", SETUPS)
def test_full_graphs_give_what_layers_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SETUPS[name]
    without = layer_by_layer(Adapter(Setup(dtype=setup.dtype, kinds=setup.kinds)))
    eager = Adapter(setup)
    expected = layer_by_layer(eager)
    engine = Engine(setup, monkeypatch)
    found = in_graphs(engine)
    assert differences(expected, without) == []
    assert differences(found, expected) == []
    assert counters(engine.adapter) == counters(eager)
    assert counters(eager)["misses"] > 100
    assert all(map(torch.equal, host_pool(engine.adapter), host_pool(eager)))
    pure = [max(queries for _, queries in step.values()) == 1 for step in STEPS]
    assert engine.modes == ["FULL" if one else "NONE" for one in pure]
    assert sum(graph.replays for graph in engine.graphs) == sum(pure)
    assert all(graph.replays for graph in engine.graphs)
    for adapter in (eager, engine.adapter):
        adapter.close()


@pytest.mark.skipif(not TWIN, reason="no library of the kernels for the CPU twin")
def test_the_kernels_themselves_in_full_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(SETUP, slots=1024, kernels=partial(TwinKernels, library=TWIN))
    eager, engine = Adapter(setup), Engine(setup, monkeypatch)
    assert differences(in_graphs(engine, 10), layer_by_layer(eager, 10)) == []
    assert counters(engine.adapter) == counters(eager)
    assert engine.adapter.kernels.reported == []
    for adapter in (eager, engine.adapter):
        adapter.close()


@pytest.mark.parametrize("drafts", [1, 3])
def test_full_graphs_between_draft_passes(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's steps run in graphs, padded from two requests or one to four; draft passes don't."""
    setup = replace(SETUP, drafts=drafts, slots=128)
    eager, engine = Adapter(setup), Engine(setup, monkeypatch, sizes=[4])
    for number, (step, rejected) in enumerate(drafted(drafts)):
        made = make_step(step)
        uniform = all(queries == 1 + drafts for _, queries in step.values())
        hidden, padding = made["hidden"], (4 - len(step)) * (1 + drafts) if uniform else 0
        for output in eager.run(made, padding):
            hidden = hidden + output
        assert torch.equal(plain(engine.run(made)), hidden), number
        assert engine.modes[-1] == ("FULL" if uniform else "NONE")
        engine.adapter.common = common_metadata(made, padding, setup)
        ours, theirs = (adapter.draft(made, rejected) for adapter in (engine.adapter, eager))
        assert all(map(torch.equal, ours, theirs)), number
    assert engine.modes.count("FULL") == 13
    assert counters(engine.adapter) == counters(eager)
    assert all(map(torch.equal, host_pool(engine.adapter), host_pool(eager)))
    for adapter in (eager, engine.adapter):
        adapter.close()


def test_capture_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SETUP, monkeypatch)
    manager = engine.adapter.manager
    assert len(engine.graphs) == len(SIZES)
    assert not any(graph.replays for graph in engine.graphs)
    assert set(counters(engine.adapter).values()) == {0}
    assert manager.partitions.live == ()
    assert all(bool((plain(pool.residency.tags) == -1).all()) for pool in manager.hot.groups)
    assert not any(bool(part.any()) for part in host_pool(engine.adapter))
    engine.close()


def test_a_replay_runs_no_layer_and_the_host_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SETUP, monkeypatch)
    ran: list[Any] = []
    waits: list[list[str]] = []
    forward, replay, describe = KVOffloadSFAImpl.forward, engine.runner._model_forward, offload.describe_pass

    def noted(impl: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(impl)
        return forward(impl, *args, **kwargs)

    def watched_forward(*args: Any) -> Any:
        syncs.take()
        out = replay(*args)
        waits.append(syncs.take())
        return out

    monkeypatch.setattr(KVOffloadSFAImpl, "forward", noted)

    def read_inputs(metadata: Any) -> Any:
        made = describe(metadata)
        syncs.take()  # it waits for them
        return made

    monkeypatch.setattr(engine.runner, "_model_forward", watched_forward)
    monkeypatch.setattr(offload, "describe_pass", read_inputs)
    in_graphs(engine, 1)
    ran.clear()
    waits.clear()
    for step in STEPS[1:4]:
        engine.run(make_step(step))
    assert (ran, waits) == ([], [[]] * 3)
    engine.close()


def test_the_next_step_waits_for_what_a_graph_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SETUP, monkeypatch)
    in_graphs(engine, 1)
    engine.adapter.npu.busy = True
    engine.run(make_step(STEPS[1]))
    written = engine.adapter.manager.host_rows._written
    assert len(written) == 4
    assert not any(event.query() for event in written if event is not None)
    engine.adapter.npu.busy = False
    assert all(event is not None and event.query() for event in written)
    engine.close()


# -------------------------------------------------------------------------- steps that go layer by layer


@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE])
def test_a_prefix_that_is_written_in_the_same_step(
    mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """c decodes at once, over blocks of which a fills the last one in this very step."""
    adapters = [Adapter(Setup()), Adapter(SETUP)]
    engine = Engine(SETUP, monkeypatch, mode)
    steps = [{"a": (0, 40), "b": (0, 25)}, *decodes({"a": (40, 1), "b": (25, 1)}, 7)]
    steps += decodes({"a": (47, 1), "b": (32, 1), "c": (48, 1)}, 4)
    for step in steps:
        made = make_step(step)
        if "c" in step:
            made["blocks"][2, :3] = made["blocks"][0, :3]
        found = plain(engine.run(made))
        for adapter in adapters:
            hidden = made["hidden"]
            for output in adapter.run(made, pad=int("c" in step)):
                hidden = hidden + output
            assert torch.equal(found, hidden)
    assert engine.modes == ["NONE", *["FULL"] * 7, "NONE", *["FULL"] * 3]
    for adapter in (*adapters, engine.adapter):
        adapter.close()


def test_a_replay_that_failed_half_way_can_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = Adapter(SETUP)
    expected = layer_by_layer(eager, 12)
    engine = Engine(SETUP, monkeypatch)

    def half(graph: Graph) -> None:
        for call in graph.calls[: len(graph.calls) // 2]:
            call()
        raise OSError("planted")

    for number, step in enumerate(STEPS[:12]):
        if number in (2, 8):
            with monkeypatch.context() as broken:
                broken.setattr(Graph, "replay", half)
                with pytest.raises(OSError, match="planted"):
                    engine.run(make_step(step))
            manager = engine.adapter.manager
            assert manager.delivery.partly_served == {pool.group.index for pool in manager.hot.groups}
        if number == 4:
            with monkeypatch.context() as broken:
                broken.setattr(engine.adapter.impls[2], "_attend", lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    engine.run(make_step(step))
        assert torch.equal(plain(engine.run(make_step(step))), expected[number])
    for adapter in (eager, engine.adapter):
        adapter.close()


def test_dummy_runs_in_between_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without work replays a graph while other DP ranks have some. Its requests may be alive."""
    eager = Adapter(SETUP)
    expected = layer_by_layer(eager, 9)
    engine = Engine(SETUP, monkeypatch)
    for number, step in enumerate(STEPS[:9]):
        assert torch.equal(plain(engine.run(make_step(step))), expected[number])
        engine.dummy()
    assert sum(graph.replays for graph in engine.graphs) == 7 + 9
    assert counters(engine.adapter) == counters(eager)
    for adapter in (eager, engine.adapter):
        adapter.close()


def test_without_plans_on_the_device_nothing_runs_in_a_full_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused at start; were it not, results would be right."""
    setup = replace(SETUP, kernels=None)
    engine = Engine(setup, monkeypatch)
    expected = layer_by_layer(Adapter(Setup()), 6)
    assert differences(in_graphs(engine, 6), expected) == []
    assert engine.graphs == []
    assert set(engine.modes) == {"NONE"}
    engine.close()


# ---------------------------------------------------------------------------------------------- controls


def wrong(monkeypatch: pytest.MonkeyPatch, engine: Engine, steps: int = 12) -> bool:
    """Whether anything differs from the same steps layer by layer, or a kernel's stand-in finds it wrong."""
    try:
        found = in_graphs(engine, steps)
    except ValueError:
        engine.close()
        return True
    counted, pool = counters(engine.adapter), host_pool(engine.adapter)
    engine.close()
    monkeypatch.undo()
    install(monkeypatch, TOPK, [])
    patch_tables(monkeypatch)
    eager = Adapter(SETUP)
    expected = layer_by_layer(eager, steps)
    same = counted == counters(eager) and all(map(torch.equal, pool, host_pool(eager)))
    eager.close()
    return bool(differences(found, expected)) or not same


FIELDS = [field.name for field in fields(DeviceBatch)]


@pytest.mark.parametrize("field", sorted({*FIELDS} - {"tokens", "start_loc"}))  # they never change
def test_control_a_buffer_that_is_not_filled_again(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fill = Engine(SETUP, monkeypatch), StepBuffers.fill

    def forgetful(buffers: StepBuffers, step: StepState) -> DeviceBatch:
        before = buffers._ints._there.clone()
        batch = fill(buffers, step)
        if step.in_graph:
            there, start = getattr(batch, field), buffers._ints._starts[FIELDS.index(field)]
            there.copy_(before[start : start + there.numel()].view(there.shape))
        return batch

    monkeypatch.setattr(StepBuffers, "fill", forgetful)
    assert wrong(monkeypatch, engine)


def test_control_bookkeeping_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SETUP, monkeypatch)
    monkeypatch.setattr(SparseKVManager, "leave_graph", lambda _: None)
    assert wrong(monkeypatch, engine)


def test_control_counters_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(SETUP, monkeypatch)
    monkeypatch.setattr("vllm_kvoffload.platforms.ascend.kernels.DeviceCounters.replayed", lambda _: None)
    in_graphs(engine, 4)
    before = counters(engine.adapter)["hits"]
    for step in decodes({"a": (43, 1), "b": (28, 1)}, 2):
        engine.run(make_step(step))
    assert counters(engine.adapter)["hits"] == before
    engine.close()


@pytest.mark.parametrize("what", ["decode_slots", "decode_partitions"])
def test_control_padding_with_what_is_a_requests(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, padded = Engine(SETUP, monkeypatch), StepState.padded

    def live(step: StepState, requests: int, queries: int) -> StepState:
        made = padded(step, requests, queries)
        values = getattr(made, what).clone()
        values[len(step.leases) :] = values[0]
        return replace(made, **{what: values})

    monkeypatch.setattr(StepState, "padded", live)
    assert wrong(monkeypatch, engine)


def test_control_a_stream_that_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    join = DeviceLane.join

    def forgetful(lane: DeviceLane, event: Any) -> None:
        if lane._npu.graph_calls is None:
            join(lane, event)

    monkeypatch.setattr(DeviceLane, "join", forgetful)
    engine = Engine(SETUP, monkeypatch)
    with pytest.raises(RuntimeError, match="never joined"):
        in_graphs(engine, 4)
    engine.close()


def test_control_a_step_that_is_not_begun_before_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's runner alone: a graph keeps the step that it was captured in."""
    engine = Engine(SETUP, monkeypatch)
    expected = layer_by_layer(Adapter(Setup()), 5)
    in_graphs(engine, 2)
    engine.runner.offload = None
    found = [plain(engine.run(make_step(step))) for step in STEPS[2:4]]
    assert differences(found, expected[2:4]) == [0, 1]
    engine.close()
