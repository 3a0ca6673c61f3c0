"""The offload core as a whole, without vLLM: random programs under random delays, and planted bugs.

Every row that attention gets is compared with the one it asked for, whatever scheduling, preemption, prefix
caching, rejected drafts, failing steps and side streams did before.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from manager_model import Scheduler, Setup, StepPlan, make_plans
from manager_programs import Boom, Rank, WrongRowError, run_failing_program, run_program, run_rank_pair

from vllm_kvoffload import ops
from vllm_kvoffload.config import DELIVERIES, POLICIES
from vllm_kvoffload.layerwise.prefill_stream import PrefillStream
from vllm_kvoffload.runtime import CpuRuntime, DelayPlan, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.sparse.capacity import CapacityInputs
from vllm_kvoffload.sparse.compact import CompactDelivery, PublishedPlanner
from vllm_kvoffload.sparse.host_store import HostStore
from vllm_kvoffload.sparse.hot_pool import HotPool
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.prefetch import FollowerPrefetch
from vllm_kvoffload.sparse.rows import RowError, RowLease, RowTable

pytestmark = pytest.mark.timeout(300)

SEEDS = range(15)


def setup_for(seed: int, delivery: str = "in_place") -> Setup:
    """A setup for each seed: both widths of a set, all policies, hot pools from the least that must do."""
    rng = random.Random(seed)
    ways, drafts = (16, 32)[seed % 2], (0, 1, 3, 0)[seed % 4]
    topk = 32 // (1 + drafts) if ways == 32 else 16
    least = topk * (1 + drafts)
    return Setup(
        index_topk=topk,
        ways=ways,
        slots=least * (1, 1, 2, 4)[seed // 4 % 4],
        policy=POLICIES[seed % 3],
        delivery=delivery,
        drafts=drafts,
        mtp_layers=rng.randint(0, 1) if drafts else 0,
        pattern=rng.choice(["FSFSS", "FFF", "FSSS", "F"]),
        prefill_buffers=rng.choice([1, 2, 3]),
        reuse_newest=rng.random() < 0.5,
        hold_ms=rng.choice([0.0, 1.0]),
    )


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
    for what in ("late", "preempted", "rejected", "aborted", "finished", "idle", "resumed"):
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
    monkeypatch.setattr(HostStore, "await_layer", lambda *_: pytest.fail("waited"))
    log = run_program(Setup(max_num_seqs=1), seed=3)
    assert log["finished"] > 1


class EngineMachine(RuleBasedStateMachine):
    """Hypothesis decides what users, scheduler and failures do; finds short programs where seeds find any."""

    @initialize(seed=st.integers(0, 10_000), delivery=st.sampled_from(DELIVERIES), delayed=st.booleans())
    def start(self, seed: int, delivery: str, delayed: bool) -> None:
        self.setup = setup_for(seed, delivery)
        self.scheduler = Scheduler(self.setup, random.Random(seed))
        self.runtime = CpuRuntime(DelayPlan(seed, max_ms=0.5) if delayed else None)
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
def runtime() -> Iterator[CpuRuntime]:
    with CpuRuntime() as runtime:
        yield runtime


def steps_of(setup: Setup, seed: int = 0) -> Iterator[StepPlan]:
    return iter(make_plans(setup, seed, 30)[0])


def test_a_failed_write_ends_the_engine_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch, runtime: CpuRuntime
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
    with suppress(TaskFailedError):  # a late prefix may notice at once
        rank.run(failed)
    write.error = None
    for plan in (failed.again(), next(plans), next(plans)):
        with pytest.raises(TaskFailedError, match="lost"):
            rank.run(plan)


def test_a_failed_write_of_a_late_prefix_fails_the_step_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, runtime: CpuRuntime
) -> None:
    setup = Setup(token_budget=64)
    rank, write = Rank(setup, runtime, setup.host_layers()), Faulty(monkeypatch, "host_write")
    write.error = OSError("lost")
    with pytest.raises(TaskFailedError, match="lost"):
        rank.run(twins(setup).schedule_or_fail())


def test_a_stuck_write_ends_the_step_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, runtime: CpuRuntime
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
    for plan in (stopped.again(), *plans):  # it was late, not lost
        rank.run(plan)


def test_a_failed_load_fails_its_step_only(monkeypatch: pytest.MonkeyPatch, runtime: CpuRuntime) -> None:
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
    with CpuRuntime(DelayPlan(slow, max_ms=20)) as runtime:
        rank = Rank(setup, runtime, setup.host_layers())
        plan = twins(setup, drafts).schedule_or_fail()
        assert len(plan.req_ids) == 2
        with pytest.raises(Boom):
            rank.run(plan, (3, 0))
        for layer in rank.manager.store.layers:
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


def test_what_was_chosen_before_is_a_hit_in_every_group(runtime: CpuRuntime) -> None:
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
    runtime: CpuRuntime, delivery: str, policy: str, drafts: int
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


def test_a_row_is_emptied_only_if_it_may_hold_what_is_rewritten(runtime: CpuRuntime) -> None:
    setup = Setup()
    rank = Rank(setup, runtime, setup.host_layers())
    length = int(decoding(rank, setup).seq_lens[0])
    layers = range(setup.geometry.num_layers)
    hot, row = rank.manager.hot, int(rank.manager.step.decode_rows[0])
    hot.forget_beyond(row, length, layers)
    assert all((pool.residency.tags[row] >= 0).any() for pool in hot.groups)
    hot.forget_beyond(row, length - 1, layers)
    assert all((pool.residency.tags[row] == -1).all() for pool in hot.groups)


def test_a_follower_needs_its_owners_choice_in_this_step(runtime: CpuRuntime) -> None:
    setup = Setup(pattern="FS")
    rank = Rank(setup, runtime, setup.host_layers())
    plan = decoding(rank, setup)
    rank.manager.plan_group(1, plan.topk[0])
    with pytest.raises(Boom):
        rank.run(plan, (0, 0))
    rank.manager.plan_group(1, plan.topk[0])
    rank.manager.begin_step(rank.batch(plan))
    with pytest.raises(RuntimeError, match="layer 1 runs, but layer 0 has not chosen for it in this step"):
        rank.manager.plan_group(1, plan.topk[0])


def test_rows_of_a_step_are_let_go(runtime: CpuRuntime) -> None:
    setup = Setup()
    rank = Rank(setup, runtime, setup.host_layers())
    for plan in steps_of(setup):
        rank.run(plan)
        assert all(kv._new_rows.numel() == 0 for kv in rank.kvs)


# -------------------------------------------------------------------------------------------- planted bugs

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Planted:
    """A bug to plant; `run` are the programs that must find it within the seeds, by raising `error`."""

    plant: Patch
    run: Callable[[Setup, int], object] = run_program
    error: type[Exception] | tuple[type[Exception], ...] = WrongRowError
    setup: Callable[[int], Setup] = setup_for


def disabled(owner: Any, name: str) -> Patch:
    return lambda patch: patch.setattr(owner, name, lambda *_args, **_kwargs: None)


def disabled_with(owner: Any, name: str, result: object) -> Patch:
    return lambda patch: patch.setattr(owner, name, lambda *_args, **_kwargs: result)


def before(owner: Any, name: str, action: Callable[..., object]) -> Patch:
    """Runs `action` with the same arguments before the real thing."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def patched(*args: Any) -> Any:
            action(*args)
            return real(*args)

        patch.setattr(owner, name, patched)

    return plant


