"""Cases for the plan: steps of a few requests on the rows of one residency, with ids meant to hurt."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st

from vllm_kvoffload import ops

INT32 = np.iinfo(np.int32)
MAX_QUERY_LEN = 4
KINDS = ("uniform", "recent", "one_set", "duplicates", "holes", "future", "extremes", "previous")
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
    num_rows: int
    ways: int
    sets: int
    topk: int
    policy: str

    @property
    def slots_per_row(self) -> int:
        return self.ways * self.sets

    @property
    def max_query_len(self) -> int:
        return min(MAX_QUERY_LEN, self.slots_per_row // self.topk)

    def residency(self) -> ops.Residency:
        return ops.Residency.allocate(self.num_rows, self.slots_per_row, self.ways, self.policy)

    @property
    def max_tokens(self) -> int:
        return (self.num_rows + 1) * MAX_QUERY_LEN + 3

    def plan_out(self, *, compact: bool = False) -> ops.PlanOut:
        return ops.PlanOut(self.max_tokens, self.num_rows + 1, self.topk, self.max_query_len, compact=compact)


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


def choose_ids(
    kind: str, rng: np.random.Generator, shape: Shape, count: int, seq_len: int, previous: np.ndarray
) -> np.ndarray:
    """int32 [count] ids of one query token."""
    if kind == "recent":
        ids = seq_len - 1 - rng.integers(0, 2 * shape.topk, count)
    elif kind == "one_set":
        ids = rng.permutation(4 * count)[:count] * shape.sets + rng.integers(0, shape.sets)
    elif kind == "duplicates":
        ids = rng.choice(rng.integers(0, seq_len, 3), count)
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
        ids = rng.choice(previous, count)
        changed = rng.random(count) < 0.2
        ids[changed] = rng.integers(0, seq_len, count)[changed]
    else:
        ids = rng.permutation(np.arange(max(seq_len, count)))[:count]
    if kind == "holes":
        ids = np.where(rng.random(count) < 0.4, -1, ids)
    return np.asarray(ids).astype(np.int32)


@dataclass
class Request:
    """A row's occupant: accepted tokens, and what its last query chose."""

    stable: int
    previous: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ways = draw(st.sampled_from([16, 32]))
    sets = draw(st.sampled_from([1, 2, 4, 8]))
    # The tightest case, where every slot may be needed, is as likely as any other.
    topk = draw(st.one_of(st.integers(1, 32), st.just(ways * sets // 4), st.just(ways * sets)))
    return Shape(
        draw(st.integers(1, 4)), ways, sets, min(topk, ways * sets), draw(st.sampled_from(ops.POLICIES))
    )


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Shape, list[Step]]:
    """A residency's shape and 1 to 8 steps on it: rows change hands, drafts get rejected, ids vary."""
    shape = draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.sampled_from([4, 40, 400]))
    requests = {row: Request(int(rng.integers(0, length))) for row in range(shape.num_rows)}
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
        reused = draw(st.sampled_from(["keep", "keep", "reset", "no reset"]))
        steps.append(make_step(rng, shape, requests, kinds, reused, length))
    return shape, steps


def make_step(
    rng: np.random.Generator,
    shape: Shape,
    requests: dict[int, Request],
    kinds: list[str],
    reused: str,
    length: int,
) -> Step:
    """One step; advances the requests by what they accept of it."""
    reset: tuple[int, ...] = ()
    if reused != "keep":
        row = int(rng.integers(0, shape.num_rows))
        requests[row] = Request(int(rng.integers(0, length)))
        reset = (row,) if reused == "reset" else ()
    rows = rng.permutation(shape.num_rows)[: rng.integers(1, shape.num_rows + 1)].tolist()
    if rng.random() < 0.3:
        rows.insert(int(rng.integers(0, len(rows) + 1)), -1)
    topk, starts, seq_lens = [], [0], []
    for row in rows:
        request = requests.get(row, Request(0))
        query_len = int(rng.integers(0 if rng.random() < 0.1 else 1, shape.max_query_len + 1))
        seq_len = request.stable + query_len
        for _ in range(query_len):
            ids = choose_ids(rng.choice(kinds), rng, shape, shape.topk, max(seq_len, 1), request.previous)
            topk.append(ids)
            request.previous = ids
        starts.append(starts[-1] + query_len)
        seq_lens.append(seq_len)
        request.stable += int(rng.integers(0, query_len + 1))
    padding = int(rng.integers(0, 3))
    topk.extend(rng.integers(-1, length, shape.topk).astype(np.int32) for _ in range(padding))
    ids = np.stack(topk) if topk else np.zeros((0, shape.topk), np.int32)
    return Step(
        torch.from_numpy(ids),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32),
        reset,
    )
