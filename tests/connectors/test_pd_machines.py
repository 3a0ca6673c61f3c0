"""Prefill's and decode's state machines against each other, over a network and processes that fail."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pd_world import LIMITS, World

from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Phase
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import REFUSED_S
from vllm_kvoffload.metrics.fields import RECEIVE_PHASES, ReceiveFailure, TransferEnd

TPS = [(1, 1), (2, 1), (2, 2), (4, 2)]


class Faults(RuleBasedStateMachine):
    """Anything may happen at any time; afterwards every request has ended, and nothing is held."""

    world: World

    @initialize(tps=st.sampled_from(TPS), shared=st.booleans())
    def begin(self, tps, shared):
        self.world = World(*tps, shared)

    @rule(num_blocks=st.integers(1, 9), first=st.integers(0, 3), again=st.booleans(), data=st.data())
    def request(self, num_blocks, first, again, data):
        name = None
        if again and self.world.names:
            name = data.draw(st.sampled_from(self.world.names[-2:]))
        req_id = self.world.request(num_blocks, min(first, num_blocks - 1), name)
        if req_id is not None:
            self.world.submit(self.world.wanted[req_id])

    def pick(self, data, items):
        return data.draw(st.sampled_from(items))

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data())
    def submit(self, data):
        wanted = self.pick(data, sorted(self.world.wanted))
        self.world.submit(self.world.wanted[wanted])

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), count=st.integers(1, 6), steps=st.integers(1, 6))
    def step(self, data, count, steps):
        job = self.world.jobs[self.pick(data, sorted(self.world.jobs))]
        for _ in range(steps):
            self.world.step(job, count)

    @precondition(lambda self: self.world.network)
    @rule(data=st.data(), count=st.integers(1, 20))
    def deliver(self, data, count):
        for _ in range(min(count, len(self.world.network))):
            self.world.deliver(data.draw(st.integers(0, min(3, len(self.world.network) - 1))))

    @rule(rounds=st.integers(1, 12), read=st.booleans(), work=st.booleans(), hear=st.booleans())
    def progress(self, rounds, read, work, hear):
        """What mostly happens: messages arrive, reads end, prefill computes."""
        for _ in range(rounds):
            while hear and self.world.network:
                self.world.deliver(0)
            while read and self.world.reads:
                self.world.finish_read(0)
            for job in list(self.world.jobs.values()) if work else []:
                self.world.step(job, 3)

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def repeat(self, data):
        self.world.deliver(data.draw(st.integers(0, len(self.world.network) - 1)), keep=True)

    @precondition(lambda self: self.world.network)
    @rule(data=st.data())
    def lose(self, data):
        self.world.network.pop(data.draw(st.integers(0, len(self.world.network) - 1)))

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data(), error=st.sampled_from(["", "", "", "broken"]))
    def read(self, data, error):
        self.world.finish_read(data.draw(st.integers(0, len(self.world.reads) - 1)), error)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, LIMITS.lease_s]))
    def wait(self, seconds):
        self.world.advance(seconds)

    @precondition(lambda self: self.world.reads)
    @rule()
    def prefill_hears_nothing(self):
        """Leases end on prefill, and decode doesn't learn of it: its reads go on."""
        self.world.network.clear()
        for producer in self.world.producers:
            producer.tick(self.world.now + LIMITS.lease_s + 1)
        self.world.pump()
        self.world.network.clear()

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data())
    def abort(self, data):
        self.world.abort(self.pick(data, sorted(self.world.wanted)))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), again=st.booleans())
    def disturb_prefill(self, data, again):
        job = self.world.jobs[self.pick(data, sorted(self.world.jobs))]
        (self.world.preempt if again else self.world.abort_prefill)(job)

    @rule(chance=st.integers(0, 5), prefill=st.booleans())
    def restart(self, chance, prefill):
        if chance == 0:
            (self.world.start_prefill_engine if prefill else self.world.start_decode_engine)()

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data(), error=st.sampled_from(["", "502"]))
    def answered(self, data, error):
        req_id = self.pick(data, sorted(self.world.wanted))
        for consumer in self.world.consumers:
            consumer.prefill_returned(self.world.now, req_id, error)
        self.world.pump()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle(LIMITS.request_s + 3 * LIMITS.lease_s, work=True)
            self.world.check_nothing_left()


SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def ends(world, rank=0):
    """How transfers of a prefill rank ended."""
    return {end: count for end, count in world.producers[rank].counts.closed.items() if count}


def failures(world, rank=0):
    """Why requests of a decode rank failed."""
    return {why: count for why, count in world.consumers[rank].counts.failed.items() if count}


def test_phases_have_their_series():
    assert tuple(phase.value for phase in Phase) == RECEIVE_PHASES


def test_every_request_ends_and_nothing_leaks():
    run_state_machine_as_test(Faults, settings=SETTINGS)


