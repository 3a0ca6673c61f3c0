"""Cases for the plan: steps of a few requests on the partitions of one residency, with ids meant to hurt.

The tests of the ops and those of the AscendC kernels use the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from hypothesis import strategies as st

from vllm_kvoffload import ops
from vllm_kvoffload.policies import PLACEMENT_TABLE

INT32 = np.iinfo(np.int32)
MAX_QUERY_LEN = 4
KINDS = ("uniform", "recent", "one_set", "duplicates", "holes", "future", "extremes", "previous", "overfull")
STATE = ("tags", "ages", "hands", "high")
OUTPUT = (
    "slots",
    "new_slots",
    "miss_ids",
    "miss_slots",
    "miss_counts",
    "stats",
    "kinds",
    "miss_positions",
)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def numbered(first: int, count: int) -> torch.Tensor:
    """uint8 [count, 8]: rows that hold the numbers from ``first`` on."""
    return torch.arange(first, first + count, dtype=torch.int64).view(torch.uint8).view(count, 8)


def numbers(rows: torch.Tensor) -> list[int]:
    """Reads the numbers written by :func:`numbered`."""
    return rows.contiguous().view(torch.int64).flatten().tolist()


@dataclass(frozen=True)
class Shape:
    num_partitions: int
    ways: int
    sets: int
    topk: int
    policy: str
    placement: str = "one_set"

    @property
    def set_ways(self) -> int:
        return PLACEMENT_TABLE[self.placement].set_ways(self.ways)

    @property
    def slots_per_partition(self) -> int:
        return self.set_ways * self.sets

    @property
    def max_query_len(self) -> int:
        return min(MAX_QUERY_LEN, self.slots_per_partition // self.topk)

    def residency(self) -> ops.Residency:
        return ops.Residency.allocate(
            self.num_partitions,
            self.slots_per_partition,
            self.ways,
            self.policy,
            placement=self.placement,
        )

    @property
    def max_tokens(self) -> int:
        return (self.num_partitions + 1) * MAX_QUERY_LEN + 3

    def plan_out(self, *, compact: bool = False) -> ops.PlanOut:
        return ops.PlanOut(
            self.max_tokens, self.num_partitions + 1, self.topk, self.max_query_len, compact=compact
        )


@dataclass(frozen=True)
class Step:
    topk: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    reset: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.topk, self.query_start_loc, self.seq_lens, self.rows


class Partitions(Protocol):
    """What a step depends on: a residency's partitions of ``sets`` sets, and the query tokens' ids."""

    @property
    def num_partitions(self) -> int: ...
    @property
    def sets(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def max_query_len(self) -> int: ...


def choose_ids(
    rng: np.random.Generator, kind: str, shape: Partitions, seq_len: int, previous: np.ndarray
) -> np.ndarray:
    """int32 [topk] ids of one query token. previous: those of the query token before, empty for none."""
    count = shape.topk
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


@dataclass
class Request:
    """A partition's occupant: accepted tokens, and its last query's ids."""

    stable: int
    previous: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


def make_step(
    rng: np.random.Generator,
    shape: Partitions,
    requests: dict[int, Request],
    rows: Sequence[int],
    kinds: Sequence[str],
    length: int,
    *,
    whole: bool = False,
) -> Step:
    """One step of the occupants of these partitions; they advance by what is accepted. -1: none.

    Drafts are accepted or not, some requests have no tokens, some partitions change hands without a reset.

    Args:
        length: tokens that a new occupant may have. whole: every request has all its query tokens.
    """
    topk, starts, seq_lens = [], [0], []
    for partition in rows:
        request = requests.setdefault(partition, Request(int(rng.integers(0, length))))
        query_len = 0 if rng.random() < 0.05 else int(rng.integers(1, shape.max_query_len + 1))
        query_len = shape.max_query_len if whole else query_len
        seq_len = request.stable + query_len
        for _ in range(query_len):
            kind = str(rng.choice(kinds))
            topk.append(choose_ids(rng, kind, shape, max(seq_len, 1), request.previous))
            request.previous = topk[-1]
        starts.append(starts[-1] + query_len)
        seq_lens.append(seq_len)
        request.stable += int(rng.integers(0, query_len + 1))
        if rng.random() < 0.05:
            requests[partition] = Request(int(rng.integers(0, length // 2)))
    padding = int(rng.integers(0, 3))
    topk.extend(rng.integers(-1, length, shape.topk).astype(np.int32) for _ in range(padding))
    ids = np.stack(topk) if topk else np.zeros((0, shape.topk), np.int32)
    return Step(
        torch.from_numpy(ids),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
    )


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ways = draw(st.sampled_from([16, 32]))
    placement = draw(st.sampled_from(ops.PLACEMENTS))
    sets_per_id = PLACEMENT_TABLE[placement].sets_per_id
    sets = draw(st.sampled_from([1, 2, 4, 8])) * sets_per_id
    slots = ways // sets_per_id * sets
    # The tightest case, where every slot may be needed, is as likely as any other.
    topk = draw(st.one_of(st.integers(1, 32), st.just(slots // 4), st.just(slots)))
    policy = draw(st.sampled_from(ops.POLICIES))
    return Shape(draw(st.integers(1, 4)), ways, sets, min(topk, slots), policy, placement)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Shape, list[Step]]:
    """A residency's shape and 1 to 8 steps on it: partitions change hands, drafts get rejected, ids vary."""
    shape = draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([4, 40, 400]))
    requests = {partition: Request(int(rng.integers(0, length))) for partition in range(shape.num_partitions)}
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
        reset: tuple[int, ...] = ()
        reused = draw(st.sampled_from(["keep", "keep", "reset", "no reset"]))
        if reused != "keep":
            partition = int(rng.integers(0, shape.num_partitions))
            requests[partition] = Request(int(rng.integers(0, length)))
            reset = (partition,) if reused == "reset" else ()
        rows = rng.permutation(shape.num_partitions)[: rng.integers(1, shape.num_partitions + 1)].tolist()
        if rng.random() < 0.3:
            rows.insert(int(rng.integers(0, len(rows) + 1)), -1)
        steps.append(replace(make_step(rng, shape, requests, rows, kinds, length), reset=reset))
    return shape, steps
