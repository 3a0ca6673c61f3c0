"""dsa_plan on the CPU twin: equal to the oracle in every output and state byte, and no report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ascendc.plan_steps import PlanOnTwin, Shape, make_step
from tests.ascendc.twin_kernels import SCHEDULES, Kernels
from tests.plan_cases import KINDS, Request, Step
from vllm_kvoffload.policies import POLICIES

CORES = (1, 5, 40)
SMALL = [
    Shape(1, 16, 64, 16, "fifo"),
    Shape(3, 64, 64, 16, "rrip", 2, compact=True),
    Shape(2, 256, 64, 16, "clock", 4, compact=True),
    Shape(4, 512, 64, 32, "rrip", 4),
    Shape(2, 272, 256, 16, "clock", 2, compact=True),
    Shape(3, 128, 128, 32, "fifo", 4, compact=True),
    Shape(45, 16, 64, 16, "rrip", 2),
    Shape(1, 1024, 64, 16, "rrip", compact=True),
]
LARGE = [
    Shape(2, 2048, 512, 16, "rrip"),
    Shape(2, 2048, 512, 16, "rrip", 4, compact=True),
    Shape(1, 2048, 1024, 16, "clock", 4),
    Shape(2, 2048, 256, 32, "fifo", 2, compact=True),
    Shape(64, 64, 128, 16, "clock", 3, compact=True),
]


def run(
    kernels: Kernels, shape: Shape, seed: int, steps: int, kinds: tuple[str, ...] = KINDS
) -> torch.Tensor:
    """Returns the sum of the steps' stats."""
    rng = np.random.default_rng(seed)
    sequences: dict[int, Request] = {}
    plan = PlanOnTwin(shape)
    stats = torch.zeros_like(plan.out.stats)
    for i in range(steps):
        step = make_step(rng, shape, sequences, kinds)
        plan.oracle(step)
        stats += plan.out.stats
        for cores in CORES:
            for schedule in SCHEDULES:
                ran = plan.kernel(kernels, step, cores, schedule)
                assert not ran.reports, (i, cores, schedule, ran.reports[:5])
                assert plan.differences() == [], (i, cores, schedule)
    return stats


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_equals_oracle(kernels: Kernels, shape: Shape) -> None:
    run(kernels, shape, seed=shape.width, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_equals_oracle_at_full_size(kernels: Kernels, shape: Shape) -> None:
    run(kernels, shape, seed=shape.sets, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "policy", "max_query"),
    [
        (16 << (row + max_query) % 2, policy, max_query)
        for row, policy in enumerate(POLICIES)
        for max_query in (1, 2, 3, 4)
    ],
)
def test_equals_oracle_for_every_setting(kernels: Kernels, ways: int, policy: str, max_query: int) -> None:
    shape = Shape(3, 192, 64, ways, policy, max_query, compact=max_query % 2 == 0)
    run(kernels, shape, seed=ways + max_query, steps=6)


@pytest.mark.parametrize("policy", POLICIES)
def test_overflow(kernels: Kernels, policy: str) -> None:
    """Sets with more ids than ways, in every query token; also when all slots of the row are needed."""
    shape = Shape(2, 512, 64, 16, policy, 2, compact=True)
    stats = run(kernels, shape, seed=3, steps=3, kinds=("one_set", "overfull"))
    assert stats[3] > 200, "the case does not displace"
    stats = run(kernels, Shape(1, 1024, 64, 16, policy), seed=4, steps=3, kinds=("overfull", "uniform"))
    assert stats[3] > 0


@pytest.mark.parametrize("shape", [SMALL[0], SMALL[1], SMALL[3]], ids=str)
@pytest.mark.parametrize("cores", [1, 40])
def test_the_tiling_knows_the_unified_buffer(kernels: Kernels, shape: Shape, cores: int) -> None:
    """The bytes it counts are what the kernel takes: it runs in them, and not in a block less."""
    step = make_step(np.random.default_rng(1), shape, {}, KINDS, whole=True)
    plan = PlanOnTwin(shape)
    plan.oracle(step)
    data = kernels.tile("dsa_plan", shape.numbers(len(step.topk), len(step.rows)), cores)
    ran = plan.kernel(kernels, step, cores, "eager", ub_bytes=data["ub_bytes"])
    assert not ran.reports
    ran = plan.kernel(kernels, step, cores, "eager", ub_bytes=data["ub_bytes"] - 32)
    assert any("ub-" in report or "8192" in report for report in ran.reports), ran.reports


