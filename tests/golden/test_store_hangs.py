"""A load of the store that does not end, and ends at the worst moment: in a later step, which computes a
request's first tokens in the blocks that the load writes to.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from tests.golden.engine import Job, worst_difference
from tests.golden.store_lab import StoreRuns, store_engine, store_worker, transfer_config
from tests.golden.workloads import prompt
from vllm_kvoffload.connectors.ascend_store.lost_steps import LostStepScheduler
from vllm_kvoffload.layerwise import pipeline as pipeline_module
from vllm_kvoffload.platforms.cpu.layer_loads import AwaitedKV

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
SMALL = {"num_gpu_blocks_override": 6, "max_model_len": 256}
"""Blocks for one request: the next one gets those of the last."""
FIRST = Job(prompt(200, 21), max_tokens=4, prompt_logprobs=False)
SECOND = Job(prompt(200, 22), max_tokens=4, arrival=1)
"""Reads no prefix from the store."""
DEADLINE_S = 60.0


class HangingLoad:
    """The first load of layer 0 hangs until a step without prefixes has written the rows of its last layer
    and is about to read them: then it puts the rows of layer 0 there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worker = store_worker()
        self.hung, self.ended = False, False
        self._go, self._over = threading.Event(), threading.Event()
        self._copy, self._append = self.worker._store.copy, AwaitedKV.append
        monkeypatch.setattr(self.worker._store, "copy", self.copy)

        def late(kv: AwaitedKV, *args: object) -> None:
            self.append(kv, *args)

        monkeypatch.setattr(AwaitedKV, "append", late)
        pipeline = self.worker.pipeline
        monkeypatch.setattr(pipeline, "_limits", replace(pipeline._limits, deadline_s=0.2))
        monkeypatch.setattr(pipeline_module, "SETTLE_S", 0.05)

    def copy(self, spans, direction):
        if direction == "load" and not self.hung:
            self.hung = True
            assert self._go.wait(DEADLINE_S), "no step came that could be hurt"
            self._copy(spans, direction)
            self._over.set()
        else:
            self._copy(spans, direction)

    def append(self, kv, *args):
        self._append(kv, *args)
        first_step = self.worker._step and all(c.step.computed == 0 for c in self.worker._step)
        if self.hung and not self.ended and first_step and ".3." in kv._layer_name:
            self.ended = True
            self._go.set()
            assert self._over.wait(DEADLINE_S)


def run(runs: StoreRuns, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list, HangingLoad]:
    """Outcomes of FIRST, whose prefix is loaded, and SECOND; and those with a store that doesn't hang."""
    jobs = (FIRST, SECOND)
    reference = runs.engine.run(jobs)
    with monkeypatch.context() as patch:
        load = HangingLoad(patch)
        outcomes = runs.engine.run(jobs)
    assert load.ended
    assert load.worker.pipeline.stats.failed_requests >= 2
    assert worst_difference(runs.engine.run(jobs), reference) < TOLERANCE, "afterwards"
    return outcomes, reference, load


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_a_late_load_could_reach_is_not_believed(lab, monkeypatch, policy):
    transfer = transfer_config(1, [], kv_load_failure_policy=policy)
    with store_engine(lab, transfer, **SMALL) as runs:
        outcomes, reference, _ = run(runs, monkeypatch)
        if policy == "recompute":
            assert worst_difference(outcomes, reference) < TOLERANCE
        else:
            assert [outcome.token_ids for outcome in outcomes] == [[], []]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_control_vllms_own_scheduler_believes_it(lab, monkeypatch, policy):
    monkeypatch.setattr(LostStepScheduler, "_handle_invalid_blocks", Scheduler._handle_invalid_blocks)
    transfer = transfer_config(1, [], kv_load_failure_policy=policy)
    with store_engine(lab, transfer, **SMALL) as runs:
        outcomes, reference, _ = run(runs, monkeypatch)
        hurt = 0 if policy == "recompute" else 1
        assert worst_difference(outcomes[hurt:], reference[hurt:]) > TOLERANCE
