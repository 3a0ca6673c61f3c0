"""``plan``: cost of dsa_plan per step, K = 2048, 64 partitions, one thread.

- ``plan/pP/POLICY``: microseconds per partition on scored streams; baseline: an exact LRU scanning P slots.
- ``plan/pP/default``: the same for the default policy.
- ``plan/hits/pP/POLICY``: distinct ids hit, in per cent; baseline: the exact LRU's.
- ``plan/compact/pP``: the default policy, for compact delivery; baseline: in place.
- ``plan/two_sets/pP``: rrip3 where an id has two sets of 8 ways; baseline: the default's cost.
- ``plan/policy_cost/POLICY`` and ``default``: at P = 8192; baseline: fifo's cost.
- ``plan/flat_in_p/pP/rowsR``: the default policy on streams whose misses don't depend on P; baseline: P of
  4096. 64 partitions are planned from memory, 8 from a core's cache.

The rest that grows with P: the same ids fall in more cache lines. A partition has 64 bytes of tags and 16 of
ages per set of 16 slots; 2048 random ids touch all 20 KB of it at P = 4096 and nearly all of 80 KB at
P = 16384, two fifths of which go back to memory changed. The lines are fetched while the partition before is
planned, but 80 KB take about as long to arrive as that plan takes, so some of it shows; so do the 16 KB of
needed marks, one byte per slot, which no longer fit a core's first cache beside the partition. With more than
16 slots per id neither is done for the whole partition: each id then costs lines of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.baselines import ExactLRU
from benchmarks.measure import interleave
from benchmarks.registry import Row, higher_is_better, lower_is_better
from benchmarks.streams import scored_stream, turnover_stream
from vllm_kvoffload import ops

TOPK = 2048
PARTITIONS = 64
CONTEXT = 100_000
POOLS = (4096, 8192, 16384)
WARM_UP = 70  # steps until the largest pool is full
ROUNDS = 30
STREAMS = 16  # independent streams; further partitions share them, each with its ids shifted

Ids = npt.NDArray[np.int32]


def spread(streams: list[Ids], num_partitions: int = PARTITIONS) -> Ids:
    """[steps, num_partitions, TOPK] from fewer streams: shifted ids fall in other sets."""
    rows = []
    for row in range(num_partitions):
        ids = streams[row % len(streams)]
        rows.append((ids + row // len(streams) * 997) % CONTEXT if row >= len(streams) else ids)
    return np.ascontiguousarray(np.stack(rows, axis=1))


class PlanContender:
    """dsa_plan on its own residency."""

    def __init__(
        self,
        policy: str,
        slots: int,
        steps: Ids,
        *,
        compact: bool = False,
        placement: str = ops.DEFAULT_PLACEMENT,
    ) -> None:
        num_partitions = steps.shape[1]
        self.steps = [torch.from_numpy(step) for step in steps]
        self.residency = ops.Residency.allocate(num_partitions, slots, policy=policy, placement=placement)
        self.out = ops.PlanOut(num_partitions, num_partitions, TOPK, 1, compact=compact)
        self.workspace = ops.Workspace()
        self.starts = torch.arange(num_partitions + 1, dtype=torch.int32)
        self.rows = torch.arange(num_partitions, dtype=torch.int32)
        self.lengths = [
            torch.full((num_partitions,), CONTEXT + i + 1, dtype=torch.int32) for i in range(len(steps))
        ]

    def __call__(self, index: int) -> None:
        ops.dsa_plan(
            self.steps[index],
            self.starts,
            self.lengths[index],
            self.rows,
            self.residency,
            self.out,
            self.workspace,
        )

    def hit_percent(self) -> float:
        """Hit percentage of the last step."""
        hits, misses = self.out.stats[:2].tolist()
        return float(100 * hits / (hits + misses))


class LRUContender:
    """The exact LRU baseline."""

    def __init__(self, slots: int, steps: Ids) -> None:
        self.steps = steps
        self.lru = ExactLRU(PARTITIONS, slots, TOPK, CONTEXT + len(steps))
        self.stable = [np.full(PARTITIONS, CONTEXT + i, np.int32) for i in range(len(steps))]

    def __call__(self, index: int) -> None:
        self.lru.plan(self.steps[index], self.stable[index])

    def hit_percent(self) -> float:
        """Hit percentage of the last step."""
        return 100 - 100 * float(self.lru.miss_counts.sum()) / (PARTITIONS * TOPK)


def microseconds_per_partition(seconds: float, num_partitions: int = PARTITIONS) -> float:
    return seconds * 1e6 / num_partitions


def against_lru(slots: int, steps: Ids) -> Iterator[Row]:
    plans = {policy: PlanContender(policy, slots, steps) for policy in ops.POLICIES}
    lru = LRUContender(slots, steps)
    contenders: dict[str, Callable[[int], object]] = {policy: plans[policy] for policy in ops.POLICIES}
    contenders |= {"lru": lru, "compact": PlanContender(ops.DEFAULT_POLICY, slots, steps, compact=True)}
    two_sets = PlanContender("rrip3", slots, steps, placement="two_sets")
    contenders |= {"two_sets": two_sets}
    cost = interleave(contenders, WARM_UP, ROUNDS)
    baseline = microseconds_per_partition(cost["lru"])
    for policy in ops.POLICIES:
        yield lower_is_better(
            f"plan/p{slots}/{policy}", microseconds_per_partition(cost[policy]), "us/row", baseline
        )
    default = microseconds_per_partition(cost[ops.DEFAULT_POLICY])
    yield lower_is_better(f"plan/p{slots}/default", default, "us/row", baseline)
    compact = microseconds_per_partition(cost["compact"])
    yield lower_is_better(f"plan/compact/p{slots}", compact, "us/row", default)
    value = microseconds_per_partition(cost["two_sets"])
    yield lower_is_better(f"plan/two_sets/p{slots}", value, "us/row", default)
    plans["two_sets"] = two_sets
    for policy, plan in plans.items():
        yield higher_is_better(f"plan/hits/p{slots}/{policy}", plan.hit_percent(), "%", lru.hit_percent())
    if slots == 8192:
        fifo = microseconds_per_partition(cost["fifo"])
        for policy in ops.POLICIES:
            value = microseconds_per_partition(cost[policy])
            yield lower_is_better(f"plan/policy_cost/{policy}", value, "us/row", fifo)
        yield lower_is_better("plan/policy_cost/default", default, "us/row", fifo)


def flat_in_p(steps: Ids) -> Iterator[Row]:
    contenders: dict[str, Callable[[int], object]] = {
        f"p{slots}": PlanContender(ops.DEFAULT_POLICY, slots, steps) for slots in POOLS
    }
    cost = interleave(contenders, WARM_UP, ROUNDS)
    num_partitions = steps.shape[1]
    smallest = microseconds_per_partition(cost[f"p{POOLS[0]}"], num_partitions)
    for slots in POOLS[1:]:
        value = microseconds_per_partition(cost[f"p{slots}"], num_partitions)
        yield lower_is_better(f"plan/flat_in_p/p{slots}/rows{num_partitions}", value, "us/row", smallest)


def run() -> Iterator[Row]:
    """All figures; about half a minute."""
    total = WARM_UP + ROUNDS
    scored = spread([scored_stream(np.random.default_rng(i), total, CONTEXT, TOPK) for i in range(STREAMS)])
    for slots in POOLS:
        yield from against_lru(slots, scored)
    rngs = [np.random.default_rng(1000 + i) for i in range(STREAMS)]
    turnover = [turnover_stream(rng, total, CONTEXT, TOPK) for rng in rngs]
    for num_partitions in (PARTITIONS, 8):
        yield from flat_in_p(spread(turnover, num_partitions))
