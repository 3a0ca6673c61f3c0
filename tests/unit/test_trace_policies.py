"""The numpy policies against straightforward ones, and the simulator's counting."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.trace.policies import REFERENCES, reference_misses
from vllm_kvoffload.trace.simulator import (
    ALL_POLICIES,
    PLANS,
    PlanPolicy,
    Result,
    fits,
    parse_policy,
    plan_misses,
    policy_name,
    simulate,
)
from vllm_kvoffload.trace.streams import TopkStream, stream_of, streams_of_trace
from vllm_kvoffload.trace.suite import TraceSpec, sources, write_trace

EMPTY = -1


def stream(*steps: tuple[int, list[list[int]]]) -> TopkStream:
    """From (seq_len, ids of each query token) per step."""
    made = TopkStream(0, "a")
    for seq_len, tokens in steps:
        made.append(seq_len, tuple(np.array(sorted(set(ids)), np.int32) for ids in tokens))
    return made


def one_token(*steps: list[int], length: int = 50) -> TopkStream:
    return stream(*((length + n, [ids]) for n, ids in enumerate(steps)))


@st.composite
def streams(draw, max_queries: int = 3, context: int = 12, width: int = 3):
    steps, stable = [], context
    for _ in range(draw(st.integers(1, 12))):
        queries = draw(st.integers(1, max_queries))
        tokens = [
            draw(st.lists(st.integers(0, stable + q), min_size=0, max_size=width)) for q in range(queries)
        ]
        steps.append((stable + queries, tokens))
        stable += draw(st.integers(1, queries))
    return stream(*steps)


# ------------------------------------------------------------------------------------------- streams


def test_old_and_new_ids():
    made = stream((10, [[1, 5, 8, 9]]), (12, [[9, 10, 11], [2, 11, 12, 9]]))
    first, second = made.steps
    assert (first.stable, first.old.tolist(), first.new.tolist()) == (9, [1, 5, 8], [9])
    # stable 10: 11 is beyond the first query token's own position, 12 beyond the second's
    assert (second.stable, second.old.tolist(), second.new.tolist()) == (10, [9, 2], [10, 11])
    assert (made.length, made.max_query_len, made.width, made.cut) == (12, 2, 4, False)


def test_a_stream_ends_at_lost_steps():
    made = stream((10, [[1]]), (11, [[2]]), (13, [[3]]), (14, [[4]]))
    assert made.cut
    assert [step.old.tolist() for step in made.steps] == [[1], [2]]


def test_streams_of_a_trace_are_those_generated(tmp_path):
    spec = TraceSpec("t", "", two_models(), context=300, requests=2, steps=6, query_len=2, topk=32)
    write_trace(tmp_path / "t", spec, seed=5)
    from vllm_kvoffload.trace import TraceReader

    found = {(s.group, s.name): s for s in streams_of_trace(TraceReader(tmp_path / "t"))}
    assert len(found) == 4
    for (group, request), steps in sources(spec, seed=5).items():
        expected = stream_of(f"request-{request}", steps, group)
        same = found[group, f"request-{request}"]
        assert len(same.steps) == len(expected.steps) == 6
        for a, b in zip(same.steps, expected.steps, strict=True):
            assert a.stable == b.stable
            assert a.old.tolist() == b.old.tolist()
            assert a.new.tolist() == b.new.tolist()


def two_models():
    from vllm_kvoffload.trace.generator import CANN, HISPARSE

    return (HISPARSE, CANN)


# ----------------------------------------------------------------- straightforward policies, as said


class Naive:
    """Subclasses order the residents; the first unneeded one gives way."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.residents: list[int] = []

    def plan(self, step, future) -> int:
        self.residents = [token for token in self.residents if token < step.stable]
        wanted = [*step.old.tolist(), *step.new.tolist()]
        misses = sum(token not in self.residents for token in step.old.tolist())
        missing = [token for token in wanted if token not in self.residents]
        for token in wanted:
            if token in self.residents:
                self.hit(token)
        for token in missing:
            if len(self.residents) == self.slots:
                self.evict(set(wanted), future)
            self.residents.append(token)
        return misses

    def hit(self, token: int) -> None:
        pass

    def evict(self, needed, future) -> None:
        del future
        self.residents.remove(next(token for token in self.residents if token not in needed))


class NaiveFIFO(Naive):
    pass


