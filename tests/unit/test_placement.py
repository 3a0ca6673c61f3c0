"""Placements: the sets of an id, and what a choice of two sets does for a plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.policies import PLACEMENT_TABLE
from vllm_kvoffload.policies.placement import BLOCK_SETS

TWO_SETS = PLACEMENT_TABLE["two_sets"]
PLANS = {"oracle": oracle.dsa_plan, "native": ops.dsa_plan}


@given(st.integers(0, 2**31 - 1), st.integers(0, 16))
def test_the_first_set_is_the_ids_low_bits(token: int, bits: int) -> None:
    assert PLACEMENT_TABLE["one_set"].sets_of(token, 1 << bits) == (token % (1 << bits),)


@given(st.integers(0, 2**31 - 1), st.integers(1, 16))
def test_two_different_sets_of_one_block(token: int, bits: int) -> None:
    first, second = TWO_SETS.sets_of(token, 1 << bits)
    assert first == token % (1 << bits)
    assert 0 <= second < 1 << bits
    assert first != second
    assert first // BLOCK_SETS == second // BLOCK_SETS


@pytest.mark.parametrize("sets", [512, 1024, 2048])
def test_second_sets_are_spread_evenly(sets: int) -> None:
    """100K tokens, and the multiples of the number of sets among 10 million: those share their first set."""
    seconds = np.bincount([TWO_SETS.sets_of(token, sets)[1] for token in range(100_000)], minlength=sets)
    assert seconds.min() > 0.6 * seconds.mean()
    assert seconds.max() < 1.4 * seconds.mean()
    crowd = np.bincount([TWO_SETS.sets_of(token, sets)[1] for token in range(0, 10**7, sets)], minlength=sets)
    used = crowd[crowd > 0]
    assert len(used) == BLOCK_SETS // 2
    assert used.max() < 1.4 * used.mean()


SETS, SEQ_LEN = 32, 90_000
NEW_SETS = TWO_SETS.sets_of(SEQ_LEN - 1, SETS)
"""A plan places the step's own token too, in one of these."""
TOKEN = next(token for token in range(100) if not {*TWO_SETS.sets_of(token, SETS)} & {*NEW_SETS})
FIRST, SECOND = TWO_SETS.sets_of(TOKEN, SETS)


class OneRow:
    """One partition of 256 slots, 16 ways per id."""

    def __init__(self, plan: str, placement: str) -> None:
        self.residency = ops.Residency.allocate(1, 256, 16, "rrip3", placement=placement)
        self.out = ops.PlanOut(1, 1, 64, 1)
        self.workspace = ops.Workspace()
        self.run = PLANS[plan]

    def plan(self, ids: list[int]) -> list[int]:
        """Slots of the ids."""
        topk = torch.tensor([ids + [-1] * (64 - len(ids))], dtype=torch.int32)
        starts, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([SEQ_LEN], dtype=torch.int32)
        row = torch.tensor([0], dtype=torch.int32)
        self.run(topk, starts, length, row, self.residency, self.out, self.workspace)
        return self.out.slots[0, : len(ids)].tolist()

    def stat(self, name: str) -> int:
        return int(self.out.stats[ops.STATS.index(name)])


@pytest.mark.parametrize("plan", PLANS)
def test_ids_that_crowd_one_set_have_room_in_others(plan: str) -> None:
    """40 ids whose low bits are the same: with one set of 16, 24 are displaced and missed again."""
    crowd = [32 * n for n in range(40)]
    for placement, displaced in (("one_set", 24), ("two_sets", 0)):
        row = OneRow(plan, placement)
        row.plan(crowd)
        assert row.stat("displaced") == displaced
        row.plan(crowd)
        assert row.stat("hits") == 40 - displaced


@pytest.mark.parametrize("plan", PLANS)
def test_the_emptier_set_is_filled_first(plan: str) -> None:
    row = OneRow(plan, "two_sets")
    assert row.residency.num_sets == SETS
    assert row.plan([TOKEN]) == [FIRST * 8], "the first set if both are as empty"
    row = OneRow(plan, "two_sets")
    row.residency.tags[0, FIRST, 0] = TOKEN + SETS
    assert row.plan([TOKEN]) == [SECOND * 8]
    row.residency.tags[0, SECOND, 1:4] = TOKEN + SETS
    same = range(TOKEN + SETS, SEQ_LEN, SETS)
    later = next(token for token in same if TWO_SETS.sets_of(token, SETS) == (FIRST, SECOND))
    assert row.plan([later]) == [FIRST * 8 + 1], "the lowest empty way"


@pytest.mark.parametrize("plan", PLANS)
def test_the_victim_is_the_oldest_of_both_sets(plan: str) -> None:
    others = [index for index in range(SETS) if index not in (FIRST, SECOND, *NEW_SETS)]
    for oldest in ((FIRST, 3), (SECOND, 6)):
        row = OneRow(plan, "two_sets")
        row.residency.tags[0] = torch.arange(256).view(8, SETS).T + 256 * SETS  # all full, none wanted
        row.residency.ages[0] = 2
        row.residency.ages[0][oldest] = 4
        assert row.plan([TOKEN]) == [oldest[0] * 8 + oldest[1]]
        aged = row.residency.ages[0, [FIRST, SECOND]].flatten().tolist()
        assert sorted(aged) == [5] * 15 + [6], "the others of both sets aged with it"
        assert set(row.residency.ages[0, others].flatten().tolist()) == {2}, "and no other set"


def test_what_a_residency_refuses() -> None:
    with pytest.raises(ValueError, match=r"placement: must be one of one_set, two_sets, got 'three'"):
        ops.Residency.allocate(1, 64, placement="three")
    good = ops.Residency.allocate(1, 64, placement="two_sets")
    tensors = (good.tags, good.ages, good.hands, good.high)
    assert (good.num_sets, good.set_ways, good.ways, good.slots_per_partition) == (8, 8, 16, 64)
    with pytest.raises(ValueError, match="placement: expected one_set or two_sets, got 'three'"):
        ops.Residency(*tensors, "rrip", "three")
    with pytest.raises(ValueError, match="ways must be 16 or 32, got 8"):
        ops.Residency(*tensors, "rrip", "one_set")
    single = (torch.full((1, 1, 8), -1, dtype=torch.int32), torch.zeros((1, 1, 8), dtype=torch.uint8))
    with pytest.raises(ValueError, match="need at least two sets, got 1"):
        ops.Residency(*single, good.hands[:, :1].contiguous(), good.high, "rrip", "two_sets")


def test_the_published_plan_has_one_set() -> None:
    from vllm_kvoffload.ops import conformance

    residency = ops.Residency.allocate(1, 64, 32, "fifo", placement="two_sets")
    out = conformance.ConformanceOut(1, 1, 16, 1)
    one, start = torch.tensor([0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    ids = torch.zeros((1, 16), dtype=torch.int32)
    with pytest.raises(ValueError, match="places an id in one set"):
        conformance.plan(ids, start, torch.tensor([9], dtype=torch.int32), one, residency, 100, out)