def slots_not_copied(patch: pytest.MonkeyPatch) -> None:
    def write(store: Any, layer: int, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if store._writer:
            store._stream.submit(ops.host_write, store.layers[layer], rows, slot_mapping)
            store._written[layer] = store._stream.record()
            store.bytes_written += rows.numel()

    patch.setattr(HostStore, "write", write)


def late_prefixes_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SparseKVManager,
        "_late_requests",
        lambda _self, batch, _fresh: np.zeros(batch.num_requests, dtype=bool),
    )


def late_decode_missed(patch: pytest.MonkeyPatch) -> None:
    real = SparseKVManager._sort
    patch.setattr(SparseKVManager, "_sort", lambda *args: replace(real(*args), decode_late=False))


def late_prefill_missed(patch: pytest.MonkeyPatch) -> None:
    real = PrefillStream.begin_step
    patch.setattr(
        PrefillStream,
        "begin_step",
        lambda self, requests, layers: real(self, [replace(r, late=False) for r in requests], layers),
    )


def buffer_closed_before_attention(patch: pytest.MonkeyPatch) -> None:
    open_buffer, close = PrefillStream.open, PrefillStream.close

    def early(self: PrefillStream, layer: int, index: int) -> torch.Tensor:
        buffer = open_buffer(self, layer, index)
        close(self)
        return buffer

    patch.setattr(PrefillStream, "open", early)
    patch.setattr(PrefillStream, "close", lambda _self: None)


