"""I-2, I-3 and I-4, checked on the data itself and without the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.plan_cases import Shape, Step, sequences
from tests.property.ops_simulation import CompactSimulation, GatherSimulation, Simulation
from vllm_kvoffload import ops
from vllm_kvoffload.ops import _C
from vllm_kvoffload.policies import POLICIES, TABLE


@settings(max_examples=150, deadline=None)
@given(sequences())
def test_attended_rows_are_the_tokens_own(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    simulation = Simulation(shape)
    for step in steps:
        simulation.step(step)


@settings(max_examples=100, deadline=None)
@given(sequences())
def test_compact_rows_are_the_tokens_own(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    simulation = CompactSimulation(shape)
    for step in steps:
        simulation.step(step)


@settings(max_examples=100, deadline=None)
@given(sequences())
def test_gathered_rows_are_the_tokens_own(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    simulation = GatherSimulation(shape)
    for step in steps:
        simulation.step(step)


class OneRow:
    """A residency of one row, planned one step at a time with plain lists."""

    def __init__(self, policy: str, sets: int = 1, topk: int = 16) -> None:
        self.residency = ops.Residency.allocate(1, 16 * sets, 16, policy)
        self.topk = topk
        self.out = ops.PlanOut(4, 1, topk, max_query_len=16 * sets // topk)
        self.workspace = ops.Workspace()

    def plan(self, *queries: list[int], seq_len: int = 10_000) -> list[list[int]]:
        """Slots of each query's ids."""
        ids = torch.tensor([q + [-1] * (self.topk - len(q)) for q in queries], dtype=torch.int32)
        starts = torch.tensor([0, len(queries)], dtype=torch.int32)
        lengths = torch.tensor([seq_len], dtype=torch.int32)
        row = torch.tensor([0], dtype=torch.int32)
        ops.dsa_plan(ids, starts, lengths, row, self.residency, self.out, self.workspace)
        return [self.out.slots[t, : len(q)].tolist() for t, q in enumerate(queries)]

    def stat(self, name: str) -> int:
        return int(self.out.stats[ops.STATS.index(name)])

    def resident(self) -> set[int]:
        return set(self.residency.tags.flatten().tolist()) - {-1}


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_rejected_drafts_are_dropped(policy: str) -> None:
    """I-2: four tokens were planned from 100 on, one was accepted; the rest must not be hits any more."""
    row = OneRow(policy, sets=4)
    row.plan([100], [101], [102], [103], seq_len=104)
    assert row.resident() == {100, 101, 102, 103}
    row.plan([100], [101, 102], seq_len=103)
    assert row.stat("hits") == 1
    assert row.stat("new") == 2
    assert row.resident() == {100, 101, 102}
    row.plan([5], seq_len=51)  # far back, as after preemption
    assert row.resident() == {5, 50}


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_needed_rows_are_not_evicted(policy: str) -> None:
    """I-3: a full set keeps all that the step needs, named before or after the miss."""
    for victim_first in (True, False):
        row = OneRow(policy)
        slots = dict(zip(range(16), row.plan(list(range(16)))[0], strict=True))
        needed = list(range(1, 16))
        ids = [99, *needed] if victim_first else [*needed, 99]
        after = dict(zip(ids, row.plan(ids)[0], strict=True))
        assert after[99] == slots[0], "the only unneeded slot"
        assert all(after[i] == slots[i] for i in needed)
        assert row.stat("misses") == 1


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_a_plan_always_exists(policy: str) -> None:
    """I-4: as many ids of one set as the row has slots; those without room in it are gone afterwards."""
    row = OneRow(policy, sets=4)
    queries = [[64 * t + 4 * k for k in range(16)] for t in range(4)]
    slots = row.plan(*queries)
    assert sorted(slot for query in slots for slot in query) == list(range(64))
    assert row.stat("misses") == 64
    assert row.stat("displaced") == 48
    assert row.resident() == set(queries[0])
    row.plan(queries[0], queries[1])
    assert row.stat("hits") == 16
    assert row.stat("misses") == 16


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_displaced_ids_are_shared_by_duplicates(policy: str) -> None:
    row = OneRow(policy, sets=4)
    first, second = [4 * k for k in range(16)], [4 * k for k in range(16, 32)]
    slots = row.plan(first, second, second, first)
    assert slots[1] == slots[2]
    assert slots[0] == slots[3]
    assert row.stat("duplicates") == 32
    assert row.stat("displaced") == 16


def test_the_core_has_the_policies_of_the_table() -> None:
    assert tuple(_C.policies()) == POLICIES


@settings(max_examples=100, deadline=None)
@given(sequences())
def test_ages_fit_their_bits(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    residency, out, workspace = shape.residency(), shape.plan_out(), ops.Workspace()
    for step in steps:
        ops.dsa_plan(*step.inputs, residency, out, workspace)
        assert int(residency.ages.max()) < 1 << TABLE[shape.policy].age_bits


def test_fifo_evicts_in_order_of_arrival() -> None:
    row = OneRow("fifo")
    row.plan(list(range(16)), seq_len=16)
    row.plan([0, 1, 2], seq_len=16)  # hits change nothing
    evicted = []
    for new in range(100, 104):
        before = row.resident()
        row.plan([new], seq_len=new + 1)
        evicted += sorted(before - row.resident())
    assert evicted == [0, 1, 2, 3]


def test_clock_gives_a_second_chance() -> None:
    row = OneRow("clock")
    row.plan(list(range(16)), seq_len=16)
    row.plan([0, 1, 3], seq_len=16)
    evicted = []
    for new in (200, 201, 202):
        before = row.resident()
        row.plan([new], seq_len=new + 1)
        evicted += sorted(before - row.resident())
    assert evicted == [2, 4, 5]


def test_rrip_keeps_what_is_hit_again_through_a_scan() -> None:
    """Eight ids are chosen at every step while a scan of 200 others passes by."""
    row = OneRow("rrip")
    hot = list(range(8))
    row.plan(hot, seq_len=50)
    misses = 0
    for new in range(100, 300):
        row.plan([*hot, new], seq_len=new + 1)
        misses += row.stat("misses")
    assert misses == 0


def test_counts_add_up() -> None:
    row = OneRow("rrip", sets=2)
    row.plan([3, 4, 5], seq_len=100)
    row.plan([3, 3, 7, 7, 98, 99, -1, 120, 4], [4, 99, 8, 98, 100], seq_len=101)
    assert dict(zip(ops.STATS, row.out.stats.tolist(), strict=True)) == {
        "hits": 2,  # 3 and 4
        "misses": 3,  # 7, 8 and 98
        "new": 2,  # 99 and 100
        "displaced": 0,
        "duplicates": 5,
        "invalid": 20,  # -1, 120 and the 18 that fill the queries up to 16
    }


def test_new_tokens_without_room_get_no_slot() -> None:
    row = OneRow("rrip")
    row.plan(list(range(16)), seq_len=100)
    assert int(row.out.new_slots[0]) == -1
    row.plan(list(range(15)), seq_len=101)
    assert int(row.out.new_slots[0]) == 15
