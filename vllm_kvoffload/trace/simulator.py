"""Hit ratios of the real plan and of reference policies on a trace's requests.

Counts the distinct old ids of each step (see :class:`~vllm_kvoffload.trace.streams.StreamStep`): a miss is
one row fetched from host memory per layer, a hit a row already in the pool. Every request starts with an
empty pool, as after prefill on another engine; its first steps count unless excluded by ``warm_up``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from vllm_kvoffload.policies import DEFAULT_PLACEMENT, PLACEMENT_TABLE, PLACEMENTS, POLICIES
from vllm_kvoffload.trace.policies import REFERENCES, Misses, reference_misses
from vllm_kvoffload.trace.streams import TopkStream

POOLS = (4096, 8192, 16384)
UNSIZED = ("previous",)  # policies that have no pool


@dataclass(frozen=True)
class PlanPolicy:
    """A policy of the product's plan. policy, placement: of POLICIES, PLACEMENTS; ways: 16 or 32."""

    policy: str
    ways: int = 16
    placement: str = DEFAULT_PLACEMENT

    @property
    def name(self) -> str:
        """``rrip/16``; ``rrip/2x8`` where an id has two sets of 8 ways each."""
        placement = PLACEMENT_TABLE[self.placement]
        times = "" if placement.sets_per_id == 1 else f"{placement.sets_per_id}x"
        return f"{self.policy}/{times}{placement.set_ways(self.ways)}"


SimulatedPolicy: TypeAlias = PlanPolicy | str  # a string names one of policies.REFERENCES
PLANS = tuple(
    PlanPolicy(policy, ways, placement)
    for placement in PLACEMENTS
    for ways in (16, 32)
    for policy in POLICIES
)
ALL_POLICIES: tuple[SimulatedPolicy, ...] = (*PLANS, *REFERENCES)


@dataclass(frozen=True)
class Result:
    """Result of one policy at one pool size on all requests of a trace.

    slots: P; 0 for a policy without a size.
    steps: request steps counted.
    old_ids: distinct old ids in those steps.
    """

    trace: str
    policy: str
    slots: int
    steps: int
    old_ids: int
    misses: int

    @property
    def hit_percent(self) -> float:
        """100 when no old id was requested."""
        return 100 * (1 - self.misses / self.old_ids) if self.old_ids else 100.0

    @property
    def miss_percent(self) -> float:
        return 100 - self.hit_percent

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_percent": round(self.hit_percent, 4)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Result:
        """The inverse of :meth:`as_json`. Raises KeyError if a field is missing."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def parse_policy(name: str) -> SimulatedPolicy:
    """``rrip/16``, or a reference policy's name. Raises ValueError for any other."""
    for policy in ALL_POLICIES:
        if name == policy_name(policy):
            return policy
    raise ValueError(f"no policy {name!r}; there are {', '.join(map(policy_name, ALL_POLICIES))}")


def policy_name(policy: SimulatedPolicy) -> str:
    return policy if isinstance(policy, str) else policy.name


def fits(policy: SimulatedPolicy, slots: int, streams: Iterable[TopkStream], topk: int) -> bool:
    """Whether the pool can hold every step (I-4), as the product's start-up check requires."""
    if policy in UNSIZED:
        return True
    sets = slots // policy.ways if isinstance(policy, PlanPolicy) else slots // 16
    whole = sets > 0 and sets & (sets - 1) == 0
    return whole and all(slots >= stream.max_query_len * topk for stream in streams)


def plan_misses(policy: PlanPolicy, stream: TopkStream, slots: int, topk: int) -> Misses:
    """Misses of each step of the compiled plan, int64 [steps]."""
    import torch

    from vllm_kvoffload import ops

    residency = ops.Residency.allocate(1, slots, policy.ways, policy.policy, placement=policy.placement)
    query_len = stream.max_query_len
    out = ops.PlanOut(query_len, 1, topk, query_len)
    workspace = ops.Workspace()
    ids = torch.empty((query_len, topk), dtype=torch.int32)
    starts = torch.zeros(2, dtype=torch.int32)
    lengths, rows = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    misses = np.empty(len(stream.steps), np.int64)
    for index, step in enumerate(stream.steps):
        ids.fill_(-1)
        for token, token_ids in enumerate(step.tokens):
            ids.numpy()[token, : len(token_ids)] = token_ids
        starts[1] = len(step.tokens)
        lengths[0] = step.seq_len
        ops.dsa_plan(ids[: len(step.tokens)], starts, lengths, rows, residency, out, workspace)
        misses[index] = int(out.miss_counts[0])
    return misses


def simulate(
    trace: str,
    streams: Sequence[TopkStream],
    topk: int,
    *,
    policies: Sequence[SimulatedPolicy] = ALL_POLICIES,
    pools: Sequence[int] = POOLS,
    warm_up: int = 0,
) -> Iterator[Result]:
    """All policies at all sizes, except where a pool can't hold a step.

    Args:
        trace: its name, for the results.
        streams: its requests.
        topk: K of the trace.
        warm_up: number of initial steps of each request to exclude.
    """
    counted = [stream.steps[warm_up:] for stream in streams]
    steps = sum(map(len, counted))
    old_ids = sum(len(step.old) for steps_of_one in counted for step in steps_of_one)
    for policy in policies:
        for slots in (0,) if policy in UNSIZED else pools:
            if not fits(policy, slots, streams, topk):
                continue
            misses = 0
            for stream in streams:
                if isinstance(policy, str):
                    found = reference_misses(policy, stream, slots)
                else:
                    found = plan_misses(policy, stream, slots, topk)
                misses += int(found[warm_up:].sum())
            yield Result(trace, policy_name(policy), slots, steps, old_ids, misses)
