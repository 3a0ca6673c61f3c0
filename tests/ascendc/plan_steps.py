"""Steps of dsa_plan on the twin: the kernel's shapes, and the call beside the oracle's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tests import plan_cases
from tests.ascendc.twin_kernels import IN, IN_OUT, UB_BYTES, Kernels, Ran, aligned
from tests.plan_cases import OUTPUT, STATE, Request, Step
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.ops.types import PlanOut, Residency
from vllm_kvoffload.policies import POLICIES


@dataclass(frozen=True)
class Shape:
    requests: int
    width: int
    sets: int
    ways: int
    policy: str
    max_query: int = 1
    partitions: int = 0  # of the residency; 0: one more than there are requests
    compact: bool = False

    @property
    def num_partitions(self) -> int:
        return self.partitions or self.requests + 1

    @property
    def topk(self) -> int:
        return self.width

    @property
    def max_query_len(self) -> int:
        return self.max_query

    @property
    def max_tokens(self) -> int:
        return self.requests * self.max_query + 2

    def residency(self) -> Residency:
        return Residency.allocate(self.num_partitions, self.sets * self.ways, self.ways, self.policy)

    def plan_out(self) -> PlanOut:
        return PlanOut(self.max_tokens, self.requests, self.width, self.max_query, compact=self.compact)

    def numbers(self, tokens: int, requests: int) -> tuple[int, ...]:
        """The tiling's shape."""
        return (
            requests,
            tokens,
            self.width,
            self.max_query,
            self.num_partitions,
            self.sets,
            self.ways,
            POLICIES.index(self.policy),
            self.max_query * self.width,
            int(self.compact),
        )


def make_step(
    rng: np.random.Generator,
    shape: Shape,
    requests: dict[int, Request],
    kinds: tuple[str, ...],
    whole: bool = False,
) -> Step:
    """One step: partitions in any order, some requests without a partition or without tokens, drafts accepted
    or not. ``whole``: every request has a partition and all its query tokens."""
    rows = rng.permutation(shape.num_partitions)[: shape.requests].astype(np.int32)
    if not whole:
        rows[rng.random(shape.requests) < 0.1] = -1
    length = 4 * shape.sets * shape.ways
    made = plan_cases.make_step(rng, shape, requests, rows.tolist(), kinds, length, whole=whole)
    return Step(*map(aligned, made.inputs))


class PlanOnTwin:
    """The oracle's state and outputs, and copies of them for the kernel.

    Each step the kernel starts from what the oracle started from, so that many settings can be run on one
    of the oracle's steps.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.residency = shape.residency()
        self.out = shape.plan_out()
        self.before = self.snapshot()

    def snapshot(self) -> dict[str, torch.Tensor]:
        tensors = {name: getattr(self.residency, name) for name in STATE}
        tensors |= {name: getattr(self.out, name) for name in OUTPUT}
        return {name: tensor.clone() for name, tensor in tensors.items()}

    def oracle(self, step: Step) -> None:
        self.before = self.snapshot()
        oracle.dsa_plan(step.topk, step.query_start_loc, step.seq_lens, step.rows, self.residency, self.out)

    def kernel(
        self,
        kernels: Kernels,
        step: Step,
        cores: int,
        schedule: str,
        drop: str = "",
        ub_bytes: int = UB_BYTES,
    ) -> Ran:
        inputs = [(name, getattr(step, name), IN) for name in ("topk", "query_start_loc", "seq_lens", "rows")]
        self.after = {name: aligned(tensor) for name, tensor in self.before.items()}
        state = [(name, self.after[name], IN_OUT) for name in (*STATE, *OUTPUT)]
        numbers = self.shape.numbers(len(step.topk), len(step.rows))
        return kernels.run("dsa_plan", [*inputs, *state], numbers, cores, schedule, drop, ub_bytes)

    def differences(self) -> list[str]:
        """Differences between kernel and oracle, in state and whole buffers."""
        expected = self.snapshot()
        return [name for name, tensor in self.after.items() if not torch.equal(tensor, expected[name])]
