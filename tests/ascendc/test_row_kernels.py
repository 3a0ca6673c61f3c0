"""The kernels that move rows, on the CPU twin: equal to the oracle, and nothing for the twin to report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ascendc.gather_steps import Selections, gather, make_topk, oracle_gather
from tests.ascendc.row_steps import (
    Batch,
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
from tests.ascendc.twin_kernels import SCHEDULES, Kernels, Ran, aligned
from vllm_kvoffload.ops import oracle

CORES = (1, 5, 40)
LAYOUTS = {
    "one request": Layout(1),
    "nope and rope": Layout(
        5, row_bytes=(1024, 128), block_size=128, blocks=12, table_width=4, width=64, slots=256
    ),
    "one component": Layout(3, row_bytes=(1152, 0), width=48, slots=256),
    "rows share lines": Layout(3, row_bytes=(656, 0), width=32, slots=128, max_query=4),
    "odd blocks, short rows": Layout(
        7, row_bytes=(16, 48), width=16, max_query=3, block_size=7, table_width=20
    ),
    "many requests": Layout(40, row_bytes=(128, 0), max_query=1, width=32),
    "many misses": Layout(
        2, width=512, slots=2048, max_query=4, row_bytes=(32, 32), block_size=64, table_width=30
    ),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
MOST = 1 << 20


def check(ran: Ran, batch: Batch, fetched: int, same: bool, where: tuple[object, ...]) -> None:
    assert not ran.reports, (where, ran.reports[:5])
    assert same, where
    assert (batch.fetched(), batch.refused()) == (fetched, 0), where


@layouts
def test_serve(kernels: Kernels, layout: Layout) -> None:
    for cores in CORES:
        for seed, schedule in enumerate(SCHEDULES):
            batch = make_batch(layout, seed)
            misses = make_misses(batch, MOST)
            fetched = oracle_serve(batch, misses)
            ran = serve(kernels, batch, misses, cores, schedule)
            check(ran, batch, fetched, batch.hot.same(), (cores, schedule))


@layouts
def test_serve_compact(kernels: Kernels, layout: Layout) -> None:
    for cores in CORES:
        for seed, schedule in enumerate(SCHEDULES):
            batch = make_batch(layout, seed)
            kinds = make_kinds(batch)
            selection = Rows(layout, random_rows(batch.rng, batch.tokens, layout.width, layout.bytes))
            fetched = oracle.dsa_serve_compact(
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
            ran = serve_compact(kernels, batch, kinds, selection, cores, schedule)
            check(ran, batch, fetched, selection.same(), (cores, schedule))


@layouts
def test_install(kernels: Kernels, layout: Layout) -> None:
    for cores in CORES:
        for seed, schedule in enumerate(SCHEDULES):
            batch = make_batch(layout, seed)
            selection = Rows(layout, random_rows(batch.rng, batch.tokens, layout.width, layout.bytes))
            misses = make_misses(batch, MOST)
            moved = oracle.dsa_install(
                selection.whole,
                batch.query_start_loc,
                batch.rows,
                misses.positions,
                misses.slots,
                misses.counts,
                batch.hot.whole,
            )
            ran = install(kernels, batch, misses, selection, cores, schedule)
            check(ran, batch, moved, batch.hot.same(), (cores, schedule))


@layouts
@pytest.mark.parametrize("padding", [1, 1300])
def test_host_write(kernels: Kernels, layout: Layout, padding: int) -> None:
    """Of one step's requests, and of more tokens than a core looks at in one go."""
    layout = replace(layout, padding=min(padding, layout.blocks * layout.block_size // 2))
    for cores in CORES:
        for seed, schedule in enumerate(SCHEDULES):
            batch = make_batch(layout, seed)
            slots = make_slots(batch)
            oracle.host_write(batch.host.whole, batch.new_rows.whole, slots)
            written = int((slots >= 0).sum()) * layout.bytes
            ran = host_write(kernels, batch, slots, cores, schedule)
            check(ran, batch, written, batch.host.same(), (cores, schedule))


@layouts
def test_gather_selection(kernels: Kernels, layout: Layout) -> None:
    for cores in CORES:
        for schedule in SCHEDULES:
            selections = Selections(layout, cores)
            for seed in range(3):
                batch = make_batch(layout, seed)
                topk = make_topk(batch, selections)
                expected = torch.zeros(batch.tokens, dtype=torch.int32)
                lengths = aligned(torch.full((batch.tokens,), -5, dtype=torch.int32))
                fetched = oracle_gather(batch, selections, topk, expected)
                ran = gather(kernels, batch, selections, topk, lengths, cores, schedule)
                same = selections.same() and torch.equal(lengths, expected)
                check(ran, batch, fetched, same, (cores, schedule, seed))


def test_bad_addresses_are_counted_and_touch_nothing(kernels: Kernels) -> None:
    """A block, a slot and a position outside their tensors: no copy, and the report says how many."""
    layout = Layout(2, width=32, slots=128)
    batch = make_batch(layout, 3)
    batch.rows.copy_(torch.tensor([0, 1], dtype=torch.int32))
    misses = make_misses(batch, 8)
    misses.counts.copy_(torch.tensor([3, 0], dtype=torch.int32))
    misses.ids[0, :3] = torch.tensor([0, layout.table_width * layout.block_size, 5])
    misses.slots[0, :3] = torch.tensor([1, 2, layout.slots])
    misses.positions[0, :3] = torch.tensor([0, -1, 3])
    misses.new_slots[:] = -1
    batch.hot.whole[0, 1] = batch.host.whole[int(batch.block_table[0, 0]), 0]
    ran = serve(kernels, batch, misses, 2, "lazy")
    assert not ran.reports
    assert batch.hot.same()
    assert (batch.fetched(), batch.refused()) == (layout.bytes, 2)

    selection = Rows(layout, random_rows(batch.rng, batch.tokens, layout.width, layout.bytes))
    batch.hot.whole[0, 1] = selection.whole[0, 0]
    ran = install(kernels, batch, misses, selection, 2, "lazy")
    assert not ran.reports
    assert batch.hot.same()
    assert (batch.fetched(), batch.refused()) == (layout.bytes, 2)


@pytest.mark.parametrize("row_bytes", [(64, 0), (48, 16)], ids=["rows fill lines", "rows share lines"])
def test_bad_slots_of_the_host_pool_are_counted_once(kernels: Kernels, row_bytes: tuple[int, int]) -> None:
    layout = Layout(1, row_bytes=row_bytes, padding=5)
    batch = make_batch(layout, 3)
    batch.new_rows = Rows(layout, random_rows(batch.rng, 6, layout.bytes))
    slots = aligned(
        torch.tensor([3, layout.blocks * layout.block_size, -2, -1, 4, 1 << 30], dtype=torch.int32)
    )
    batch.host.whole.view(-1, layout.bytes)[[3, 4]] = batch.new_rows.whole[[0, 4]]
    ran = host_write(kernels, batch, slots, 4, "lazy")
    assert not ran.reports
    assert batch.host.same()
    assert (batch.fetched(), batch.refused()) == (2 * layout.bytes, 3)


def test_no_requests(kernels: Kernels) -> None:
    """Zeros for all tokens of a selection, lengths of 0, no copy."""
    layout = Layout(0, padding=3)
    batch = make_batch(layout, 1)
    misses = make_misses(batch, 1)
    assert not serve(kernels, batch, misses, 5, "lazy").reports
    assert batch.fetched() == 0
    selection = Rows(layout, random_rows(batch.rng, 3, layout.width, layout.bytes))
    assert not install(kernels, batch, misses, selection, 5, "lazy").reports
    assert batch.hot.same()
    assert not serve_compact(kernels, batch, make_kinds(batch), selection, 5, "lazy").reports
    assert not selection.joined().any()
    selections = Selections(layout, 1)
    lengths = aligned(torch.full((3,), -5, dtype=torch.int32))
    ran = gather(kernels, batch, selections, make_topk(batch, selections), lengths, 5, "lazy")
    assert not ran.reports
    assert selections.same()
    assert lengths.tolist() == [0, 0, 0]


def test_a_status_that_gather_selection_did_not_write(kernels: Kernels) -> None:
    """Ids twice, ids beyond the stable prefix: each is a hit at its first place or none."""
    layout = Layout(2, width=16, max_query=1, padding=0)
    batch = make_batch(layout, 8)
    batch.rows.copy_(torch.tensor([0, 2], dtype=torch.int32))
    batch.query_start_loc.copy_(torch.tensor([0, 1, 2][: len(batch.query_start_loc)], dtype=torch.int32))
    batch.new_rows = Rows(layout, random_rows(batch.rng, 2, layout.bytes))
    selections = Selections(layout, 1)
    stable = batch.stable(0)
    old = [9, 7, 9, stable, stable + 1, 3, 7, 4, 4, 4, 4, 4, 4, 4, 3, 5]
    for row, count in ((0, 16), (2, 11)):
        selections.status[row, 0] = torch.tensor([*old, count], dtype=torch.int32)
    selections.padded[..., : layout.width + 1] = selections.status
    topk = torch.tensor([[5, 4, stable, 9, -1, 5, 3, 1] * 2, [7, 3, 9, 0, 7, 11, 4, 4] * 2]).int()
    topk = aligned(topk)
    expected = torch.zeros(2, dtype=torch.int32)
    lengths = aligned(expected)
    fetched = oracle_gather(batch, selections, topk, expected)
    ran = gather(kernels, batch, selections, topk, lengths, 2, "lazy")
    assert lengths.tolist() == expected.tolist() == [6, 6]
    check(ran, batch, fetched, selections.same(), ())


def test_the_twin_sees_a_write_outside_the_pool(kernels: Kernels) -> None:
    """Control: the tiling is told of more slots than the pool has."""
    layout = Layout(1, width=32, slots=128)
    batch = make_batch(layout, 3)
    batch.rows[0] = batch.layout.hot_rows - 1
    misses = make_misses(batch, 4)
    misses.counts[0], misses.slots[0, 0], misses.ids[0, 0] = 1, layout.slots, 0
    misses.new_slots[:] = -1
    lie = Layout(1, width=32, slots=256)
    batch.layout = lie
    ran = serve(kernels, batch, misses, 1, "eager")
    assert any("out-of-bounds" in report for report in ran.reports), ran.reports