class NaiveLRU(Naive):
    """Within a step hits and misses age together, in the order asked for."""

    def plan(self, step, future) -> int:
        misses = super().plan(step, future)
        for token in (*step.old.tolist(), *step.new.tolist()):
            self.residents.remove(token)
            self.residents.append(token)
        return misses


class NaiveBelady(Naive):
    def evict(self, needed, future) -> None:
        def next_use(token: int) -> int:
            return next((n for n, step in enumerate(future) if token in step.old), 1 << 30)

        self.residents.remove(max((t for t in self.residents if t not in needed), key=next_use))


def naive_misses(policy: Naive, made: TopkStream) -> list[int]:
    return [policy.plan(step, made.steps[n + 1 :]) for n, step in enumerate(made.steps)]


@pytest.mark.parametrize(("name", "naive"), [("lru", NaiveLRU), ("fifo_full", NaiveFIFO)])
@settings(max_examples=200, deadline=None)
@given(made=streams(), spare=st.integers(0, 4))
def test_lru_and_fifo(name, naive, made, spare):
    slots = 9 + spare
    assert reference_misses(name, made, slots).tolist() == naive_misses(naive(slots), made)


@settings(max_examples=200, deadline=None)
@given(made=streams(max_queries=1), spare=st.integers(0, 4))
def test_belady_has_as_few_misses_as_belady(made, spare):
    """In sum: equally distant ids may give way in any order."""
    slots = 3 + spare
    assert reference_misses("belady", made, slots).sum() == sum(naive_misses(NaiveBelady(slots), made))


def least_misses(made: TopkStream, slots: int) -> int:
    """By trying all evictions."""
    states = {frozenset(): 0}
    for step in made.steps:
        wanted = frozenset(step.old.tolist()) | frozenset(step.new.tolist())
        following: dict[frozenset, int] = {}
        for residents, misses in states.items():
            others = residents - wanted
            room = slots - len(wanted)
            cost = misses + sum(token not in residents for token in step.old.tolist())
            for kept in itertools.combinations(sorted(others), min(room, len(others))):
                state = wanted | frozenset(kept)
                following[state] = min(following.get(state, cost), cost)
        states = following
    return min(states.values())


@settings(max_examples=60, deadline=None)
@given(made=streams(max_queries=1, context=6, width=2))
def test_belady_is_optimal(made):
    assert reference_misses("belady", made, 4).sum() == least_misses(made, 4)


@settings(max_examples=100, deadline=None)
@given(made=streams(), spare=st.integers(0, 3))
def test_no_policy_beats_belady_or_the_first_sights(made, spare):
    slots = 16 + spare * 16
    old = np.array([len(step.old) for step in made.steps])
    belady = reference_misses("belady", made, slots).sum()
    for name in REFERENCES:
        misses = reference_misses(name, made, slots)
        assert np.all((misses >= 0) & (misses <= old))
        if name not in ("previous", "fifo_cann"):  # those two take other things in
            assert misses.sum() >= belady


def naive_sieve(made: TopkStream, slots: int) -> list[int]:
    """With a list from old to new and a hand that is an id."""
    queue: list[int] = []
    visited: set[int] = set()
    hand = 0
    found = []
    for step in made.steps:
        gone = [t for t in queue if t >= step.stable]
        hand -= sum(queue.index(t) < hand for t in gone)
        queue = [t for t in queue if t < step.stable]
        visited &= set(queue)
        wanted = [*step.old.tolist(), *step.new.tolist()]
        missing = [t for t in wanted if t not in queue]
        visited |= {t for t in wanted if t in queue}
        found.append(sum(t in missing for t in step.old.tolist()))
        evictions = max(0, len(queue) + len(missing) - slots)
        while evictions:
            if hand >= len(queue):
                hand = 0
            token = queue[hand]
            if token in wanted:
                hand += 1
            elif token in visited:
                visited.discard(token)
                hand += 1
            else:
                queue.remove(token)
                evictions -= 1
        queue += missing
    return found


@settings(max_examples=300, deadline=None)
@given(made=streams(), spare=st.integers(0, 4))
def test_sieve(made, spare):
    assert reference_misses("sieve", made, 9 + spare).tolist() == naive_sieve(made, 9 + spare)


