"""The baseline selection keeps the previous step's only. By hand, against oracle and truth."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings

from tests.plan_cases import Shape, Step, int32, numbered, numbers, sequences
from tests.property.ops_simulation import GatherSimulation
from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle

IMPLEMENTATIONS = pytest.mark.parametrize("impl", [oracle, ops], ids=["oracle", "native"])
ROW_BYTES = 8


class OneRow:
    """A request on row 1 of two; the host row of token i holds 100 + i, its new row 1000 * version + i."""

    def __init__(self, impl: ModuleType, width: int = 6, queries: int = 2) -> None:
        self.impl = impl
        self.host = numbered(100, 40).view(10, 4, ROW_BYTES)
        self.selection = torch.zeros((2, queries, width, ROW_BYTES), dtype=torch.uint8)
        self.status = torch.full((2, queries, width + 1), -1, dtype=torch.int32)
        self.status[:, :, width] = 0
        self.lengths = torch.full((4,), -7, dtype=torch.int32)
        self.version = 0

    def gather(self, *queries: list[int], seq_len: int) -> int:
        self.version += 1
        stable = seq_len - len(queries)
        return self.impl.gather_selection(
            torch.tensor(queries, dtype=torch.int32),
            int32(0, len(queries)),
            int32(seq_len),
            int32(1),
            self.host,
            torch.arange(10, dtype=torch.int32).view(1, 10),
            numbered(1000 * self.version + stable, len(queries)),
            self.selection,
            self.status,
            self.lengths,
        )

    def held(self, query: int = 0) -> list[tuple[int, int]]:
        count = int(self.status[1, query, -1])
        rows = self.selection[1, query, :count]
        return list(zip(self.status[1, query, :count].tolist(), numbers(rows), strict=True))


@IMPLEMENTATIONS
def test_hits_stay_move_and_are_fetched(impl: ModuleType) -> None:
    row = OneRow(impl)
    assert row.gather([5, 3, 5, -1, 99, 7], seq_len=20) == 3 * ROW_BYTES
    assert row.held() == [(5, 105), (3, 103), (7, 107)]
    assert row.lengths.tolist() == [3, -7, -7, -7]
    assert row.gather([9, 7, -1, -1, 7, -1], seq_len=21) == ROW_BYTES
    assert row.held() == [(7, 107), (9, 109)], "7 moved from behind the new end to the lowest free place"
    assert row.status[1, 0].tolist() == [7, 9, -1, -1, -1, -1, 2]
    assert row.gather([1, 21, 9, 2, 7, -1], seq_len=22) == 2 * ROW_BYTES
    assert row.held() == [(7, 107), (9, 109), (1, 101), (21, 3021), (2, 102)]
    assert int(row.status[0].max()) == 0, "another row"


@IMPLEMENTATIONS
def test_drafts_are_not_hits(impl: ModuleType) -> None:
    row = OneRow(impl)
    row.gather([10, 4, -1, -1, -1, -1], [10, 11, 4, -1, -1, -1], seq_len=12)
    assert row.held(1) == [(10, 1010), (11, 1011), (4, 104)]
    # 10 was accepted, 11 was not and is computed anew.
    assert row.gather([10, 11, -1, -1, -1, -1], [11, 12, 4, -1, -1, -1], seq_len=13) == 0
    assert row.held(0) == [(10, 1010), (11, 2011)]
    assert row.held(1) == [(11, 2011), (12, 2012), (4, 104)]


@IMPLEMENTATIONS
def test_queries_left_out_are_forgotten(impl: ModuleType) -> None:
    """A draft rejected while its query was not run must not come back once its position is accepted."""
    row = OneRow(impl)
    row.gather([10, -1, -1, -1, -1, -1], [11, -1, -1, -1, -1, -1], seq_len=12)
    row.gather([11, -1, -1, -1, -1, -1], seq_len=12)  # another token 11
    assert row.status[1, 1, -1] == 0
    row.gather([11, -1, -1, -1, -1, -1], [11, -1, -1, -1, -1, -1], seq_len=14)
    assert row.held(0) == [(11, 2011)]
    assert row.held(1) == [(11, 111)], "from the host, where the accepted one is"


@IMPLEMENTATIONS
def test_reuse_reads_lengths_only(impl: ModuleType) -> None:
    status = torch.zeros((3, 2, 5), dtype=torch.int32)
    status[:, :, 4] = torch.tensor([[1, 2], [3, 4], [5, 6]])
    lengths = torch.full((6,), -7, dtype=torch.int32)
    impl.gather_reuse(status, int32(2, -1, 0), int32(0, 2, 3, 4), lengths)
    assert lengths.tolist() == [5, 6, 0, 1, 0, 0]


@settings(max_examples=100, deadline=None)
@given(sequences())
def test_equals_oracle(case: tuple[Shape, list[Step]]) -> None:
    """Every byte of selection, status and lengths, with rows that change hands and no reset."""
    shape, steps = case
    pools = GatherSimulation(shape)  # for its buffers
    pools.host.random_(0, 256)
    buffers = [pools.selection, pools.status, pools.lengths]
    expected = [buffer.clone() for buffer in buffers]
    for number, step in enumerate(steps):
        new_rows = torch.randint(0, 256, (len(step.topk), pools.host.shape[2]), dtype=torch.uint8)
        inputs = *step.inputs, pools.host, pools.block_table(step), new_rows
        assert ops.gather_selection(*inputs, *buffers) == oracle.gather_selection(*inputs, *expected)
        for name, got, want in zip(("selection", "status", "lengths"), buffers, expected, strict=True):
            assert torch.equal(got, want), f"step {number}: {name}"


def test_ids_twice_in_a_damaged_status() -> None:
    """The first place counts, and the core does as the oracle."""
    rows = [OneRow(impl) for impl in (oracle, ops)]
    for row in rows:
        row.gather([1, 2, 3, 4, 5, 6], seq_len=30)
        row.status[1, 0] = torch.tensor([9, 4, 4, -5, 1 << 30, 4, 6])
        row.gather([4, -1, -1, -1, -1, 9], seq_len=31)
        assert row.status[1, 0].tolist() == [9, 4, -1, -1, -1, -1, 2]
    assert torch.equal(rows[0].selection, rows[1].selection)
