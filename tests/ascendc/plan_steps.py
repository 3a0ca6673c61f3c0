"""Steps of dsa_plan on the twin: shapes, ids meant to hurt, and the call beside the oracle's."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.ascendc.twin_kernels import IN, IN_OUT, UB_BYTES, Kernels, Ran, aligned
from vllm_kvoffload.ops import oracle
from vllm_kvoffload.ops.types import PlanOut, Residency
from vllm_kvoffload.policies import POLICIES

STATE = ("tags", "ages", "hands", "high")
OUTPUT = ("slots", "new_slots", "miss_ids", "miss_slots", "miss_counts", "stats", "kinds", "miss_positions")
INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class Shape:
    requests: int
    width: int
    sets: int
    ways: int
    policy: str
    max_query: int = 1
    rows: int = 0  # of the residency; 0: one more than there are requests
    compact: bool = False

    @property
    def num_rows(self) -> int:
        return self.rows or self.requests + 1

    @property
    def max_tokens(self) -> int:
        return self.requests * self.max_query + 2

    def residency(self) -> Residency:
        return Residency.allocate(self.num_rows, self.sets * self.ways, self.ways, self.policy)

    def plan_out(self) -> PlanOut:
        return PlanOut(self.max_tokens, self.requests, self.width, self.max_query, compact=self.compact)

    def numbers(self, tokens: int, requests: int) -> tuple[int, ...]:
        """The tiling's shape."""
        return (
            requests,
            tokens,
            self.width,
            self.max_query,
            self.num_rows,
            self.sets,
            self.ways,
            POLICIES.index(self.policy),
            self.max_query * self.width,
            int(self.compact),
        )


@dataclass
class Step:
    topk: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor


@dataclass
class Sequence:
    """A row's occupant: accepted tokens, and what its last query chose."""

    stable: int
    previous: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


KINDS = ("uniform", "recent", "one_set", "duplicates", "holes", "future", "extremes", "previous", "overfull")


def choose_ids(
    rng: np.random.Generator, kind: str, shape: Shape, seq_len: int, previous: np.ndarray
) -> np.ndarray:
    """int32 [width] ids of one query token."""
    count = shape.width
    if kind == "recent":
        ids = seq_len - 1 - rng.integers(0, 2 * count, count)
    elif kind == "one_set":
        ids = np.resize(rng.permutation(max(seq_len // shape.sets, 1)), count) * shape.sets
        ids += rng.integers(0, shape.sets)
    elif kind == "overfull":  # more ids than ways in a few sets, some of them twice
        home = rng.integers(0, shape.sets, 3)
        ids = rng.choice(home, count) + shape.sets * rng.integers(0, max(seq_len // shape.sets, 1), count)
    elif kind == "duplicates":
        ids = rng.choice(rng.integers(0, seq_len, 5), count)
    elif kind == "future":
        ids = rng.integers(seq_len - 3, seq_len + 5, count)
    elif kind == "extremes":
        edge = [
            INT32.min,
            INT32.min + 1,
            -2,
            -1,
            0,
            1,
            seq_len - 2,
            seq_len - 1,
            seq_len,
            INT32.max - 1,
            INT32.max,
        ]
        ids = rng.choice(edge, count)
    elif kind == "previous" and len(previous):
        ids = previous.copy()
        changed = rng.random(count) < 0.1
        ids[changed] = rng.integers(0, seq_len, count)[changed]
    elif kind == "same":
        ids = np.arange(count) * 3
    else:
        ids = rng.permutation(np.arange(max(seq_len, count)))[:count]
        if kind == "holes":
            ids = np.where(rng.random(count) < 0.4, -1, ids)
    return np.asarray(ids).astype(np.int32)


def make_step(
    rng: np.random.Generator,
    shape: Shape,
    sequences: dict[int, Sequence],
    kinds: tuple[str, ...],
    whole: bool = False,
) -> Step:
    """One step: rows in any order, some requests without a row or without tokens, drafts accepted or not.
    ``whole``: every request has a row and all its query tokens."""
    rows = rng.permutation(shape.num_rows)[: shape.requests].astype(np.int32)
    if not whole:
        rows[rng.random(shape.requests) < 0.1] = -1
    topk, starts, seq_lens = [], [0], []
    for row in rows.tolist():
        sequence = sequences.setdefault(row, Sequence(int(rng.integers(0, 4 * shape.sets * shape.ways))))
        query = 0 if rng.random() < 0.05 else int(rng.integers(1, shape.max_query + 1))
        query = shape.max_query if whole else query
        seq_len = sequence.stable + query
        for _ in range(query):
            kind = str(rng.choice(kinds))
            topk.append(choose_ids(rng, kind, shape, max(seq_len, 1), sequence.previous))
            sequence.previous = topk[-1]
        starts.append(starts[-1] + query)
        seq_lens.append(seq_len)
        sequence.stable += int(rng.integers(0, query + 1))
        if rng.random() < 0.05:  # a new occupant, the row not reset
            sequences[row] = Sequence(int(rng.integers(0, 2 * shape.sets * shape.ways)))
    for _ in range(int(rng.integers(0, 3))):
        topk.append(rng.integers(-1, 100, shape.width).astype(np.int32))
    ids = np.stack(topk) if topk else np.full((1, shape.width), -1, np.int32)
    return Step(
        aligned(torch.from_numpy(ids)),
        aligned(torch.tensor(starts, dtype=torch.int32)),
        aligned(torch.tensor(seq_lens, dtype=torch.int32)),
        aligned(torch.from_numpy(rows)),
    )


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