def rows_by_batch_index(patch: pytest.MonkeyPatch) -> None:
    def row(_self: SparseKVManager, req_id: str, batch: Any) -> RowLease:
        return RowLease(batch.req_ids.index(req_id), 0)

    patch.setattr(SparseKVManager, "_row", row)
    patch.setattr(RowTable, "check", lambda *_: True)


def known_after_release(patch: pytest.MonkeyPatch) -> None:
    def release(self: SparseKVManager, req_ids: Any) -> None:
        for req_id in req_ids:
            if self.rows.lookup(req_id) is not None:
                self.rows.release(req_id)

    patch.setattr(SparseKVManager, "release", release)


def followers_not_served(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: FollowerPrefetch, layer: int, _plan: Any, _step: Any) -> None:
        self._fetched[layer] = 0

    patch.setattr(FollowerPrefetch, "_fetch", fetch)


def prefetches_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def take(self: FollowerPrefetch, layer: int) -> int | None:
        return None if self._events.pop(layer, None) is None else self._fetched.pop(layer, 0)

    patch.setattr(FollowerPrefetch, "take", take)


def installs_not_joined(patch: pytest.MonkeyPatch) -> None:
    def join(self: CompactDelivery) -> bool:
        self._installed.clear()
        return True

    patch.setattr(CompactDelivery, "join", join)


def installs_of_a_failed_step_count(patch: pytest.MonkeyPatch) -> None:
    real = CompactDelivery.deliver

    def deliver(self: CompactDelivery, layer: int, pool: Any, *args: Any) -> Any:
        rows = real(self, layer, pool, *args)
        pool.unserved = 0
        return rows

    patch.setattr(CompactDelivery, "deliver", deliver)


def draft_passes_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    def begin_draft(self: SparseKVManager, batch: Any, index: int) -> None:
        self._settle()
        layer = self.geometry.num_target_layers
        self._begin(batch, range(layer, layer + 1), self.step.fresh if index == 0 else ())

    patch.setattr(SparseKVManager, "begin_draft", begin_draft)


def late_drafts_missed(patch: pytest.MonkeyPatch) -> None:
    real = SparseKVManager.begin_draft
    patch.setattr(SparseKVManager, "begin_draft", lambda self, batch, _index: real(self, batch, 1))


def no_wait_for_ranks_before_loads(patch: pytest.MonkeyPatch) -> None:
    real = HostStore.await_layer

    def await_layer(self: HostStore, layer: int) -> None:
        real(self, layer)
        if self._barrier is not None:
            self._barrier()

    patch.setattr(HostStore, "await_ranks", lambda _self: None)
    patch.setattr(HostStore, "await_layer", await_layer)


def no_wait_for_ranks_in_a_layer(patch: pytest.MonkeyPatch) -> None:
    def await_layer(self: HostStore, layer: int) -> None:
        event = self._written[layer]
        if event is not None:
            event.wait(self._deadline_s)

    patch.setattr(HostStore, "await_layer", await_layer)


def long_steps(seed: int) -> Setup:
    """Whole prompts in one step: prefixes that are written in the same step are common."""
    return replace(setup_for(seed), token_budget=64, num_blocks=60)


def sessions(seed: int) -> Setup:
    """Sessions that go on after drafts were rejected, with more tokens than a decode has."""
    return replace(setup_for(4 * seed + 1), idle_rate=0.3)


