"""The pipeline under random delays, its failures, and how much it moves."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.layerwise.pipeline_world import BLOCK, LAYERS, StoreError, World, accept, run, value
from vllm_kvoffload.layerwise import pipeline as module
from vllm_kvoffload.layerwise.pipeline import LayerPipeline, PipelineLimits, PipelineStep, Rows, pieces
from vllm_kvoffload.layerwise.slot_gate import Blocker, SlotGates
from vllm_kvoffload.store.base import CopySpans

SEEDS = 500
CASES = [
    {"shared": 1, "independent": ()},
    {"shared": 1, "independent": (0, -1)},
    {"shared": 2, "independent": (0,)},
    {"shared": 3, "independent": ()},
    {"shared": 2, "independent": (), "readers": True},
]


def case(seed: int) -> dict:
    return CASES[seed % len(CASES)]


@pytest.mark.slow
def test_random_delays():
    wrong = {seed: found for seed in range(SEEDS) if (found := run(seed, max_ms=0.6, **case(seed)))}
    assert wrong == {}


def _no_save_in_gates(monkeypatch):
    original = SlotGates.hold
    monkeypatch.setattr(
        SlotGates, "hold", lambda self, position, what: what == "save" or original(self, position, what)
    )


def _no_wait_for_loads(monkeypatch):
    monkeypatch.setattr(LayerPipeline, "_join_load", lambda *_args: None)


def _no_gate_before_loads(monkeypatch):
    monkeypatch.setattr(LayerPipeline, "_acquire", lambda self, position: self.gates.occupy(position))


def _no_guard(monkeypatch):
    monkeypatch.setattr(LayerPipeline, "use_guard", lambda *_args: None)


def _saves_after_the_next_load(monkeypatch):
    """Occupants are forgotten too early: released before the copy instead of after it."""
    original = LayerPipeline._move

    def early(self, rows, position, direction, state):
        if direction == "save":
            self.gates.release(position, module.SAVE)
        return original(self, rows, position, direction, state)

    monkeypatch.setattr(LayerPipeline, "_move", early)


@pytest.mark.parametrize(
    "plant",
    [_no_save_in_gates, _no_wait_for_loads, _no_gate_before_loads, _no_guard, _saves_after_the_next_load],
)
def test_control_a_missing_wait_is_found(monkeypatch, plant):
    plant(monkeypatch)
    options = CASES[-1] if plant is _no_guard else CASES[0]
    limits = PipelineLimits(prefetch_layers=8, deadline_s=0.3)
    found = (seed for seed in range(200) if run(seed, max_ms=3.0, limits=limits, **options))
    assert next(found, None) is not None


def test_nothing_is_loaded_that_a_buffer_still_holds():
    """Four chunks. Shared layers load their prefix again in each, the independent one never."""
    world = World(1, shared=1, independent=(0, -1), delays=False)
    world.add(16)
    for _ in range(4):
        world.step({0: 4})
    world.close()
    stats, memory = world.pipeline.stats, world.pipeline._memory
    shared = sum(layer.row_bytes for n, layer in enumerate(memory) if world.plan.is_shared(n))
    assert stats.loaded_bytes == (4 + 8 + 12) * shared
    assert stats.saved_bytes == 16 * sum(layer.row_bytes for layer in memory)
    assert stats.ratio == 1.0
    assert not world.wrong


def test_partial_blocks_are_saved_again():
    world = World(1, shared=1, independent=(), delays=False)
    world.add(12)
    world.step({0: 5})  # one block, and a row of the next
    world.step({0: 3})  # which is saved again with three more
    world.close()
    row = sum(layer.row_bytes for layer in world.pipeline._memory)
    assert world.pipeline.stats.saved_bytes == (5 + 4) * row
    assert world.pipeline.stats.needed_save_bytes == 8 * row
    assert not world.wrong


def test_a_failed_load_costs_its_request_only():
    world = World(2, shared=1, independent=(), delays=False)
    bad, good = world.add(12), world.add(12)
    world.step({0: 6, 1: 6})

    def refuse(address, direction):
        if direction == "load" and bad.objects[0] <= address < bad.objects[0] + 16 * BLOCK * 8:
            raise StoreError("gone")

    world.store.refuse = refuse
    before = world.pipeline.stats.saved_bytes
    lost = world.step({0: 2, 1: 2})
    assert list(lost) == ["0"]
    assert "load of layer 0: gone" in lost["0"]
    world.store.refuse = accept
    assert world.step({1: 2}) == {}
    assert good.computed == 10
    world.check_store()
    assert not world.wrong
    # The failed request's rows were not saved: they may be garbage.
    row = sum(layer.row_bytes for layer in world.pipeline._memory)
    assert world.pipeline.stats.saved_bytes - before == (4 + 2) * row
    world.close()


def test_a_failed_save_costs_its_request_only():
    world = World(2, shared=2, independent=(0,), delays=False)
    world.add(12), world.add(12)
    start = world.requests[1].objects[0]

    def refuse(address, direction):
        if direction == "save" and start <= address < start + 16 * BLOCK * 8:
            raise StoreError("full")

    world.store.refuse = refuse
    assert list(world.step({0: 4, 1: 4})) == ["1"]
    world.close()


def test_a_request_that_is_not_stored_is_computed_all_the_same():
    """Remote readers may have it, so its prefix is loaded into all layers."""
    world = World(2, shared=1, independent=(), delays=False, readers=True)
    world.add(12)
    assert world.step({0: 8}) == {}

    def refuse(_address, direction):
        if direction == "save":
            raise StoreError("full")

    world.store.refuse = refuse
    assert "full" in world.step({0: 2})["0"]
    assert world.pipeline.invalid == set()
    assert world.readers.given_up == {}
    assert world.pipeline.stats.loaded_bytes == 8 * sum(layer.row_bytes for layer in world.pipeline._memory)
    world.close()


def test_a_copy_that_hangs_ends_requests_and_not_the_engine():
    world = World(3, shared=1, independent=(), delays=False, limits=PipelineLimits(deadline_s=0.2))
    world.add(12), world.add(12)
    assert world.step({0: 4, 1: 4}) == {}
    gate = threading.Event()
    world.store.refuse = lambda _address, direction: gate.wait(10) if direction == "save" else None
    begin = time.monotonic()
    lost = world.step({0: 4})
    assert "0" in lost
    assert not world.pipeline.drained
    assert "a copy of an earlier step does not end" in world.step({1: 4})["1"]
    assert time.monotonic() - begin < 8
    gate.set()
    world.runtime.synchronize()
    world.store.refuse = accept
    assert world.step({1: 4}) == {}
    assert world.pipeline.drained
    world.close()


@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_copy_that_hangs_costs_one_deadline_and_not_one_for_each_layer(direction):
    limits = PipelineLimits(deadline_s=1.0)
    world = World(7, shared=1, independent=(), delays=False, limits=limits)
    bad, other = world.add(12), world.add(4)
    assert world.step({0: 4}) == {}
    gate = threading.Event()
    world.store.refuse = lambda _address, what: gate.wait(60) if what == direction else None
    begin = time.monotonic()
    assert set(world.step({0: 4, 1: 2})) == {"0", "1"}
    assert time.monotonic() - begin < limits.deadline_s * LAYERS
    assert bad.computed == 4
    assert other.computed == 0
    gate.set()
    world.runtime.synchronize()
    world.store.refuse = accept
    world.failed.clear()
    assert world.step({0: 4, 1: 2}) == {}
    assert world.pipeline.drained
    world.check_store()
    assert not world.wrong
    world.close()


def test_shutting_down_while_a_load_waits_for_its_memory():
    """The load gives up when the streams take nothing any more: that is no failure of theirs."""
    world = World(6, shared=1, independent=(), delays=False, limits=PipelineLimits(deadline_s=0.3))
    request = world.add(8)
    assert world.step({0: 4}) == {}
    gate = threading.Event()
    world.store.refuse = lambda _address, what: gate.wait(60) if what == "save" else None
    loads, saves = ([(request.objects[n], request.blocks[n], 0, BLOCK, 0)] for n in (0, 1))
    world.pipeline.begin(PipelineStep(("0",), Rows.of(loads), Rows.of([]), Rows.of(saves), BLOCK))
    first = world.plan.layers[0].index
    world.pipeline.wait_layer(first)
    world.pipeline.layer_done(first)  # its save hangs, and the next layer's load waits for that
    threading.Timer(1.0, gate.set).start()
    world.runtime.shutdown(30)
    assert "its memory was not free" in world.pipeline._state.hung


def test_a_reader_that_never_reads_loses_its_transfer_and_not_the_request():
    world = World(
        4, shared=1, independent=(), delays=False, readers=True, limits=PipelineLimits(deadline_s=0.5)
    )
    world.pipeline.use_guard(world.readers, 0.1)
    world.add(8)
    world.readers.read = lambda _layer, _name: None
    assert world.step({0: 4}) == {}
    assert "its memory was not free" in world.readers.given_up["0"]
    world.close()


def test_layers_that_did_not_run_are_moved_all_the_same():
    world = World(5, shared=2, independent=(), delays=False)
    world.add(8)
    world.step({0: 4})
    skipped = world.plan.layers[5].index
    wait, done = world.pipeline.wait_layer, world.pipeline.layer_done
    inside = []

    def only_others(call):
        return lambda index: call(index) if index != skipped or inside else None

    finish = world.pipeline.finish
    world.pipeline.wait_layer, world.pipeline.layer_done = only_others(wait), only_others(done)
    world.pipeline.finish = lambda: inside.append(1) or finish()
    original = world._compute
    world._compute = lambda position, *rest: None if position == 5 else original(position, *rest)
    assert world.step({0: 4}) == {}
    cache = world._caches(5)[0]
    assert cache[world.requests[0].blocks[0]].tolist() == [value(5, 0, token) for token in range(4)]
    world.close()


def test_pieces():
    spans = CopySpans(*(np.array(column, dtype=np.int64) for column in ([0, 1000], [5000, 7000], [25, 8])))
    assert pieces(spans, 0, 0) == [spans]
    cut = pieces(spans, 2, 10)
    assert [len(piece) for piece in cut] == [2, 2]
    assert np.concatenate([piece.object_address for piece in cut]).tolist() == [0, 10, 20, 1000]
    assert np.concatenate([piece.local_address for piece in cut]).tolist() == [5000, 5010, 5020, 7000]
    assert np.concatenate([piece.nbytes for piece in cut]).tolist() == [10, 10, 5, 8]


def test_calls_of_the_store_are_bounded():
    world = World(6, shared=1, independent=(), delays=False, limits=PipelineLimits(max_runs=3))
    world.add(24)
    world.step({0: 24})
    assert max(count for _, count in world.store.calls) == 3
    world.check_store()
    assert not world.wrong
    world.close()


def test_messages_name_the_blocker():
    assert str(Blocker("read", 3, "cmpl-1")) == "read of request cmpl-1, layer at position 3"
