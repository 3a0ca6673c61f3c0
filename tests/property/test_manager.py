"""The offload core as a whole, without vLLM: random programs under random delays, and planted bugs.

Every row that attention gets is compared with the one it asked for, whatever scheduling, preemption, prefix
caching, rejected drafts, failing steps and side streams did before.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.property.manager_model import ROW_BYTES, Scheduler, Setup, StepPlan, make_plans, setup_for
from tests.property.manager_programs import Boom, Rank, run_failing_program, run_program, run_rank_pair
from vllm_kvoffload import ops
from vllm_kvoffload.policies import POLICIES
from vllm_kvoffload.runtime import CPURuntime, DelayPlan, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.settings.offload import DELIVERIES
from vllm_kvoffload.sparse.capacity import CapacityInputs
from vllm_kvoffload.sparse.host_rows import HostRows

pytestmark = pytest.mark.timeout(300)

SEEDS = range(15)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# ------------------------------------------------------------------------------------------- the real code


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_programs_get_their_rows_and_leave_nothing_behind(delivery: str) -> None:
    log: Counter[str] = Counter()
    for seed in SEEDS:
        log.update(run_program(setup_for(seed, delivery), seed))
    # The programs did go through what this is about.
    for what in ("prefix_in_step", "preempted", "rejected", "aborted", "finished", "idle", "resumed"):
        assert log[what] >= 5, (what, log)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_rank_pairs_get_their_rows(delivery: str) -> None:
    for seed in SEEDS:
        run_rank_pair(setup_for(seed, delivery), seed)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_steps_after_a_failed_step_get_their_rows(delivery: str) -> None:
    failed = sum(run_failing_program(setup_for(seed, delivery), seed).get("failed", 0) for seed in SEEDS)
    assert failed > 30


def test_a_step_costs_no_wait_for_prefixes_that_were_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a prefix that is written in the same step is waited for: the rest streams ahead."""
    monkeypatch.setattr(HostRows, "await_layer", lambda *_: pytest.fail("waited"))
    log = run_program(Setup(max_num_seqs=1), seed=3)
    assert log["finished"] > 1


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis decides what users, scheduler and failures do; finds short programs where seeds find any."""

    @initialize(seed=st.integers(0, 10_000), delivery=st.sampled_from(DELIVERIES), delayed=st.booleans())
    def start(self, seed: int, delivery: str, delayed: bool) -> None:
        self.setup = setup_for(seed, delivery)
        self.scheduler = Scheduler(self.setup, random.Random(seed))
        self.runtime = CPURuntime(DelayPlan(seed, max_ms=0.5) if delayed else None)
        self.rank = Rank(self.setup, self.runtime, self.setup.host_layers())

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 40),
        own=st.integers(1, 12),
        to_generate=st.integers(1, 12),
        twins=st.integers(1, 2),
    )
    def add(self, family: int, shared: int, own: int, to_generate: int, twins: int) -> None:
        for _ in range(twins):
            self.scheduler.add(family, shared, own, to_generate)

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 7))
    def preempt(self, which: int) -> None:
        self.scheduler.preempt(self.scheduler.running[which % len(self.scheduler.running)])

    @precondition(lambda self: self.scheduler.live)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        self.scheduler.abort(self.scheduler.live[which % len(self.scheduler.live)])

    @precondition(lambda self: self.scheduler.idle)
    @rule(which=st.integers(0, 7), count=st.integers(1, 10))
    def resume_session(self, which: int, count: int) -> None:
        self.scheduler.resume_session(self.scheduler.idle[which % len(self.scheduler.idle)], count)

    @rule(steps=st.integers(1, 6))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            plan = self.scheduler.schedule()
            if plan is not None:
                self.rank.run(plan)

    @rule(layer=st.integers(0, 4), part=st.integers(0, 2), again=st.booleans())
    def fail(self, layer: int, part: int, again: bool) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            return
        try:
            self.rank.run(plan, (layer, part))
        except Boom:
            if again:
                self.rank.run(plan.again())
            else:
                self.scheduler.forget_step(plan)

    def teardown(self) -> None:
        if hasattr(self, "rank"):
            self.rank.close(self.scheduler)
            self.runtime.shutdown()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


# ------------------------------------------------------------------------------------- failing side streams


class Faulty:
    """Stands in for an op of a side stream: works until `error` or `hold` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.error: Exception | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self._real = getattr(ops, name)
        patch.setattr(ops, name, self)

    def __call__(self, *args: Any) -> None:
        assert self.go_on.wait(20)
        if self.error is not None:
            raise self.error
        self._real(*args)


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    with CPURuntime() as runtime:
        yield runtime


