"""``npu_cycles``: the AscendC plan's cost by the CPU twin's cost model, in microseconds at 1.85 GHz.

No figure is measured on a device: the twin adds up cycles for every access of the scalar unit, every vector
instruction, copy and flag (``csrc/acpu/cost.h``); scalar arithmetic and control flow are free. The figures
compare versions of the kernel, and show where its time goes.

- ``npu_cycles/ROWS/STATE``: K = 2048, P = 8192 in 16 ways, policy ``rrip``, one query token; ``full``: 1,900
  hits and 148 misses in a full pool; ``cold``: an empty pool; ``filling``: half of the pool is empty. 64 rows
  on 48 cores, one row on 8.
- ``npu_cycles/4x4/full``: four rows of four query tokens each, P = 16384, 48 cores.

Baseline: the copies alone, shared equally by the cores at 40 GB/s, and 1 us for their latency.
Needs the twin, which is built at first use (cmake and a C++20 compiler).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.registry import Row, lower_is_better
from tests.ascendc.plan_steps import PlanOnTwin, Shape
from tests.ascendc.twin_kernels import Kernels, Ran, aligned, build
from tests.plan_cases import Step

GHZ = 1.85
TOPK, CONTEXT, MISSES = 2048, 131072, 148
COPY_BYTES_PER_US = 40_000


@dataclass(frozen=True)
class Case:
    """``filled``: share of the pool's slots that hold a row."""

    name: str
    rows: int
    cores: int
    slots: int
    filled: float
    queries: int = 1


CASES = (
    Case("64/full", 64, 48, 8192, 1.0),
    Case("64/filling", 64, 48, 8192, 0.5),
    Case("64/cold", 64, 48, 8192, 0.0),
    Case("1/full", 1, 8, 8192, 1.0),
    Case("1/cold", 1, 8, 8192, 0.0),
    Case("4x4/full", 4, 48, 16384, 1.0, queries=4),
)


def run() -> Iterator[Row]:
    """All rows; about half a minute, and the twin's build."""
    kernels = Kernels(build())
    for case in CASES:
        ran = plan(kernels, case)
        copies = 1 + ran.work["copied_bytes"] / case.cores / COPY_BYTES_PER_US
        yield lower_is_better(f"npu_cycles/{case.name}", sum(ran.phases) / GHZ / 1e3, "us", copies)


def plan(kernels: Kernels, case: Case) -> Ran:
    """One plan on the twin. Raises ``RuntimeError`` if the twin reports anything."""
    shape = Shape(case.rows, TOPK, case.slots // 16, 16, "rrip", case.queries, partitions=case.rows)
    plans, rng = PlanOnTwin(shape), np.random.default_rng(0)
    topk = [fill(plans, shape, row, case, rng) for row in range(case.rows)]
    tokens = np.arange(case.rows + 1) * case.queries
    inputs = (
        torch.from_numpy(np.concatenate(topk)),
        torch.from_numpy(tokens.astype(np.int32)),
        torch.full((case.rows,), CONTEXT + case.queries, dtype=torch.int32),
        torch.arange(case.rows, dtype=torch.int32),
    )
    plans.before = plans.snapshot()
    ran = plans.kernel(kernels, Step(*map(aligned, inputs)), case.cores, "eager")
    if ran.reports:
        raise RuntimeError(f"npu_cycles/{case.name}: {ran.reports[0]}")
    return ran


def fill(plans: PlanOnTwin, shape: Shape, row: int, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Fills a row's pool with ids of its context; returns the ids that the step selects, [queries, K]."""
    sets, ways = shape.sets, shape.ways
    order = (
        np.argsort(rng.random((sets, CONTEXT // sets)), axis=1)[:, :ways] * sets + np.arange(sets)[:, None]
    )
    order[rng.random(order.shape) >= case.filled] = -1
    plans.residency.tags[row].view(sets, ways).copy_(torch.from_numpy(order.astype(np.int32)))
    plans.residency.high[row] = CONTEXT
    resident = order[order >= 0]
    absent = np.setdiff1d(np.arange(CONTEXT), resident)
    selected = []
    for _ in range(case.queries):
        hits = rng.permutation(resident)[: TOPK - MISSES]
        misses = rng.permutation(absent)[: TOPK - len(hits)]
        selected.append(rng.permutation(np.concatenate([hits, misses])).astype(np.int32))
    return np.stack(selected)