def naive_set_fifo(made: TopkStream, slots: int) -> list[int]:
    sets = slots // 16
    pool = [[EMPTY] * 16 for _ in range(sets)]
    hands = [0] * sets
    found = []
    for step in made.steps:
        missing = [t for t in step.old.tolist() if t not in pool[t % sets]]
        for token in missing:
            home = token % sets
            pool[home][hands[home]] = token
            hands[home] = (hands[home] + 1) % 16
        found.append(len(missing))
    return found


def test_set_fifo_wraps_and_protects_nothing():
    rng = random.Random(0)
    steps = [rng.sample(range(400), 60) for _ in range(60)]
    made = one_token(*steps, length=400)
    for slots in (32, 64, 128, 256):
        assert reference_misses("fifo_cann", made, slots).tolist() == naive_set_fifo(made, slots)


def test_previous_step_counts_what_the_step_before_chose():
    made = one_token([1, 2, 3], [2, 3, 4], [9], [2])
    assert reference_misses("previous", made, 0).tolist() == [3, 1, 1, 1]


def test_new_tokens_are_taken_in_uncounted_and_rejected_drafts_dropped():
    made = stream(
        (12, [[1, 10], [1, 11]]),  # stable 10: 10 and 11 are new
        (12, [[10, 11]]),  # one accepted: 10 is a hit, 11 is new again
        (13, [[11, 10]]),
    )
    for name in ("lru", "fifo_full", "random", "sieve", "belady", "previous"):
        assert reference_misses(name, made, 16).tolist() == [1, 0, 0], name
    assert reference_misses("fifo_cann", made, 16).tolist() == [1, 1, 1]
    assert plan_misses(PlanPolicy("rrip"), made, 16, 2).tolist() == [1, 0, 0]


# ----------------------------------------------------------------------------------------- simulator


@settings(max_examples=30, deadline=None)
@given(made=streams(context=90, width=5))
def test_plan_misses_are_the_oracles(made):
    choice, slots, topk = PlanPolicy("clock", 16), 32, 5
    residency = ops.Residency.allocate(1, slots, ways=16, policy="clock")
    out = ops.PlanOut(3, 1, topk, 3)
    expected = []
    for step in made.steps:
        ids = np.full((len(step.tokens), topk), -1, np.int32)
        for row, chosen in zip(ids, step.tokens, strict=True):
            row[: len(chosen)] = chosen
        starts, lens = np.array([0, len(ids)], np.int32), np.array([step.seq_len], np.int32)
        arguments = (ids, starts, lens, np.zeros(1, np.int32))
        oracle.dsa_plan(*map(torch.from_numpy, arguments), residency, out)
        expected.append(int(out.miss_counts[0]))
    assert plan_misses(choice, made, slots, topk).tolist() == expected


def test_simulate_sums_what_counts():
    made = [one_token([1, 2], [2, 3], [3, 1]), one_token([7, 8], [7, 8], [8, 9])]
    cold, warm = (
        {(r.policy, r.slots): r for r in simulate("t", made, 2, pools=[16, 32], warm_up=skipped)}
        for skipped in (0, 1)
    )
    assert cold["lru", 16] == Result("t", "lru", 16, steps=6, old_ids=12, misses=6)
    assert warm["lru", 16] == Result("t", "lru", 16, steps=4, old_ids=8, misses=2)
    assert warm["rrip/16", 32].misses == 2
    assert cold["previous", 0].misses == 7
    assert cold["lru", 16].hit_percent == pytest.approx(50)
    assert {slots for policy, slots in cold if policy != "previous"} == {16, 32}
    assert {policy for policy, _ in cold} == {policy_name(choice) for choice in ALL_POLICIES}
    assert Result.from_json(cold["lru", 16].as_json()) == cold["lru", 16]
    assert Result("t", "lru", 16, 0, 0, 0).hit_percent == 100


def test_pools_that_cannot_hold_a_step_are_left_out():
    made = [stream((12, [[1], [2]]))]
    assert not fits("lru", 16, made, topk=9)
    assert fits("lru", 32, made, topk=9)
    assert not fits(PlanPolicy("rrip", 32), 16, made, topk=1)
    assert not fits(PlanPolicy("rrip", 16), 48, made, topk=1)  # three sets
    assert fits("previous", 0, made, topk=9)


def test_policy_names():
    assert [parse_policy(policy_name(choice)) for choice in ALL_POLICIES] == list(ALL_POLICIES)
    assert {choice.policy for choice in PLANS} == set(ops.POLICIES)
    with pytest.raises(ValueError, match="rrip/16"):
        parse_policy("mru")
