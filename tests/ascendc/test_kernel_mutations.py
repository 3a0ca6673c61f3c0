"""Each synchronisation of the kernels is taken away in turn; the twin must report it or the result differ.

A site is a place in the source: SetFlag and WaitFlag of one KVOFFLOAD_ORDER go together. So do a barrier's
passes through a loop. Sites that kernels share (row_mover.h and the like) are tried in each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.ascendc.gather_steps import Selections, gather, make_topk, oracle_gather
from tests.ascendc.plan_steps import PlanOnTwin, Shape, make_step
from tests.ascendc.row_steps import (
    Layout,
    Rows,
    host_write,
    install,
    make_batch,
    make_kinds,
    make_misses,
    make_slots,
    oracle_serve,
    random_rows,
    serve,
    serve_compact,
)
from tests.ascendc.twin_kernels import ROOT, SCHEDULES, Kernels, Ran, aligned
from tests.plan_cases import KINDS, Request
from vllm_kvoffload.ops import oracle

Case = Callable[[Kernels, str, str], Ran]  # (library, schedule, site to drop)
MOST = 1 << 20
SYNCHRONISES = re.compile(
    r"^\s*(KVOFFLOAD_ORDER\(|.*\b(PipeBarrier<|SyncAll\(|EnQue\(|DeQue<|FreeTensor\(|AllocTensor<))"
)
MIXED = Layout(5, width=64, slots=256, max_query=3)
LONG = Layout(2, width=512, slots=2048, max_query=4, row_bytes=(32, 32), block_size=64, table_width=30)


def differs(ran: Ran, same: bool) -> Ran:
    if not same:
        ran.reports.append("a different result")
    return ran


def plan_case(shape: Shape, cores: int, kinds: tuple[str, ...], steps: int = 3) -> Case:
    """All query tokens in every second step."""
    rng = np.random.default_rng(shape.width)
    sequences: dict[int, Request] = {}
    plan = PlanOnTwin(shape)
    made = []
    for i in range(steps):
        step = make_step(rng, shape, sequences, kinds, whole=i % 2 == 1 or len(kinds) == 1)
        plan.oracle(step)
        made.append((step, plan.before, plan.snapshot()))

    def case(kernels: Kernels, schedule: str, drop: str) -> Ran:
        total = Ran([])
        for step, plan.before, expected in made:
            ran = plan.kernel(kernels, step, cores, schedule, drop)
            differs(ran, all(torch.equal(plan.after[name], expected[name]) for name in expected))
            total.reports += ran.reports
            for key, apis in ran.sites.items():
                total.sites.setdefault(key, set()).update(apis)
            if total.reports:
                break
        return total

    return case


def serve_case(layout: Layout, seed: int, cores: int, kernels: Kernels, schedule: str, drop: str) -> Ran:
    batch = make_batch(layout, seed)
    misses = make_misses(batch, MOST)
    oracle_serve(batch, misses)
    ran = serve(kernels, batch, misses, cores, schedule, drop)
    return differs(ran, batch.hot.same())


def compact_case(layout: Layout, seed: int, cores: int, kernels: Kernels, schedule: str, drop: str) -> Ran:
    batch = make_batch(layout, seed)
    kinds = make_kinds(batch)
    selection = Rows(layout, random_rows(batch.rng, batch.tokens, layout.width, layout.bytes))
    oracle.dsa_serve_compact(
        kinds,
        batch.query_start_loc,
        batch.seq_lens,
        batch.host.whole,
        batch.hot.whole,
        batch.block_table,
        batch.rows,
        batch.new_rows.whole,
        selection.whole,
    )
    ran = serve_compact(kernels, batch, kinds, selection, cores, schedule, drop)
    return differs(ran, selection.same())


def install_case(layout: Layout, seed: int, cores: int, kernels: Kernels, schedule: str, drop: str) -> Ran:
    batch = make_batch(layout, seed)
    selection = Rows(layout, random_rows(batch.rng, batch.tokens, layout.width, layout.bytes))
    misses = make_misses(batch, MOST)
    oracle.dsa_install(
        selection.whole,
        batch.query_start_loc,
        batch.rows,
        misses.positions,
        misses.slots,
        misses.counts,
        batch.hot.whole,
    )
    ran = install(kernels, batch, misses, selection, cores, schedule, drop)
    return differs(ran, batch.hot.same())


def host_write_case(layout: Layout, seed: int, cores: int, kernels: Kernels, schedule: str, drop: str) -> Ran:
    batch = make_batch(layout, seed)
    slots = make_slots(batch)
    oracle.host_write(batch.host.whole, batch.new_rows.whole, slots)
    ran = host_write(kernels, batch, slots, cores, schedule, drop)
    return differs(ran, batch.host.same())


def gather_case(layout: Layout, cores: int, kernels: Kernels, schedule: str, drop: str) -> Ran:
    selections = Selections(layout, 3)
    total = Ran([])
    for seed in range(3):
        batch = make_batch(layout, seed)
        topk = make_topk(batch, selections)
        expected = torch.zeros(batch.tokens, dtype=torch.int32)
        lengths = aligned(torch.full((batch.tokens,), -5, dtype=torch.int32))
        oracle_gather(batch, selections, topk, expected)
        ran = gather(kernels, batch, selections, topk, lengths, cores, schedule, drop)
        differs(ran, selections.same() and torch.equal(lengths, expected))
        total.reports += ran.reports
        for key, apis in ran.sites.items():
            total.sites.setdefault(key, set()).update(apis)
        if total.reports:
            break
    return total


def plan_cases() -> list[Case]:
    return [
        plan_case(Shape(3, 64, 64, 16, "rrip", 2, compact=True), 2, KINDS),
        plan_case(Shape(2, 272, 256, 16, "clock", 2, compact=True), 8, KINDS),
        plan_case(Shape(1, 16, 1024, 16, "rrip"), 1, KINDS, 2),
        plan_case(Shape(40, 16, 64, 16, "rrip", 2), 3, KINDS, 2),
        plan_case(Shape(1, 512, 64, 16, "fifo", 2), 1, ("one_set",)),
        plan_case(Shape(1, 256, 64, 16, "rrip", 2), 1, ("same",), 2),
    ]


CASES: dict[str, Callable[[], list[Case]]] = {
    "dsa_plan": plan_cases,
    "dsa_serve": lambda: [partial(serve_case, MIXED, 1, 2), partial(serve_case, LONG, 3, 1)],
    "dsa_serve_compact": lambda: [partial(compact_case, MIXED, 1, 2)],
    "dsa_install": lambda: [partial(install_case, MIXED, 1, 2), partial(install_case, LONG, 3, 1)],
    "host_write": lambda: [partial(host_write_case, replace(MIXED, blocks=80, padding=600), 1, 1)],
    "gather_selection": lambda: [partial(gather_case, MIXED, 2)],
}


def clean_sites(kernels: Kernels, op: str) -> dict[str, list[tuple[Case, str]]]:
    """The sites that a kernel's cases call, and the runs that do."""
    where: dict[str, list[tuple[Case, str]]] = {}
    for case in CASES[op]():
        for schedule in SCHEDULES:
            ran = case(kernels, schedule, "")
            assert not ran.reports, ran.reports[:5]
            for key in ran.sites:
                where.setdefault(key, []).append((case, schedule))
    return where


def place(key: str) -> tuple[str, int]:
    """File and line of a site; the compiler names headers by way of those that include them."""
    path, line, _ = key.rsplit(":", 2)
    return str(Path(path).resolve()), int(line)


@pytest.mark.slow
def test_every_synchronisation_is_tried(kernels: Kernels) -> None:
    called = {place(key) for op in CASES for key in clean_sites(kernels, op)}
    written = {
        (str(path.resolve()), number)
        for path in (ROOT / "csrc" / "ascendc").rglob("*/*")
        if path.suffix in {".h", ".cpp"} and "op_host" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SYNCHRONISES.search(line) and not line.startswith("#define")
    }
    assert len(written) > 100
    assert written - called == set()


@pytest.mark.slow
@pytest.mark.parametrize("op", CASES)
def test_every_synchronisation_is_needed(kernels: Kernels, op: str) -> None:
    where = clean_sites(kernels, op)
    assert len(where) >= 7
    survivors = [
        key
        for key, tried in where.items()
        if not any(case(kernels, schedule, key).reports for case, schedule in tried)
    ]
    assert survivors == []
