"""Prefill through shared buffers changes nothing that a user can see, with a cold store and a warm one."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from tests.golden.engine import Job, worst_difference
from tests.golden.lab import TINY
from tests.golden.store_lab import DEEP, store_engine, store_worker, transfer_config
from tests.golden.workloads import WORKLOADS, prompt
from vllm_kvoffload.connectors.ascend_store import worker as worker_module
from vllm_kvoffload.layerwise.pipeline import LayerPipeline
from vllm_kvoffload.store import StoreError

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Tolerance if the schedule differs from the reference's: sums are computed in another order."""

PLANS = {
    "1-none": (TINY, 1, [], 1 * 384 + 1 * 256),
    "2-first": (TINY, 2, [0], 3 * 384 + 2 * 256),
    "1-last": (TINY, 1, [-1], 2 * 384 + 1 * 256),
    "4-first": (DEEP, 4, [0], 5 * 384 + 3 * 256),
    "all": (TINY, 2, "all", 4 * 384 + 2 * 256),
}
"""Model, buffers, independent layers, and bytes of a token on the device: in TINY layers FFSS, with two
indexers."""


@pytest.mark.parametrize("plan", PLANS)
def test_same_results(lab, plan):
    """Chunked prefill, mixed batches and decode steps equal no offload to the bit; then prefixes."""
    model, shared, independent, row_bytes = PLANS[plan]
    workloads = ("mixed", "prefix") if plan != "2-first" else ("short", "long", "mixed", "prefix", "abort")
    with store_engine(lab, transfer_config(shared, independent), model, workloads) as runs:
        assert runs.engine.num_blocks == (32 << 20) // (64 * row_bytes)
        for workload in workloads:
            _, difference, did = runs.run(workload)
            assert difference <= (TOLERANCE if workload == "prefix" else 0.0), workload
            assert did["saved_bytes"] > 0
            assert (did["loaded_bytes"] > 0) == (plan != "all" or did["hit_tokens"] > 0)
            assert did["loaded_bytes"] == did["needed_load_bytes"]
            assert did["failed_requests"] == 0


def test_a_second_run_loads_what_the_first_one_stored(lab):
    with store_engine(lab, transfer_config(2, [0]), workloads=("prefix",)) as runs:
        cold, difference, _ = runs.run("prefix")
        assert difference < TOLERANCE
        again, difference, did = runs.run("prefix")
        assert difference < TOLERANCE
    # Whole blocks, and never the last token.
    assert [outcome.cached_tokens for outcome in again] == [640, 704, 639, 640, 576, 192, 192]
    assert did["hit_tokens"] == sum(outcome.cached_tokens for outcome in again)
    assert did["loaded_bytes"] >= did["hit_tokens"] * 2048
    assert sum(outcome.cached_tokens for outcome in cold) < did["hit_tokens"]


def test_preemption(lab):
    options = WORKLOADS["preempted"].options
    reference = lab.reference("preempted").outcomes
    with store_engine(lab, transfer_config(1, []), **options) as runs:
        outcomes, _, did = runs.run("preempted")
        assert len(set(runs.engine.trace.preempted)) >= 2
        assert worst_difference(outcomes, reference) < TOLERANCE
        assert all(outcome.finished for outcome in outcomes)
        assert did["hit_tokens"] > 0, "a preempted request found its blocks in the store"


def test_drafts(lab):
    """An MTP layer takes part; later drafts of a step find their buffer as it is. What a step computed over
    KV that could not be loaded is not believed, though vLLM asks for losses before the step is over."""
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    transfer = transfer_config(2, [0], kv_load_failure_policy="recompute")
    with store_engine(lab, transfer, "glm-tiny-mtp", speculative_config=drafts) as runs:
        outcomes = [runs.engine.run(WORKLOADS["mixed"].jobs) for _ in range(2)]
        accepted = sum(runs.engine.trace.accepted)
        prefixed = (Job(prompt(200, 5), max_tokens=8, prompt_logprobs=False),)
        found = runs.engine.run(prefixed)
        with _one_load_fails() as worker:
            lost = runs.engine.run(prefixed)
        assert worker.pipeline.stats.failed_requests == 1
        assert worst_difference(lost, found) < TOLERANCE
    reference = lab.run("mixed", "glm-tiny-mtp", speculative_config=drafts)
    assert accepted > 0
    assert accepted == sum(reference.trace.accepted)
    for got in outcomes:
        assert worst_difference(got, reference.outcomes) < TOLERANCE


