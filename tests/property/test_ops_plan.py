"""The compiled plan equals the oracle, in every output and state byte and on every instruction set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan_cases import OUTPUT, STATE, Shape, Step, sequences
from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.policies import PLACEMENT_TABLE


@pytest.fixture(autouse=True)
def _restore_isa() -> Iterator[None]:
    before = ops.isa()
    yield
    ops.set_isa(before)


def assert_same(names: tuple[str, ...], actual: object, expected: object, where: str) -> None:
    for name in names:
        got, want = getattr(actual, name), getattr(expected, name)
        assert torch.equal(got, want), f"{where}: {name} differs at {(got != want).nonzero()[:5].tolist()}"


def run_all(shape: Shape, steps: list[Step], *, compact: bool = False) -> torch.Tensor:
    """Every step on the oracle and on every instruction set; returns the summed stats."""
    isas = ops.available_isas()
    reference, expected = shape.residency(), shape.plan_out(compact=compact)
    native = {isa: (shape.residency(), shape.plan_out(compact=compact), ops.Workspace()) for isa in isas}
    total = torch.zeros_like(expected.stats)
    for number, step in enumerate(steps):
        for row in step.reset:
            for residency in (reference, *(state[0] for state in native.values())):
                residency.reset_partition(row)
        oracle.dsa_plan(*step.inputs, reference, expected)
        total += expected.stats
        for isa, (residency, out, workspace) in native.items():
            ops.set_isa(isa)
            ops.dsa_plan(*step.inputs, residency, out, workspace)
            assert_same(OUTPUT, out, expected, f"step {number} on {isa}")
            assert_same(STATE, residency, reference, f"step {number} on {isa}")
    return total


@settings(max_examples=150, deadline=None)
@given(sequences(), st.booleans())
def test_equals_oracle(case: tuple[Shape, list[Step]], compact: bool) -> None:
    run_all(*case, compact=compact)


@settings(max_examples=40, deadline=None)
@given(sequences())
def test_compact_outputs_change_nothing_else(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    plain, compact = (
        (shape.residency(), shape.plan_out(compact=flag), ops.Workspace()) for flag in (False, True)
    )
    for step in steps:
        for residency, out, workspace in (plain, compact):
            ops.dsa_plan(*step.inputs, residency, out, workspace)
        assert_same(STATE, plain[0], compact[0], "state")
        assert_same(OUTPUT[:-2], plain[1], compact[1], "output")


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ops.POLICIES),
    st.sampled_from(ops.PLACEMENTS),
    st.sampled_from([16, 32]),
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(-2, 80), min_size=20, max_size=20)),
        min_size=1,
        max_size=12,
    ),
)
def test_equals_oracle_on_one_busy_row(
    policy: str, placement: str, ways: int, steps: list[tuple[int, list[int]]]
) -> None:
    """Ids drawn one by one, so that failures shrink to readable cases; few slots, so that steps evict."""
    shape = Shape(1, ways, 2 if placement == "one_set" else 4, topk=20, policy=policy, placement=placement)
    run_all(
        shape,
        [
            Step(
                torch.tensor([ids], dtype=torch.int32),
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([70 + length], dtype=torch.int32),
                torch.tensor([0], dtype=torch.int32),
            )
            for length, ids in steps
        ],
    )


@pytest.mark.parametrize("policy", ops.POLICIES)
@pytest.mark.parametrize("placement", ops.PLACEMENTS)
@pytest.mark.parametrize("ways", [16, 32])
def test_equals_oracle_with_every_id_in_one_set(policy: str, placement: str, ways: int) -> None:
    """As many ids as slots, first all of one set: displacement by the thousand, then two friendlier steps."""
    set_ways = PLACEMENT_TABLE[placement].set_ways(ways)
    shape = Shape(1, ways, 2048 // set_ways, topk=512, policy=policy, placement=placement)
    rng = np.random.default_rng(7)
    steps = []
    for stride in (shape.sets, 1, shape.sets // 2):
        ids = rng.permutation(8_000)[:2048].reshape(4, 512) * stride
        steps.append(
            Step(
                torch.from_numpy(ids.astype(np.int32)),
                torch.tensor([0, 4], dtype=torch.int32),
                torch.tensor([4_000_000], dtype=torch.int32),
                torch.tensor([0], dtype=torch.int32),
            )
        )
    stats = dict(zip(ops.STATS, run_all(shape, steps, compact=True).tolist(), strict=True))
    # With two sets per id, the ids of one first set have half of a block of 64 sets as their second.
    room = ways if placement == "one_set" else (1 + min(shape.sets, 64) // 2) * set_ways
    assert stats["displaced"] >= 2048 - room


@pytest.mark.parametrize("isa", ops.available_isas())
def test_tampered_state_is_survived(isa: str) -> None:
    """Ages above 3, hands beyond W and a wild high must not lead the core out of bounds."""
    ops.set_isa(isa)
    shape = Shape(num_partitions=1, ways=16, sets=2, topk=32, policy="rrip")
    for policy, placement in itertools.product(ops.POLICIES, ops.PLACEMENTS):
        residency = ops.Residency.allocate(1, 32, 16, policy, placement=placement)
        sets = residency.num_sets
        residency.tags.copy_(torch.arange(32, dtype=torch.int32).view(1, 32 // sets, sets).transpose(1, 2))
        residency.ages.fill_(255)
        residency.hands.fill_(255)
        residency.high.fill_(torch.iinfo(torch.int32).max)
        out = shape.plan_out()
        ids = torch.arange(100, 132, dtype=torch.int32).view(1, 32)
        one = torch.tensor([0], dtype=torch.int32)
        start = torch.tensor([0, 1], dtype=torch.int32)
        ops.dsa_plan(ids, start, torch.tensor([200], dtype=torch.int32), one, residency, out, ops.Workspace())
        assert sorted(out.slots[0].tolist()) == list(range(32))


def test_workspace_is_shared_between_shapes() -> None:
    """One workspace serves residencies of any size, in any order."""
    workspace = ops.Workspace()
    for sets, topk in ((1, 16), (8, 100), (2, 5), (8, 128)):
        shape = Shape(num_partitions=2, ways=16, sets=sets, topk=topk, policy="clock")
        residency, reference, out, expected = (
            shape.residency(),
            shape.residency(),
            shape.plan_out(),
            shape.plan_out(),
        )
        for start in (0, 50, 25):
            step = Step(
                torch.arange(start, start + 2 * topk, dtype=torch.int32).view(2, topk),
                torch.tensor([0, 1, 2], dtype=torch.int32),
                torch.tensor([500, 400], dtype=torch.int32),
                torch.tensor([1, 0], dtype=torch.int32),
            )
            ops.dsa_plan(*step.inputs, residency, out, workspace)
            oracle.dsa_plan(*step.inputs, reference, expected)
            assert_same(OUTPUT, out, expected, f"sets {sets}")
            assert_same(STATE, residency, reference, f"sets {sets}")