@pytest.mark.parametrize("tps", TPS)
def test_without_faults_every_request_completes(tps):
    world = World(*tps)
    for num_blocks, first in [(1, 0), (9, 0), (7, 3), (5, 4)]:
        world.submit(world.wanted[world.request(num_blocks, first)])
    world.settle(20.0, work=True)
    assert len(world.completed) == 4
    assert not world.failed
    world.check_nothing_left()
    assert all(ends(world, rank) == {TransferEnd.FINISHED: 4} for rank in range(tps[0]))
    for consumer in world.consumers:
        values = consumer.metrics()
        assert (values["receives_done"], values["receive_retries"]) == (4, 0)
        assert 0 < values["receive_seconds.sum"] < 4 * 20e6


@pytest.mark.parametrize("lost", range(12))
def test_one_lost_message_does_no_harm(lost):
    """Whichever it is: Hello, its answer, a Publish, the Finish, ..."""
    world = World(1, 1)
    world.submit(world.wanted[world.request(6, 0)])
    seen = 0
    for _ in range(400):
        while world.network:
            if seen == lost:
                world.network.pop(0)
            else:
                world.deliver(0)
            seen += 1
        while world.reads:
            world.finish_read(0)
        for job in list(world.jobs.values()):
            world.step(job, 2)
        world.advance(0.25)
    assert seen > lost
    assert world.completed
    world.check_nothing_left()


def one_read_away(tps=(1, 1)):
    """A world whose request is read but for the last layer, whose read is in flight."""
    world = World(*tps)
    world.submit(world.wanted[world.request(3, 0)])
    for _ in range(200):
        while world.network:
            world.deliver(0)
        if world.reads and next(iter(world.jobs.values())).complete:
            return world
        while world.reads:
            world.finish_read(0)
        for job in list(world.jobs.values()):
            world.step(job, 9)
        world.advance(0.01)
    raise AssertionError("no read in flight")


def test_a_lease_that_ended_during_the_last_read_fails_the_request():
    """Prefill stops answering decode's heartbeats, frees its blocks, and the read finishes with rubbish."""
    world = one_read_away()
    world.network.clear()
    world.producers[0].tick(world.now + LIMITS.lease_s + 1)
    world.network.clear()
    world.pump()
    world.network.clear()  # prefill's Closed is lost, too
    assert not world.jobs
    world.finish_read(0)
    world.settle(2 * LIMITS.lease_s)
    assert not world.completed
    assert list(world.failed.values()) == ["prefill gave up: expired"]
    assert ends(world) == {TransferEnd.EXPIRED: 1}
    assert failures(world) == {ReceiveFailure.PREFILL: 1}


def test_the_same_is_completed_wrongly_without_the_answer_to_finish():
    """The control: a decode rank that believes its own last read."""
    world = one_read_away()
    world.network.clear()
    world.producers[0].tick(world.now + LIMITS.lease_s + 1)
    world.network.clear()
    world.pump()
    consumer = world.consumers[0]
    consumer._say_finish = lambda _now, pull: setattr(pull, "finished", True)
    with pytest.raises(AssertionError):
        world.finish_read(0)


def test_blocks_are_kept_until_finish_and_freed_by_it():
    world = one_read_away()
    (job,) = world.jobs.values()
    assert job.held
    world.finish_read(0)
    world.settle(1.0)
    assert not world.jobs
    assert world.completed


def test_a_cancelled_request_is_reported_only_when_its_memory_is_quiet():
    world = one_read_away()
    (req_id,) = world.wanted
    world.abort(req_id)
    assert world.consumers[0].to_cancel
    while world.network:
        world.deliver(0)
    assert req_id in world.wanted, "a read is still writing into its blocks"
    assert not world.jobs, "prefill was told at once"
    world.finish_read(0)
    assert req_id not in world.wanted
    assert world.failed[req_id] == "aborted"
    assert ends(world) == {TransferEnd.CANCELLED: 1}
    assert failures(world) == {ReceiveFailure.ABORTED: 1}


def test_leases_end_without_heartbeats():
    world = World(1, 1)
    world.submit(world.wanted[world.request(3, 0)])
    for job in list(world.jobs.values()):
        for _ in range(4):
            world.step(job, 9)
    world.network.clear()
    world.start_decode_engine()
    held_s = 0.0
    while world.jobs:
        world.network.clear()
        world.advance(0.5)
        held_s += 0.5
    assert LIMITS.lease_s <= held_s <= LIMITS.lease_s + 1
    world.check_nothing_left()


def test_a_preempted_prefill_is_pulled_again():
    world = World(2, 1)
    world.submit(world.wanted[world.request(6, 1)])
    (job,) = world.jobs.values()
    for _ in range(3):
        world.step(job, 3)
        world.settle(0.5)
    world.preempt(job)
    world.settle(20.0, work=True)
    assert world.completed
    world.check_nothing_left()
    assert ends(world) == ends(world, 1) == {TransferEnd.PREEMPTED: 1, TransferEnd.FINISHED: 1}
    assert not failures(world)
    # One rank's Closed is enough to lose the attempt, the other's is of a transfer given up by then.
    assert world.consumers[0].counts.retries == 1