def by_hand(ids: list[list[int]], seq_len: int, row: int = 0) -> Step:
    return Step(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor([0, len(ids)], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        torch.tensor([row], dtype=torch.int32),
    )


def test_rejected_drafts_are_forgotten(kernels: Kernels) -> None:
    """Step 1 plans drafts 100 to 103; only 100 is accepted, so that 101 and 102 are new tokens of step 2."""
    shape = Shape(1, 16, 64, 16, "rrip", 4)
    plan = PlanOnTwin(shape)
    pad = [-1] * 12
    for step in (
        by_hand(
            [[100, 5, 6, 7, *pad], [101, 5, 6, 8, *pad], [102, 5, 6, 9, *pad], [103, 1, 2, 3, *pad]], 104
        ),
        by_hand([[101, 100, 5, 6, *pad], [102, 101, 100, 7, *pad]], 103),
    ):
        plan.oracle(step)
        for cores in CORES:
            ran = plan.kernel(kernels, step, cores, "lazy")
            assert not ran.reports
            assert plan.differences() == []
    assert plan.out.stats.tolist() == [4, 0, 2, 0, 2, 24]  # 100, 5, 6, 7 hit; 101 and 102 are new


def test_a_row_without_reset(kernels: Kernels) -> None:
    """A long request's row goes to a short one: all its residents are beyond the new one's prefix."""
    shape = Shape(1, 64, 64, 16, "clock")
    plan = PlanOnTwin(shape)
    for step in (by_hand([list(range(5000, 5064))], 6000), by_hand([list(range(64))], 80)):
        plan.oracle(step)
        ran = plan.kernel(kernels, step, 5, "lazy_reverse")
        assert not ran.reports
        assert plan.differences() == []
    assert plan.out.stats[1] == 64


def test_requests_that_the_host_should_have_refused(kernels: Kernels) -> None:
    """Too many query tokens, a row that isn't there, a length below the query's: no plan, nothing touched.

    What they get is what the oracle gives requests without a row; their neighbours are planned.
    """
    shape = Shape(4, 16, 64, 16, "rrip", 2, partitions=4)
    ids = torch.arange(16 * 8, dtype=torch.int32).reshape(8, 16)
    starts = torch.tensor([0, 3, 4, 6, 8], dtype=torch.int32)
    bad = Step(ids, starts, torch.tensor([500, 500, 1, 500]).int(), torch.tensor([0, 4, 1, 2]).int())
    plan = PlanOnTwin(shape)
    plan.oracle(Step(ids, starts, bad.seq_lens, torch.tensor([-1, -1, -1, 2]).int()))
    for cores in CORES:
        ran = plan.kernel(kernels, bad, cores, "lazy")
        assert not ran.reports
        assert plan.differences() == []
    assert plan.out.stats[1] == 32


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_requests(kernels: Kernels, tokens: int) -> None:
    shape = Shape(1, 16, 64, 16, "rrip", 1, compact=True)
    none = torch.zeros(0, dtype=torch.int32)
    step = Step(torch.zeros((tokens, 16), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), none, none)
    plan = PlanOnTwin(shape)
    plan.before["stats"][:] = 7
    plan.out.slots[:], plan.out.kinds[:] = 5, 6
    plan.oracle(step)
    plan.before["slots"][:], plan.before["kinds"][:] = 5, 6
    ran = plan.kernel(kernels, step, 5, "lazy")
    assert not ran.reports
    assert plan.differences() == []


def test_the_comparison_can_fail(kernels: Kernels) -> None:
    shape = Shape(1, 64, 64, 16, "clock")
    plan = PlanOnTwin(shape)
    step = by_hand([list(range(64))], 80)
    plan.oracle(step)
    plan.before["tags"][0, 3, 3] = 3
    plan.kernel(kernels, step, 1, "eager")
    assert "tags" in plan.differences()