def steps_of(setup: Setup, seed: int = 0) -> Iterator[StepPlan]:
    return iter(make_plans(setup, seed, 30)[0])


def test_a_failed_write_ends_the_engine_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch, runtime: CPURuntime
) -> None:
    """Lost rows must not be attended to, now or later; shutdown still ends every thread."""
    setup = Setup()
    rank, plans, write = (
        Rank(setup, runtime, setup.host_layers()),
        steps_of(setup),
        Faulty(monkeypatch, "host_write"),
    )
    rank.run(next(plans))
    write.error = OSError("lost")
    failed = next(plans)
    with suppress(TaskFailedError):  # a reader in the same step may notice at once
        rank.run(failed)
    write.error = None
    for plan in (failed.again(), next(plans), next(plans)):
        with pytest.raises(TaskFailedError, match="lost"):
            rank.run(plan)


def test_a_failed_write_of_a_late_prefix_fails_the_step_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, runtime: CPURuntime
) -> None:
    setup = Setup(token_budget=64)
    rank, write = Rank(setup, runtime, setup.host_layers()), Faulty(monkeypatch, "host_write")
    write.error = OSError("lost")
    with pytest.raises(TaskFailedError, match="lost"):
        rank.run(twins(setup).schedule_or_fail())


def test_a_stuck_write_ends_the_step_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, runtime: CPURuntime
) -> None:
    setup = Setup(max_num_seqs=1)
    rank = Rank(setup, runtime, setup.host_layers(), deadline_s=0.1)
    plans, write = steps_of(setup), Faulty(monkeypatch, "host_write")
    write.go_on.clear()
    rank.run(next(plans))
    stopped, began = next(plans), time.monotonic()
    with pytest.raises(WaitTimeoutError, match="host rows of layer 0"):
        rank.run(stopped)
    assert time.monotonic() - began < 5
    write.go_on.set()
    for plan in (stopped.again(), *plans):  # it was slow, not lost
        rank.run(plan)


def test_a_failed_load_fails_its_step_only(monkeypatch: pytest.MonkeyPatch, runtime: CPURuntime) -> None:
    setup, failed = Setup(), 0
    rank, read = Rank(setup, runtime, setup.host_layers()), Faulty(monkeypatch, "host_read")
    for number, plan in enumerate(steps_of(setup)):
        read.error = OSError("bad page") if number % 2 else None
        try:
            rank.run(plan)
        except TaskFailedError:
            failed += 1
            read.error = None
            rank.run(plan.again())
    assert failed > 2


def twins(setup: Setup, drafts: int = 0) -> Scheduler:
    """Two requests of one prompt, the second of which hits what the first computes in the same step."""
    scheduler = Scheduler(setup, random.Random(drafts))
    scheduler.add(0, 24, 3, to_generate=5)
    scheduler.add(0, 24, 1 + drafts, to_generate=5)
    return scheduler


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_late_prefix_is_late_again_when_its_step_runs_again(drafts: int) -> None:
    setup = Setup(token_budget=64, drafts=drafts, slots=64)
    slow = next(seed for seed in range(1000) if DelayPlan(seed, 20).delay_s("d2h", 0, "before") > 0.015)
    with CPURuntime(DelayPlan(slow, max_ms=20)) as runtime:
        rank = Rank(setup, runtime, setup.host_layers())
        plan = twins(setup, drafts).schedule_or_fail()
        assert len(plan.req_ids) == 2
        with pytest.raises(Boom):
            rank.run(plan, (3, 0))
        for layer in rank.manager.host_rows.layers:
            runtime.synchronize()
            layer.fill_(0)  # whatever the failed step wrote doesn't count
        rank.run(plan.again())


def decoding(rank: Rank, setup: Setup) -> StepPlan:
    """Runs one request until it decodes; that step, which takes its last positions, may run again."""
    scheduler = Scheduler(setup, random.Random(1))
    scheduler.add(0, 24, 3, to_generate=5)
    for _ in range(3):
        plan = scheduler.schedule_or_fail()
        rank.run(plan)
    assert len(plan.positions) == 1
    for topk in plan.topk:
        topk[0] = torch.arange(topk.shape[1])
    return plan