@contextmanager
def _one_load_fails():
    worker = store_worker()
    store, failures = worker._store, [StoreError("of all requests"), StoreError("and of the one alone")]
    copy = store.copy

    def refuse(spans, direction):
        if direction == "load" and failures:
            raise failures.pop()
        copy(spans, direction)

    store.copy = refuse
    yield worker
    store.copy = copy


def test_random_delays(lab, monkeypatch):
    """With pins that are renewed before every step."""
    lab.reference("mixed")
    monkeypatch.setattr(worker_module, "RENEW_S", float("inf"))
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "3:4")
    with store_engine(lab, transfer_config(2, [], layerwise_prefetch_layers=8)) as runs:
        assert runs.run("mixed")[1] == 0.0
    lab.close()


def _skip_waits(monkeypatch):
    monkeypatch.setattr(LayerPipeline, "_acquire", lambda self, position: self.gates.occupy(position))
    monkeypatch.setattr(LayerPipeline, "_join_load", lambda *_args: None)


def _skip_loads(monkeypatch):
    move = LayerPipeline._move

    def careless(self, rows, position, direction, state):
        return move(self, rows, position, direction, state) if direction == "save" else 0

    monkeypatch.setattr(LayerPipeline, "_move", careless)


def _late_hook(monkeypatch):
    """As vLLM's own hook: the layer's new rows are written before its memory is free."""
    from vllm_kvoffload.platforms.cpu import layer_loads

    save = LayerPipeline._save

    def slowly(self, *args):
        time.sleep(0.005)  # on a quiet machine a save is over before the next layer has rows
        save(self, *args)

    monkeypatch.setattr(layer_loads, "await_layer", lambda _name: None)
    monkeypatch.setattr(LayerPipeline, "_save", slowly)


@pytest.mark.parametrize("break_it", [_skip_waits, _skip_loads, _late_hook])
def test_control_what_is_not_awaited_shows(lab, monkeypatch, break_it):
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "7:4")
    lab.reference("mixed")
    with store_engine(lab, transfer_config(1, [], layerwise_prefetch_layers=8)) as runs:
        break_it(monkeypatch)
        assert runs.run("mixed")[1] > TOLERANCE
    monkeypatch.undo()
    lab.close()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_block_that_is_gone_costs_its_request_only(lab, policy):
    """Its KV is recomputed or it ends with an error; never wrong tokens; other requests are unaffected."""
    transfer = transfer_config(2, [0], kv_load_failure_policy=policy)
    with store_engine(lab, transfer, workloads=("long",)) as runs:
        worker = store_worker()
        open_read, stolen = worker._store.open_read, []

        def steal(step, _outcomes):
            if step == 6:
                (name,) = (name for name in worker._requests if name.startswith("job-1"))
                worker._unpin(worker._requests[name])
                stolen.append(worker._requests[name].hashes[2])

        def without(keys, lease_s):
            found = open_read(keys, lease_s)
            if stolen:
                gone = worker._keys.key(stolen[0])
                if gone in keys:
                    stolen.clear()
                    return [None if key == gone else pin for key, pin in zip(keys, found, strict=True)]
            return found

        worker._store.open_read = without
        outcomes = runs.engine.run(WORKLOADS["long"].jobs, before_step=steal)
        worker._store.open_read = open_read
        assert worker.pipeline.stats.failed_requests == 1
        reference = lab.reference("long").outcomes
        whole = [0, 1, 2] if policy == "recompute" else [0, 2]
        for n in whole:
            assert outcomes[n].token_ids == reference[n].token_ids
        if policy == "fail":
            assert len(outcomes[1].token_ids) < len(reference[1].token_ids)
        _, difference, _ = runs.run("mixed")
        assert difference == 0.0


def test_a_store_that_is_down_is_an_error_and_not_a_wrong_answer(lab):
    with store_engine(lab, transfer_config(2, [0]), workloads=("mixed",)) as runs:
        worker = store_worker()
        store = worker._store

        def refuse(*_args):
            raise StoreError("down")

        kept = store.copy
        store.copy = refuse
        outcomes = runs.engine.run(WORKLOADS["long"].jobs)
        assert all(outcome.finished for outcome in outcomes)
        assert all(len(outcome.token_ids) <= 1 for outcome in outcomes)
        store.copy = kept
        _, difference, did = runs.run("mixed")
        assert difference == 0.0
        assert did["failed_requests"] == 0
