"""Prefixes written in the very step that reads them, preemption, and both under random delays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.golden.engine import worst_difference
from tests.golden.lab import OFFLOAD
from tests.golden.workloads import WORKLOADS
from vllm_kvoffload.runtime import DelayPlan

pytestmark = pytest.mark.slow

SEEDS = range(6)


@contextmanager
def delayed(engine, seed: int, max_ms: float) -> Iterator[None]:
    """Random delays on an engine that already runs."""
    lanes = [stream._stream._lane for stream in (engine.manager.host_rows, engine.manager.prefill)]
    for lane in lanes:
        lane._delays = DelayPlan(seed, max_ms)
    try:
        yield
    finally:
        for lane in lanes:
            lane._delays = None


@pytest.fixture
def same_step_engine(lab):
    lab.reference("same_step")  # before, so that the engine below stays
    return lab.engine(offload=OFFLOAD, max_num_batched_tokens=2048)


@pytest.fixture
def seen_in_step(same_step_engine, monkeypatch):
    """Query lengths of all requests whose prefix was computed in the same step."""
    seen = []
    original = same_step_engine.manager._prefixes_in_step

    def watched(batch, *args):
        in_step = original(batch, *args)
        seen.extend(int(length) for length in batch.query_lens[in_step])
        return in_step

    monkeypatch.setattr(same_step_engine.manager, "_prefixes_in_step", watched)
    return seen


def test_prefix_of_the_same_step(lab, seen_in_step):
    result, difference = lab.compare("same_step")
    assert difference == 0.0
    assert sorted(seen_in_step) == [1, 60, 150]  # one twin decodes at once, two prefill
    assert [outcome.cached_tokens for outcome in result.outcomes] == [0, 640, 640, 0, 640]


def _wrong_seeds(lab, engine) -> list[int]:
    wrong = []
    for seed in SEEDS:
        with delayed(engine, seed, 20):
            _, difference = lab.compare("same_step", max_num_batched_tokens=2048)
        if difference:
            wrong.append(seed)
    return wrong


def test_prefix_of_the_same_step_under_delays(lab, same_step_engine, seen_in_step):
    assert _wrong_seeds(lab, same_step_engine) == []
    assert sorted(set(seen_in_step)) == [1, 60, 150]


@pytest.mark.parametrize("which", ["prefill", "decode"])
def test_control_readers_in_the_step_that_do_not_wait(lab, same_step_engine, monkeypatch, which):
    original = same_step_engine.manager._prefixes_in_step

    def careless(batch, *args):
        in_step = original(batch, *args)
        in_step &= (batch.query_lens == 1) == (which == "prefill")
        return in_step

    monkeypatch.setattr(same_step_engine.manager, "_prefixes_in_step", careless)
    assert _wrong_seeds(lab, same_step_engine) != []


def test_preemption(lab):
    result, difference = lab.compare(
        "preempted", offload={"topk_buffer_size": 64, "ways": 32, "placement": "two_sets"}
    )
    assert len(set(result.trace.preempted)) >= 2
    assert all(outcome.finished for outcome in result.outcomes)
    assert difference == 0.0


def test_preempted_requests_hold_no_row(lab):
    under_test = lab.engine(offload=OFFLOAD, **WORKLOADS["preempted"].options)
    scheduler, rows = under_test.scheduler, under_test.manager.partitions
    waiting = []

    def check(_step, _outcomes):
        running = {request.request_id for request in scheduler.running}
        assert set(rows.live) <= running | scheduler.finished_req_ids
        waiting.extend(name for name in under_test.trace.preempted if name not in waiting)

    lab.run("preempted", offload=OFFLOAD, before_step=check)
    assert waiting


def test_preemption_equals_a_pool_where_nothing_is_preempted(lab):
    preempted = lab.run("preempted", offload=OFFLOAD)
    roomy = lab.run("preempted", offload=OFFLOAD, num_gpu_blocks_override=200)
    assert preempted.trace.preempted
    assert not roomy.trace.preempted
    assert worst_difference(preempted.outcomes, roomy.outcomes) < 1e-4


@pytest.mark.parametrize("seed", [3])
def test_random_delays(lab, monkeypatch, seed):
    for workload in ("preempted", "mixed"):
        lab.reference(workload)
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", f"{seed}:8")
    for workload in ("preempted", "mixed", "prefix", "abort"):
        # a copy of the options: an engine of its own, which sees the variable
        _, difference = lab.compare(
            workload, offload={"topk_buffer_size": 64, "prefill_buffers": 2 + seed % 2}
        )
        assert difference == 0.0, workload
    lab.close()