def test_what_was_chosen_before_is_a_hit_in_every_group(runtime: CPURuntime) -> None:
    setup = Setup(slots=64)
    rank = Rank(setup, runtime, setup.host_layers())
    plan = decoding(rank, setup)
    rank.run(plan)
    assert rank.manager.step.fresh == ()
    before = rank.manager.stats.as_dict()
    rank.run(plan)
    after = rank.manager.stats.as_dict()
    chosen = setup.index_topk * len(setup.geometry.groups)
    assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (chosen, 0)
    with pytest.raises(Boom):
        rank.run(plan, (0, 0))  # the first group has served one of its layers, the second has not planned
    rank.run(plan)
    assert rank.manager.stats.misses - after["misses"] == setup.index_topk
    rank.run(plan)
    assert rank.manager.stats.misses - after["misses"] == setup.index_topk


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_capacity_formula_counts_every_buffer(
    runtime: CPURuntime, delivery: str, policy: str, drafts: int
) -> None:
    setup = Setup(
        index_topk=20, slots=128, delivery=delivery, policy=policy, drafts=drafts, mtp_layers=drafts // 3
    )
    inputs = CapacityInputs(
        geometry=setup.geometry,
        block_size=setup.block_size,
        device_bytes=0,
        dram_bytes=0,
        max_num_seqs=setup.max_num_seqs,
        max_model_len=setup.max_model_len,
        topk_buffer_size=setup.slots,
        ways=setup.ways,
        prefill_buffers=setup.prefill_buffers,
        delivery=delivery,
        published_plan=setup.config.plans_as_published,
    )
    assert Rank(setup, runtime, setup.host_layers()).manager.device_bytes == inputs.fixed_bytes


def test_a_row_is_emptied_only_if_it_may_hold_what_is_rewritten(runtime: CPURuntime) -> None:
    setup = Setup()
    rank = Rank(setup, runtime, setup.host_layers())
    length = int(decoding(rank, setup).seq_lens[0])
    layers = range(setup.geometry.num_layers)
    hot, row = rank.manager.hot, int(rank.manager.step.decode_partitions[0])
    hot.forget_beyond(row, length, layers)
    assert all((pool.residency.tags[row] >= 0).any() for pool in hot.groups)
    hot.forget_beyond(row, length - 1, layers)
    assert all((pool.residency.tags[row] == -1).all() for pool in hot.groups)


def test_a_follower_needs_its_owners_plan_in_this_step(runtime: CPURuntime) -> None:
    setup = Setup(pattern="FS")
    rank = Rank(setup, runtime, setup.host_layers())
    plan = decoding(rank, setup)
    with pytest.raises(Boom):
        rank.run(plan, (0, 0))
    manager, new_rows = rank.manager, torch.zeros((len(plan.topk[0]), ROW_BYTES), dtype=torch.uint8)
    manager.begin_step(rank.batch(plan))
    with pytest.raises(RuntimeError, match="layer 1 runs, but layer 0 has not planned for it in this step"):
        manager.delivery.deliver(1, plan.topk[0], new_rows, manager.step)


def test_a_partition_is_freed_only_when_no_copy_writes_to_it(
    monkeypatch: pytest.MonkeyPatch, runtime: CPURuntime
) -> None:
    """A step that failed leaves fetches behind, which the next owner of the partition must not meet."""
    setup = Setup(pattern="FS")
    rank = Rank(setup, runtime, setup.host_layers())
    plan = decoding(rank, setup)
    (req_id,) = rank.manager.step.decode_ids
    rank.manager.hot.reset_partition(
        int(rank.manager.step.decode_partitions[0])
    )  # all rows are fetched again
    fetches = Faulty(monkeypatch, "dsa_serve")
    real, owner_done = fetches._real, threading.Event()

    def serve(*args: Any) -> Any:
        if owner_done.is_set():  # the follower's, ahead of time
            assert fetches.go_on.wait(20)
        owner_done.set()
        return real(*args)

    monkeypatch.setattr(ops, "dsa_serve", serve)
    fetches.go_on.clear()
    with pytest.raises(Boom):
        rank.run(plan, (0, 0))
    released = threading.Thread(target=rank.manager.release, args=([req_id],))
    released.start()
    released.join(0.05)
    assert rank.manager.partitions.live == (req_id,)
    fetches.go_on.set()
    released.join(10)
    assert rank.manager.partitions.live == ()


def test_rows_of_a_step_are_let_go(runtime: CPURuntime) -> None:
    setup = Setup()
    rank = Rank(setup, runtime, setup.host_layers())
    for plan in steps_of(setup):
        rank.run(plan)
        assert all(kv._new_rows.numel() == 0 for kv in rank.kvs)