def compact(seed: int) -> Setup:
    return setup_for(seed, "compact")


def published(seed: int) -> Setup:
    """Many requests so short that they decode in their first step."""
    return replace(setup_for(12 * seed + 6, "compact"), ways=16, policy="fifo", slots=64)


def drafting(seed: int) -> Setup:
    """Three draft passes over an MTP layer with a small pool, whole prompts in one step."""
    return replace(setup_for(4 * seed + 2), mtp_layers=1, slots=64, token_budget=64, num_blocks=60)


def single_prefill_layer(seed: int) -> Setup:
    """Loads of layer 0 start at once, while its rows of the step before may still be on their way."""
    return replace(setup_for(seed), pattern="F", mtp_layers=0, hold_ms=0.0)


PLANTED = {
    "writes are not joined": Planted(disabled(HostStore, "join")),
    "slot mapping is not copied": Planted(slots_not_copied),
    "late prefixes are not noticed": Planted(late_prefixes_missed),
    "late prefixes are not noticed in decode": Planted(late_decode_missed),
    "late prefixes are not noticed in prefill": Planted(late_prefill_missed, setup=long_steps),
    "late prefixes are not awaited": Planted(disabled(HostStore, "await_layer")),
    "late prefixes are not noticed after preemption": Planted(known_after_release, error=AssertionError),
    "loads are not awaited": Planted(before(PrefillStream, "open", lambda self, *_: self._loaded.clear())),
    "buffer is closed before attention": Planted(buffer_closed_before_attention),
    "rows are not reset": Planted(disabled(HotPool, "reset_row")),
    "rows go by batch index": Planted(rows_by_batch_index),
    "rows are not released": Planted(disabled(SparseKVManager, "release"), error=RowError),
    "rejected drafts stay": Planted(before(ops, "dsa_plan", lambda *args: args[4].high.zero_())),
    "rejected drafts stay after a prefill": Planted(disabled(HotPool, "forget_beyond"), setup=sessions),
    "new rows are not written": Planted(disabled(ops, "write_rows")),
    "misses are not fetched for followers": Planted(followers_not_served),
    "prefetches are not awaited": Planted(prefetches_not_awaited),
    "prefetches of a failed step are not joined": Planted(
        disabled(FollowerPrefetch, "join"), run_failing_program
    ),
    "compact: installs are not joined": Planted(installs_not_joined, setup=compact),
    "compact: selections are reused too early": Planted(
        before(
            CompactDelivery,
            "_take_selection",
            lambda self, *_: self._selection_user.__setitem__(slice(2), [None] * 2),
        ),
        setup=compact,
    ),
    "compact: plans are reused too early": Planted(
        before(CompactDelivery, "plan", lambda self, *_: [users.clear() for users in self._plan_users]),
        setup=compact,
    ),
    "compact: nothing is installed": Planted(disabled(ops, "dsa_install"), setup=compact),
    "compact: the published plan takes its own token 0 for old": Planted(
        disabled_with(PublishedPlanner, "reads_own_rows", False), setup=published
    ),
    "compact: what a failed step installed counts": Planted(
        installs_of_a_failed_step_count, run_failing_program, setup=compact
    ),
    "draft passes do not wait for each other": Planted(draft_passes_do_not_wait, setup=drafting),
    "late prefixes are not noticed in draft passes": Planted(late_drafts_missed, setup=drafting),
    "ranks: loads run ahead of the writer": Planted(
        no_wait_for_ranks_before_loads, partial(run_rank_pair, writer_ms=10), setup=single_prefill_layer
    ),
    "ranks: late prefixes are awaited by the writer only": Planted(
        no_wait_for_ranks_in_a_layer, run_rank_pair
    ),
    "failed step: what it left is not undone": Planted(
        disabled(SparseKVManager, "_settle"), run_failing_program
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    planted = PLANTED[name]
    planted.plant(monkeypatch)
    for seed in range(60):
        try:
            planted.run(planted.setup(seed), seed)
        except planted.error:
            return
    pytest.fail("not found")
