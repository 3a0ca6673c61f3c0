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
from msgspec.structs import replace

from tests.connectors.pd_world import FACTS, LAYERS, LIMITS, POOL, World
from vllm_kvoffload.connectors.sfa_remote_d2h.consumer import EARLY_KEPT, Consumer
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.introductions import DECLINES_KEPT, Declines
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import ReceivePhase
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import HELLO_RETRY_S, REFUSED_S, UNANSWERED_S
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Beat,
    BeatAck,
    Chunk,
    Declined,
    Hello,
    HelloAck,
    NeedHello,
    Publish,
    prompt_digest,
)
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
        """Typical events: messages arrive, reads end, prefill computes."""
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

    @rule(chance=st.integers(0, 3))
    def peers_that_cannot_be_read(self, chance):
        self.world.unreadable = int(chance == 0)

    @precondition(lambda self: self.world.wanted)
    @rule(data=st.data(), mine=st.booleans(), hello=st.booleans(), rank=st.integers(0, 3))
    def stranger(self, data, mine, hello, rank):
        """With another secret: nothing changes. With the right one it is a prefill that decode refused."""
        world = self.world
        wanted = world.wanted[self.pick(data, sorted(world.wanted))]
        rank %= world.decode_tp
        secret, before = world.secret if mine else "guessed", world.consumers[rank].live
        if hello:
            world.stranger(replace(world.producers[0].hello, session="x", digest="x", secret=secret), rank)
            assert "x" not in world.consumers[rank].peers
        else:
            prompt = prompt_digest([wanted.prompt])
            world.stranger(Declined("x", secret, wanted.request, prompt, "another dtype", "x"), rank)
        if not mine:
            assert world.consumers[rank].live == before

    @rule(secret=st.sampled_from(["", "guessed", "secret1"]), rank=st.integers(0, 3))
    def request_of_another(self, secret, rank):
        """A request to prefill that names decode's address, and no secret of this start."""
        world = self.world
        rank %= world.prefill_tp
        producer = world.producers[rank]
        producer.open(world.now, "other", "other", rank // world.ratio, b"o" * 16, 1, secret)
        producer.drop("other", "aborted")
        world.pump()

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
    assert tuple(phase.value for phase in ReceivePhase) == RECEIVE_PHASES


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


def one_read_away(tps=(1, 1), num_blocks=3):
    """A world whose request is read but for the last layer, whose read is in flight."""
    world = World(*tps)
    world.submit(world.wanted[world.request(num_blocks, 0)])
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


def test_a_cancelled_request_waits_for_the_reads_from_every_prefill_rank():
    world = one_read_away((2, 1), num_blocks=9)
    assert len(world.reads) == 2
    (req_id,) = world.wanted
    world.abort(req_id)
    world.finish_read(0)
    assert req_id in world.wanted, "the other rank's read is still writing into its blocks"
    world.finish_read(0)
    assert world.failed[req_id] == "aborted"


@pytest.mark.parametrize("errors", [LIMITS.read_retries, LIMITS.read_retries + 1])
def test_a_transfer_survives_as_many_failed_reads_as_it_may_retry(errors):
    world = one_read_away()
    for _ in range(errors):
        world.finish_read(0, "broken")
    world.settle(1.0)
    assert bool(world.completed) == (errors == LIMITS.read_retries)
    assert list(world.failed.values()) == ["reading failed: broken"] * (errors > LIMITS.read_retries)


def test_a_transfer_is_told_once_however_often_a_beat_names_it():
    """A beat of 4,096 entries was answered with as many copies of all that is published."""
    world = World(1, 1)
    producer, session = world.producers[0], world.sessions[0]
    producer.open(0.0, "r", "r", 0, bytes(16), POOL, world.secret)
    producer.begin_chunk("r", 0, range(POOL), True)
    producer.publish(0.0, ["r"], LAYERS)
    producer.receive(0.0, 0, HelloAck("d", session))
    producer.outbox.clear()
    producer.receive(0.0, 0, Beat("d", session, ((1, 0, 0),) * 4096))
    assert [type(message) for _, message in producer.outbox] == [Publish, BeatAck]


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
    assert world.phases == [ReceivePhase.READING]
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


def other_model(world, **facts):
    """Prefill has other facts than decode."""
    for producer in world.producers:
        theirs = {**FACTS, **facts}
        producer.hello = replace(producer.hello, digest=digest_of(theirs), facts=theirs)


@pytest.mark.parametrize("tps", TPS)
def test_prefill_of_another_model_is_refused(tps):
    world = World(*tps)
    other_model(world, dtype="float16")
    req_id = world.request(3, 0)
    world.submit(world.wanted[req_id])
    for job in list(world.jobs.values()):
        world.step(job, 9)
    world.settle(1.0)
    reason = "prefill and decode differ in dtype (prefill float16, decode bfloat16)"
    assert all(producer.links[rank // world.ratio].refused == reason
               for rank, producer in enumerate(world.producers))  # fmt: skip
    assert world.failed == {req_id: reason}, "at once, not at a deadline"
    for rank in range(world.prefill_tp):
        assert ends(world, rank) == {TransferEnd.REFUSED: 1}
    assert failures(world) == {ReceiveFailure.MISMATCH: 1}
    again = world.request(3, 0)
    world.submit(world.wanted[again])
    for job in [job for job in world.jobs.values() if not job.open]:
        world.step(job, 9)
    world.settle(1.0)
    assert world.failed[again] == reason, "also while prefill does not ask again"
    world.start_decode_engine()
    other_model(world)
    world.settle(REFUSED_S, work=True)
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(5.0, work=True)
    assert len(world.completed) == 1, "decode was replaced by one that fits"


def test_a_mismatch_names_the_layout_of_prefill(monkeypatch):
    world, told, outcome = World(1, 1), [], World.outcome
    monkeypatch.setattr(World, "outcome", lambda *args: (told.append(args[2]), outcome(*args)))
    other_model(world, block_size="32")
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(2.0, work=True)
    layouts = [(end.failure, end.prefill_layout) for end in told]
    assert layouts == [(ReceiveFailure.MISMATCH, world.producers[0].hello.digest)]


def test_a_refusal_may_come_before_the_request():
    world = World(1, 1)
    prompt = prompt_digest([world.requests + 1])
    world.stranger(Declined("x", world.secret, "early", prompt, "no", "d"))
    world.stranger(Declined("x", "guessed", "later", prompt_digest([2]), "no", "d"))
    early, later = world.request(2, 0, "early"), world.request(2, 0, "later")
    assert world.failed == {early: "no"}
    assert later in world.wanted
    world.stranger(Declined("x", world.secret, "early", prompt, "of another rank", "d"))
    assert not world.consumers[0]._declines, (
        "a decline that arrives after the end is not kept for the next request"
    )


def test_refusals_of_unknown_requests_are_bounded():
    declines = Declines(10.0)
    for number in range(DECLINES_KEPT + 10):
        declines.keep(0.0, Declined("x", "s", f"r{number}", b"p" * 16, "no"))
    assert len(declines) == DECLINES_KEPT
    declines.forget_old(10.0)
    assert not len(declines)


def test_a_peer_that_cannot_be_read_is_none():
    """A refusal with a reason, at once; when its memory can be read later, it is a peer."""
    world = World(1, 1)
    world.unreadable = 99
    req_id = world.request(3, 0)
    world.submit(world.wanted[req_id])
    world.settle(1.0, work=True)
    assert world.failed == {req_id: "decode can't read prefill's memory"}
    assert not world.consumers[0].peers
    world.unreadable = 0
    world.settle(REFUSED_S)
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(5.0, work=True)
    assert len(world.completed) == 1


def test_a_known_session_with_other_memory_is_refused():
    world = World(1, 1)
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(5.0, work=True)
    (known,) = world.consumers[0].peers.values()
    world.stranger(replace(known.hello, metadata=b"other", secret=world.secret))
    assert world.consumers[0].peers[known.hello.session] is known
    assert not world.consumers[0].to_meet
    said = [message for _, _, _, message in world.network]
    assert len(said) == 1
    assert b"other memory" in said[0]


def test_without_a_secret_decode_says_nothing():
    consumer = Consumer("d", FACTS, 2, 1, 0, LIMITS)
    hello = Hello("p", "e", 1, 0, digest_of(FACTS), 9, (), b"", 1.0, False, "", FACTS)
    assert consumer.receive(0.0, hello)
    assert not consumer.receive(0.0, Publish("p", 1, "r", b"p" * 16, 1, 0, (), False))
    assert not consumer.outbox
    assert not consumer.to_meet
    consumer.use_secret("s")
    consumer.use_secret("")
    assert consumer.receive(0.0, replace(hello, secret="t")), "an empty secret is none"
    assert not consumer.outbox
    consumer.receive(0.0, Publish("p", 1, "r", b"p" * 16, 1, 0, (), False))
    assert consumer.outbox == [("p", NeedHello("d", "p"))]


def test_requests_of_an_earlier_start_do_not_keep_decode_from_being_found():
    """Prefill has a queue: a request of the start before comes after one of this one, whose Hello is lost."""
    world = World(1, 1)
    world.request(3, 0)
    (old,) = world.wanted.values()
    world.submit(old)
    world.start_decode_engine()
    world.submit(world.wanted[world.request(3, 0)])
    first, second = world.jobs.values()
    world.step(second, 1)
    world.step(first, 1)
    world.network.clear()
    world.settle(4 * HELLO_RETRY_S)
    assert world.consumers[0].peers
    world.settle(20.0, work=True)
    assert len(world.completed) == 1


BAD_CHUNKS = {
    "beyond the prompt": (Chunk(2, (1, 2), 1),),
    "beyond the cache": (Chunk(0, (40,), 1),),
    "a block twice": (Chunk(0, (1, 1), 1),),
    "a block twice, in two chunks": (Chunk(0, (1,), 1), Chunk(1, (1,), 1)),
    "overlapping": (Chunk(0, (1, 2), 1), Chunk(1, (3,), 1)),
    "more layers than there are": (Chunk(0, (1,), 3),),
    "after the last": (Chunk(0, (), 1), Chunk(0, (1,), 1)),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("chunks", BAD_CHUNKS.values(), ids=BAD_CHUNKS)
def test_chunks_that_cannot_be_end_their_own_request_only(chunks, known):
    world = World(1, 1)
    good = world.request(3, 0)
    world.submit(world.wanted[good])
    (job,) = world.jobs.values()
    world.step(job, 1)
    world.settle(1.0)
    bad = world.request(3, 0, "bad") if known else ""
    prompt = prompt_digest([world.requests])
    world.stranger(Publish(world.sessions[0], 99, "bad", prompt, 3, 0, chunks, False))
    world.settle(30.0, work=True)
    assert world.completed == [good]
    assert list(world.failed) == ([bad] if known else [])
    world.check_nothing_left()


def test_a_session_cannot_fill_decode_with_transfers_of_unknown_requests():
    world = World(1, 1)
    world.submit(world.wanted[world.request(3, 0)])
    world.settle(5.0, work=True)
    for number in range(EARLY_KEPT + 50):
        chunk = Chunk(0, (1,), 1)
        world.stranger(Publish(world.sessions[0], 1000 + number, "x", b"p" * 16, 1, 0, (chunk,), False))
    assert len(world.consumers[0]._early) == EARLY_KEPT


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
        del world.network[before:]  # decode's messages after a read never arrive
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


def test_shared_buffers_do_not_wait_a_lease_for_a_decode_that_never_answered():
    """One request that names a dead decode would stop the whole engine for so long."""
    world = World(1, 1, shared=True)
    (producer,) = world.producers
    for wait_s in (UNANSWERED_S, HELLO_RETRY_S):  # the second request finds the silence known
        world.submit(world.wanted[world.request(4, 0)])
        job = list(world.jobs.values())[-1]
        world.step(job, 4), world.step(job, 4)
        world.network.clear()
        world.now += wait_s - 0.1
        producer.tick(world.now)
        assert not world.may_overwrite(job)
        world.now += 0.1
        producer.tick(world.now)
        assert world.may_overwrite(job)
        world.network.clear()
    assert producer.metrics()["transfers_closed.unreachable"] == 2


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