def test_a_dead_prefill_is_noticed():
    world = World(1, 1)
    world.submit(world.wanted[world.request(3, 0)])
    (job,) = world.jobs.values()
    world.step(job, 2)
    world.settle(1.0)
    assert world.phases == [Phase.READING]
    world.start_prefill_engine()
    begin = world.now
    while world.wanted:
        world.settle(0.5)
    assert world.now - begin <= 2 * LIMITS.lease_s + 1
    assert failures(world) == {ReceiveFailure.PREFILL: 1}


def test_a_restarted_decode_is_served():
    """Prefill has not noticed the restart when the next request's transfer opens."""
    world = World(2, 1)
    for _ in range(2):
        world.submit(world.wanted[world.request(5, 0)])
        world.settle(10.0, work=True)
        assert len(world.completed) == 1
        world.completed.clear()
        world.start_decode_engine()


def test_prefill_of_another_model_is_refused():
    world = World(1, 1)
    producer = world.producers[0]
    producer.hello = type(producer.hello)(
        *[getattr(producer.hello, f) if f != "digest" else "other" for f in producer.hello.__struct_fields__]
    )
    world.submit(world.wanted[world.request(3, 0)])
    for job in list(world.jobs.values()):
        world.step(job, 9)
    world.settle(1.0)
    assert "differ in model" in producer.links[0].refused
    assert not producer.open_requests
    assert ends(world) == {TransferEnd.REFUSED: 1}
    world.start_decode_engine()
    world.consumers[0]._digest = "other"
    world.settle(REFUSED_S, work=True)
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(5.0, work=True)
    assert len(world.completed) == 1, "decode was replaced by one that fits"


def test_a_failed_rendezvous_ends_the_request_at_once():
    world = World(1, 1)
    req_id = world.request(3, 0)
    world.consumers[0].prefill_returned(world.now, req_id, "metaserver answered 502")
    world.pump()
    assert world.failed == {req_id: "metaserver answered 502"}
    assert failures(world) == {ReceiveFailure.RENDEZVOUS: 1}


def test_prefill_that_returned_without_offering_is_not_waited_for():
    world = World(1, 1)
    req_id = world.request(3, 0)
    world.consumers[0].prefill_returned(world.now, req_id)
    world.settle(LIMITS.retry_s + 1)
    assert world.failed == {req_id: "prefill did not offer it in time"}
    assert failures(world) == {ReceiveFailure.DEADLINE: 1}


def test_a_shared_buffer_is_used_again_only_after_it_was_read():
    world = World(2, 1, shared=True)
    req_id = world.request(4, 0)
    world.submit(world.wanted[req_id])
    (job,) = world.jobs.values()
    while world.network:  # the first exchange of names
        world.deliver(0)
    for _ in range(4):
        world.step(job, 2)
        while world.network:
            world.deliver(0)
    assert job.layer == 1, "the second layer waits for the reads of the first"
    assert not world.may_overwrite(job)
    while world.reads:
        world.finish_read(0)
    assert not world.may_overwrite(job), "decode has read it, but prefill doesn't know yet"
    while world.network:
        world.deliver(0)
    assert world.may_overwrite(job)
    world.settle(60, work=True)
    assert world.completed == [req_id]


def test_a_lost_progress_is_told_again():
    world = World(1, 1, shared=True)
    req_id = world.request(4, 0)
    world.submit(world.wanted[req_id])
    (job,) = world.jobs.values()
    lost = 0
    for _ in range(60):
        before = len(world.network)
        while world.reads:
            world.finish_read(0)
        lost += len(world.network) - before
        del world.network[before:]  # what decode says right after a read never arrives
        while world.network:
            world.deliver(0)
        world.step(job, 4)
        world.advance(0.5)
    world.settle(60, work=True)
    assert lost > 0
    assert world.completed == [req_id]


def test_shared_buffers_of_a_decode_that_never_reads_are_free_after_the_lease():
    world = World(1, 1, shared=True)
    world.submit(world.wanted[world.request(4, 0)])
    (job,) = world.jobs.values()
    world.step(job, 4), world.step(job, 4)
    assert not world.may_overwrite(job)
    world.network.clear()
    world.now += LIMITS.lease_s + 1
    for producer in world.producers:
        producer.tick(world.now)
    assert world.may_overwrite(job)


def _hasty_run() -> list[str]:
    """Prefill computes both layers before decode reads anything."""
    world = World(1, 1, shared=True)
    world.submit(world.wanted[world.request(4, 0)])
    (job,) = world.jobs.values()
    for _ in range(4):
        world.step(job, 4)
    world.settle(60, work=True)
    return world.completed


def test_control_reads_that_are_not_awaited_are_found(monkeypatch):
    assert _hasty_run()
    monkeypatch.setattr(World, "may_overwrite", lambda *_args: True)
    with pytest.raises(AssertionError):
        _hasty_run()
