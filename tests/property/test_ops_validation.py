"""Every argument check fires, names the argument, and leaves state and outputs as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.plan_cases import OUTPUT, STATE, int32
from vllm_kvoffload import ops
from vllm_kvoffload.ops import _C, conformance, oracle

Args = dict[str, torch.Tensor]


def plan_args() -> Args:
    """Two requests, of one and two query tokens, on rows 2 and 0 of 3; P = 32, K = 16."""
    return {
        "topk": torch.arange(48, dtype=torch.int32).view(3, 16),
        "query_start_loc": int32(0, 1, 3),
        "seq_lens": int32(60, 61),
        "rows": int32(2, 0),
    }


def with_value(name: str, index: int, value: int) -> Callable[[Args], None]:
    def change(args: Args) -> None:
        args[name].view(-1)[index] = value

    return change


def replaced(name: str, tensor: torch.Tensor) -> Callable[[Args], None]:
    return lambda args: args.update({name: tensor})


PLAN_CASES = {
    "topk dtype": (replaced("topk", torch.zeros((3, 16), dtype=torch.int64)), "topk: expected dtype int32"),
    "topk rank": (replaced("topk", int32(1, 2)), "topk: expected shape"),
    "topk stride": (replaced("topk", torch.zeros((16, 3), dtype=torch.int32).T), "topk: .*contiguous"),
    "topk width": (replaced("topk", torch.zeros((3, 8), dtype=torch.int32)), "topk: width 8"),
    "topk tokens": (replaced("topk", torch.zeros((9, 16), dtype=torch.int32)), "topk: 9 tokens"),
    "starts length": (replaced("query_start_loc", int32(0, 1)), "query_start_loc: expected shape"),
    "starts dtype": (replaced("query_start_loc", torch.tensor([0, 1, 3])), "query_start_loc: expected dtype"),
    "starts not 0": (with_value("query_start_loc", 0, 1), r"query_start_loc\[0\]"),
    "starts decrease": (with_value("query_start_loc", 1, 5), r"query_start_loc\[[12]\]"),
    "starts beyond": (with_value("query_start_loc", 2, 4), r"query_start_loc\[2\]"),
    "starts negative": (with_value("query_start_loc", 1, -1), r"query_start_loc\[1\]"),
    "rows length": (replaced("rows", int32(1)), "rows: expected shape"),
    "rows beyond": (with_value("rows", 1, 3), r"rows\[1\]: 3 is outside"),
    "rows twice": (with_value("rows", 1, 2), r"rows\[1\]: partition 2 belongs"),
    "seq_len short": (with_value("seq_lens", 1, 1), r"seq_lens\[1\]: 1 is less"),
    "seq_len negative": (with_value("seq_lens", 0, -5), r"seq_lens\[0\]"),
    "more requests": (
        lambda args: args.update(
            query_start_loc=int32(*[0] * 5), seq_lens=int32(*[1] * 4), rows=int32(*[0] * 4)
        ),
        "seq_lens: 4 requests",
    ),
    "too many ids": (
        lambda args: args.update(query_start_loc=int32(0, 0, 3)),
        "topk: 3 query tokens of 16 ids do not fit",
    ),
}


@pytest.mark.parametrize("name", PLAN_CASES)
def test_plan_refuses(name: str) -> None:
    change, message = PLAN_CASES[name]
    residency, out, workspace = (
        ops.Residency.allocate(3, 32, 16, "rrip"),
        ops.PlanOut(8, 3, 16, 2),
        ops.Workspace(),
    )
    ops.dsa_plan(**plan_args(), residency=residency, out=out, workspace=workspace)
    state = [getattr(residency, field).clone() for field in STATE]
    output = [getattr(out, field).clone() for field in OUTPUT]
    bad = plan_args()
    change(bad)
    with pytest.raises(ValueError, match=message):
        ops.dsa_plan(**bad, residency=residency, out=out, workspace=workspace)
    assert all(torch.equal(getattr(residency, field), was) for field, was in zip(STATE, state, strict=True))
    assert all(torch.equal(getattr(out, field), was) for field, was in zip(OUTPUT, output, strict=True))
    # The scratch survived as well: the next good step equals the oracle's.
    reference, expected = ops.Residency.allocate(3, 32, 16, "rrip"), ops.PlanOut(8, 3, 16, 2)
    for _ in range(2):
        oracle.dsa_plan(**plan_args(), residency=reference, out=expected)
    ops.dsa_plan(**plan_args(), residency=residency, out=out, workspace=workspace)
    assert torch.equal(out.slots, expected.slots)
    assert torch.equal(residency.ages, reference.ages)


def test_plan_refuses_small_miss_buffers() -> None:
    residency, out = ops.Residency.allocate(3, 32, 16), ops.PlanOut(8, 3, 16, max_query_len=1)
    with pytest.raises(ValueError, match=r"out.miss_ids: capacity 16 is less than the 32 ids of request 1"):
        ops.dsa_plan(**plan_args(), residency=residency, out=out, workspace=ops.Workspace())


def test_skipped_requests_are_not_checked() -> None:
    """Padding of a captured batch: no row, no sequence."""
    args = plan_args() | {"rows": int32(-1, 0), "seq_lens": int32(0, 61)}
    residency, out = ops.Residency.allocate(3, 32, 16), ops.PlanOut(8, 3, 16, 2)
    ops.dsa_plan(**args, residency=residency, out=out, workspace=ops.Workspace())
    assert out.slots[0].tolist() == [-1] * 16
    assert int(out.miss_counts[0]) == 0
    assert int(out.miss_counts[1]) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 32, 8), "ways: must be 16 or 32, got 8"),
        ((4, 48, 16), "slots_per_partition: must be 16 times a power of two, got 48"),
        ((4, 40, 16), "slots_per_partition"),
        ((4, 8, 16), "slots_per_partition"),
        ((4, 32, 16, "mru"), f"policy: expected one of {', '.join(ops.POLICIES)}, got 'mru'"),
    ],
)
def test_residency_refuses(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.Residency.allocate(*arguments)


def test_plan_out_refuses_half_a_compact_delivery() -> None:
    out = ops.PlanOut(4, 2, 8, 1, compact=True)
    buffers = [getattr(out, name) for name in OUTPUT]
    for kinds, positions, message in (
        (out.kinds[:3], out.miss_positions, "kinds: 3 tokens, but slots has 4"),
        (out.kinds[:0], out.miss_positions, "kinds: 0 tokens"),
        (out.kinds, out.miss_positions[:1], "miss_positions: 1 requests, but miss_ids has 2"),
        (out.kinds[:, :4].contiguous(), out.miss_positions, "kinds: expected shape"),
        (out.kinds, out.miss_positions[:, :4].contiguous(), "miss_positions: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.PlanOut(*buffers[:6], kinds, positions)


@pytest.mark.parametrize("field", STATE)
def test_residency_refuses_mismatched_tensors(field: str) -> None:
    good = ops.Residency.allocate(2, 32, 16)
    tensors = {name: getattr(good, name) for name in STATE}
    with pytest.raises(ValueError, match=f"{field}: expected dtype"):
        ops.Residency(**(tensors | {field: tensors[field].to(torch.float32)}), policy="rrip")
    with pytest.raises(ValueError, match=r"(tags|ages|hands|high): expected shape|tags: ways"):
        ops.Residency(**(tensors | {field: tensors[field].flatten()[:1]}), policy="rrip")


def test_a_partition_is_reset_in_all_groups() -> None:
    """And no other; each group's tensors are contiguous and begin on a line, as on a device."""
    residencies = ops.Residencies(3, 5, 32, 16)
    tensors = [(t.tags, t.ages, t.hands, t.high) for t in residencies.groups]
    for group in tensors:
        for tensor in group:
            assert tensor.is_contiguous()
            assert tensor.storage_offset() * tensor.dtype.itemsize % 64 == 0
            tensor.fill_(7)
    residencies.reset_partition(3)
    for group in tensors:
        for tensor, empty in zip(group, (-1, 0, 0, 0), strict=True):
            assert [tensor[row].unique().tolist() for row in range(5)] == [
                [empty] if row == 3 else [7] for row in range(5)
            ]
    with pytest.raises(IndexError):
        residencies.reset_partition(5)


def test_residency_accounting() -> None:
    residency = ops.Residency.allocate(2, 64, 16)
    assert residency.policy == ops.DEFAULT_POLICY
    assert residency.nbytes == 2 * (64 * 4 + 64 + 4 + 4)
    assert (residency.num_partitions, residency.num_sets, residency.ways, residency.slots_per_partition) == (
        2,
        4,
        16,
        64,
    )
    residency.tags.fill_(5)
    residency.hands.fill_(1)
    residency.ages.fill_(1)
    residency.high.fill_(9)
    residency.reset_partition(1)
    assert [int(t[1].max()) for t in (residency.tags, residency.ages, residency.hands, residency.high)] == [
        -1,
        0,
        0,
        0,
    ]
    assert int(residency.tags[0].min()) == 5


def serve_args() -> Args:
    """One miss of each of two requests; host pool of 4 blocks of 8 tokens of 24 bytes."""
    return {
        "host": torch.zeros((4, 8, 24), dtype=torch.uint8),
        "hot": torch.ones((3, 32, 24), dtype=torch.uint8),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "rows": int32(2, 0),
        "miss_ids": torch.tensor([[3, 0], [15, 0]], dtype=torch.int32),
        "miss_slots": torch.tensor([[31, 0], [0, 0]], dtype=torch.int32),
        "miss_counts": int32(1, 1),
    }


SERVE_CASES = {
    "host dtype": (replaced("host", torch.zeros((4, 8, 24))), "host: expected dtype uint8"),
    "host rank": (replaced("host", torch.zeros((4, 8), dtype=torch.uint8)), "host: expected shape"),
    "host empty blocks": (replaced("host", torch.zeros((4, 0, 24), dtype=torch.uint8)), "host: blocks of no"),
    "row bytes": (replaced("hot", torch.zeros((3, 32, 25), dtype=torch.uint8)), "hot: row of 25 bytes"),
    "hot stride": (replaced("hot", torch.zeros((3, 24, 32), dtype=torch.uint8).mT), "hot: .*contiguous"),
    "row beyond": (with_value("rows", 1, 3), r"rows\[1\]: 3"),
    "id negative": (with_value("miss_ids", 2, -1), r"miss_ids\[1, 0\]: negative"),
    "id beyond table": (with_value("miss_ids", 2, 16), r"block_table: block 2 of request 1"),
    "block beyond": (with_value("block_table", 3, 4), r"block_table\[1, 1\]: block 4"),
    "block negative": (with_value("block_table", 3, -1), r"block_table\[1, 1\]: block -1"),
    "slot beyond": (with_value("miss_slots", 2, 32), r"miss_slots\[1, 0\]: 32"),
    "slot negative": (with_value("miss_slots", 2, -1), r"miss_slots\[1, 0\]: -1"),
    "count beyond": (with_value("miss_counts", 1, 3), r"miss_counts\[1\]: 3"),
    "count negative": (with_value("miss_counts", 1, -1), r"miss_counts\[1\]: -1"),
    "slots shape": (
        replaced("miss_slots", torch.zeros((2, 3), dtype=torch.int32)),
        "miss_slots: expected shape",
    ),
    "counts shape": (replaced("miss_counts", int32(1)), "miss_counts: expected shape"),
    "few requests": (replaced("rows", int32(0, 1, 2)), "miss_ids: 2 requests, but rows has 3"),
    "short table": (
        replaced("block_table", torch.zeros((1, 2), dtype=torch.int32)),
        "block_table: 1 requests",
    ),
}


@pytest.mark.parametrize("name", SERVE_CASES)
def test_serve_refuses(name: str) -> None:
    change, message = SERVE_CASES[name]
    assert ops.dsa_serve(**serve_args()) == 48
    bad = serve_args()
    change(bad)
    before = bad["hot"].clone()
    with pytest.raises(ValueError, match=message):
        ops.dsa_serve(**bad)
    assert torch.equal(bad["hot"], before), "nothing is copied before everything is checked"


HOST = torch.zeros((4, 8, 24), dtype=torch.uint8)
HOT = torch.zeros((3, 32, 24), dtype=torch.uint8)
TWO = torch.ones((2, 24), dtype=torch.uint8)
WRITE_CASES = {
    "slot beyond": (lambda: ops.write_rows(HOT, int32(0, 0), TWO, int32(0, 32)), r"slots\[1\]: 32"),
    "slot low": (lambda: ops.write_rows(HOT, int32(0, 0), TWO, int32(0, -2)), r"slots\[1\]: -2"),
    "row beyond": (lambda: ops.write_rows(HOT, int32(0, 3), TWO, int32(0, 0)), r"rows\[1\]: 3"),
    "row negative": (lambda: ops.write_rows(HOT, int32(0, -1), TWO, int32(0, 0)), r"rows\[1\]: -1"),
    "rows shape": (lambda: ops.write_rows(HOT, int32(0), TWO, int32(0, 0)), "rows: expected shape"),
    "new_rows shape": (
        lambda: ops.write_rows(HOT, int32(0, 0), TWO[:1], int32(0, 0)),
        "new_rows: expected shape",
    ),
    "mapping beyond": (lambda: ops.host_write(HOST, TWO, torch.tensor([0, 32])), r"slot_mapping\[1\]: 32"),
    "mapping low": (lambda: ops.host_write(HOST, TWO, torch.tensor([0, -2])), r"slot_mapping\[1\]: -2"),
    "mapping dtype": (lambda: ops.host_write(HOST, TWO, int32(0, 1)), "slot_mapping: expected dtype int64"),
    "start": (lambda: ops.host_read(HOST, int32(0, 1), -1, 1, TWO), "start: -1"),
    "start beyond": (lambda: ops.host_read(HOST, int32(0, 1), 17, 0, TWO), "start: 17"),
    "count": (lambda: ops.host_read(HOST, int32(0, 1), 15, 2, TWO), "count: 2 tokens from 15"),
    "count negative": (lambda: ops.host_read(HOST, int32(0, 1), 5, -1, TWO), "count: -1"),
    "count over dst": (lambda: ops.host_read(HOST, int32(0, 1), 0, 3, TWO), "dst: 2 rows are too few for 3"),
    "table": (lambda: ops.host_read(HOST, int32(0, 4), 7, 2, TWO), r"block_table\[0, 1\]: block 4"),
}


@pytest.mark.parametrize("name", WRITE_CASES)
def test_writes_and_reads_refuse(name: str) -> None:
    call, message = WRITE_CASES[name]
    with pytest.raises(ValueError, match=message):
        call()
    assert int(HOST.max()) == 0
    assert int(HOT.max()) == 0
    assert int(TWO.min()) == 1


def compact_args() -> Args:
    """A hit, a miss, a new token and padding of two requests; the same pools as :func:`serve_args`."""
    kinds = torch.tensor(
        [[[1, 31], [2, 3]], [[3, 60], [3, 59]], [[4, 99], [5, -1]], [[0, -1], [0, -1]]], dtype=torch.int32
    )
    return {
        "kinds": kinds,
        "query_start_loc": int32(0, 1, 3),
        "seq_lens": int32(60, 61),
        "host": torch.ones((4, 8, 24), dtype=torch.uint8),
        "hot": torch.ones((3, 32, 24), dtype=torch.uint8),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "rows": int32(2, 0),
        "new_rows": torch.ones((4, 24), dtype=torch.uint8),
        "selection": torch.full((4, 2, 24), 7, dtype=torch.uint8),
    }


COMPACT_CASES = {
    "kinds shape": (replaced("kinds", torch.zeros((4, 2, 3), dtype=torch.int32)), "kinds: expected shape"),
    "kinds dtype": (replaced("kinds", torch.zeros((4, 2, 2))), "kinds: expected dtype int32"),
    "kinds tokens": (replaced("kinds", torch.zeros((3, 2, 2), dtype=torch.int32)), "kinds: 3 tokens"),
    "kind unknown": (with_value("kinds", 8, 6), r"kinds\[2, 0\]: unknown kind 6"),
    "kind negative": (with_value("kinds", 8, -1), r"kinds\[2, 0\]: unknown kind -1"),
    "slot beyond": (with_value("kinds", 1, 32), r"kinds\[0, 0\]: slot 32"),
    "slot negative": (with_value("kinds", 1, -1), r"kinds\[0, 0\]: slot -1"),
    "id negative": (with_value("kinds", 3, -1), r"kinds\[0, 1\]: negative id"),
    "id beyond table": (with_value("kinds", 3, 16), "block_table: block 2 of request 0"),
    "block beyond": (with_value("block_table", 0, 4), r"block_table\[0, 0\]: block 4"),
    "window before": (with_value("kinds", 7, 58), r"kinds\[1, 1\]: id 58 is none of the 2"),
    "window behind": (with_value("kinds", 5, 61), r"kinds\[1, 0\]: id 61 is none of the 2"),
    "lengths": (replaced("seq_lens", int32(60)), "seq_lens: expected shape"),
    "starts": (with_value("query_start_loc", 2, 5), r"query_start_loc\[2\]: 5 exceeds new_rows's 4"),
    "starts decrease": (with_value("query_start_loc", 2, 0), r"query_start_loc\[2\]"),
    "starts not 0": (with_value("query_start_loc", 0, 1), r"query_start_loc\[0\]"),
    "row beyond": (with_value("rows", 1, 3), r"rows\[1\]: 3"),
    "row bytes": (replaced("hot", torch.zeros((3, 32, 25), dtype=torch.uint8)), "hot: row of 25 bytes"),
    "host blocks": (replaced("host", torch.zeros((4, 0, 24), dtype=torch.uint8)), "host: blocks of no"),
    "table": (replaced("block_table", torch.zeros((1, 2), dtype=torch.int32)), "block_table: 1 requests"),
    "new rows": (replaced("new_rows", torch.zeros((4, 23), dtype=torch.uint8)), "new_rows: expected shape"),
    "selection": (replaced("selection", torch.zeros((3, 2, 24), dtype=torch.uint8)), "selection: 3 tokens"),
    "selection width": (
        replaced("selection", torch.zeros((4, 3, 24), dtype=torch.uint8)),
        "selection: expected shape",
    ),
}


@pytest.mark.parametrize("name", COMPACT_CASES)
def test_serve_compact_refuses(name: str) -> None:
    change, message = COMPACT_CASES[name]
    assert ops.dsa_serve_compact(**compact_args()) == 24
    bad = compact_args()
    change(bad)
    before = bad["selection"].clone()
    with pytest.raises(ValueError, match=message):
        ops.dsa_serve_compact(**bad)
    assert torch.equal(bad["selection"], before)


def install_args() -> Args:
    return {
        "selection": torch.ones((3, 2, 24), dtype=torch.uint8),
        "query_start_loc": int32(0, 1, 3),
        "rows": int32(2, 0),
        "miss_positions": torch.tensor([[1, 0], [3, 0]], dtype=torch.int32),
        "miss_slots": torch.tensor([[31, 0], [0, 0]], dtype=torch.int32),
        "miss_counts": int32(1, 1),
        "hot": torch.zeros((3, 32, 24), dtype=torch.uint8),
    }


INSTALL_CASES = {
    "position beyond": (with_value("miss_positions", 2, 4), r"miss_positions\[1, 0\]: 4"),
    "position negative": (with_value("miss_positions", 2, -1), r"miss_positions\[1, 0\]: -1"),
    "slot beyond": (with_value("miss_slots", 2, 32), r"miss_slots\[1, 0\]: 32"),
    "slot negative": (with_value("miss_slots", 2, -1), r"miss_slots\[1, 0\]: -1"),
    "count beyond": (with_value("miss_counts", 1, 3), r"miss_counts\[1\]: 3"),
    "count negative": (with_value("miss_counts", 1, -1), r"miss_counts\[1\]: -1"),
    "row beyond": (with_value("rows", 1, 3), r"rows\[1\]: 3"),
    "starts": (with_value("query_start_loc", 2, 4), r"query_start_loc\[2\]: 4 exceeds selection's 3"),
    "few requests": (
        lambda args: args.update(rows=int32(0, 1, 2), query_start_loc=int32(0, 1, 2, 3)),
        "miss_positions: 2 requests, but rows has 3",
    ),
    "row bytes": (replaced("hot", torch.zeros((3, 32, 25), dtype=torch.uint8)), "selection: expected shape"),
    "slots shape": (
        replaced("miss_slots", torch.zeros((2, 3), dtype=torch.int32)),
        "miss_slots: expected shape",
    ),
}


@pytest.mark.parametrize("name", INSTALL_CASES)
def test_install_refuses(name: str) -> None:
    change, message = INSTALL_CASES[name]
    assert ops.dsa_install(**install_args()) == 48
    bad = install_args()
    change(bad)
    with pytest.raises(ValueError, match=message):
        ops.dsa_install(**bad)
    assert int(bad["hot"].max()) == 0


def gather_args() -> Args:
    """One and two queries of two requests on rows 2 and 0; K = 2."""
    status = torch.full((3, 2, 3), -1, dtype=torch.int32)
    status[:, :, 2] = 0
    return {
        "topk": torch.tensor([[5, 3], [59, 7], [60, -1], [1, 1]], dtype=torch.int32),
        "query_start_loc": int32(0, 1, 3),
        "seq_lens": int32(9, 61),
        "rows": int32(2, 0),
        "host": torch.ones((4, 8, 24), dtype=torch.uint8),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "new_rows": torch.ones((4, 24), dtype=torch.uint8),
        "selection": torch.zeros((3, 2, 2, 24), dtype=torch.uint8),
        "status": status,
        "lengths": int32(-7, -7, -7, -7, -7),
    }


GATHER_CASES = {
    "topk rank": (replaced("topk", int32(1)), "topk: expected shape"),
    "starts": (with_value("query_start_loc", 2, 5), r"query_start_loc\[2\]: 5 exceeds topk's 4"),
    "length short": (with_value("seq_lens", 1, 1), r"seq_lens\[1\]: 1 is less"),
    "row beyond": (with_value("rows", 1, 3), r"rows\[1\]: 3"),
    "row twice": (with_value("rows", 1, 2), r"rows\[1\]: partition 2 belongs"),
    "queries": (with_value("query_start_loc", 1, 0), "selection: 2 queries per partition are too few for"),
    "status length": (with_value("status", 2, 3), r"status\[0, 0\]: length 3"),
    "status negative": (with_value("status", 5, -1), r"status\[0, 1\]: length -1"),
    "status shape": (replaced("status", torch.zeros((3, 2, 2), dtype=torch.int32)), "status: expected shape"),
    "id beyond table": (with_value("topk", 3, 16), "block_table: block 2 of request 1"),
    "block beyond": (with_value("block_table", 2, 4), r"block_table\[1, 0\]: block 4"),
    "table": (replaced("block_table", torch.zeros((1, 2), dtype=torch.int32)), "block_table: 1 requests"),
    "lengths": (replaced("lengths", int32(0, 0, 0)), "lengths: 3 tokens, but topk has 4"),
    "new rows": (replaced("new_rows", torch.zeros((3, 24), dtype=torch.uint8)), "new_rows: expected shape"),
    "host": (replaced("host", torch.zeros((4, 0, 24), dtype=torch.uint8)), "host: blocks of no"),
    "selection": (
        replaced("selection", torch.zeros((3, 2, 3, 24), dtype=torch.uint8)),
        "selection: expected shape",
    ),
}


@pytest.mark.parametrize("name", GATHER_CASES)
def test_gather_refuses(name: str) -> None:
    change, message = GATHER_CASES[name]
    assert ops.gather_selection(**gather_args()) == 72
    bad = gather_args()
    change(bad)
    before = {field: bad[field].clone() for field in ("selection", "status", "lengths")}
    with pytest.raises(ValueError, match=message):
        ops.gather_selection(**bad)
    assert all(torch.equal(bad[field], was) for field, was in before.items())


def test_gather_reuse_refuses() -> None:
    status, lengths = torch.zeros((2, 2, 3), dtype=torch.int32), int32(-7, -7, -7)
    for rows, starts, message in (
        (int32(2), int32(0, 1), r"rows\[0\]: 2"),
        (int32(1), int32(0, 3), "status: 2 queries per partition are too few for the 3 of request 0"),
        (int32(1), int32(0, 4), r"query_start_loc\[1\]: 4 exceeds lengths's 3"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.gather_reuse(status, rows, starts, lengths)
    with pytest.raises(ValueError, match="status: expected K"):
        ops.gather_reuse(status[:, :, :0].contiguous(), int32(1), int32(0, 1), lengths)
    assert lengths.tolist() == [-7, -7, -7]


def test_conformance_refuses() -> None:
    good = ops.Residency.allocate(3, 64, 16, "fifo")
    out = conformance.ConformanceOut(4, 2, 10, 2)
    topk = torch.arange(30, dtype=torch.int32).view(3, 10)
    starts, lengths, rows = int32(0, 1, 3), int32(60, 61), int32(2, 0)
    conformance.plan(topk, starts, lengths, rows, good, 100, out)
    before = [out.kinds.clone(), out.record_counts.clone()]
    wide = ops.Residency.allocate(3, 64, 32, "fifo")
    aging = ops.Residency.allocate(3, 64, 16, "rrip")
    for arguments, message in (
        ((topk, starts, lengths, rows, wide, 100), "residency: the conformance mode has 16 ways, not 32"),
        ((topk, starts, lengths, rows, aging, 100), "residency: the conformance mode's policy is fifo"),
        ((topk, starts, lengths, rows, good, 0), "id_range: must be positive"),
        ((topk, starts, lengths, int32(3, 0), good, 100), r"rows\[0\]: 3"),
        ((topk, int32(0, 0, 3), lengths, rows, good, 100), "records: 2 queries are too few for the 3"),
        ((topk, int32(0, 1, 4), lengths, rows, good, 100), r"query_start_loc\[2\]: 4 exceeds topk's 3"),
        ((topk[:, :9].contiguous(), starts, lengths, rows, good, 100), "kinds: expected shape"),
    ):
        with pytest.raises(ValueError, match=message):
            conformance.plan(*arguments, out)
    assert torch.equal(out.kinds, before[0])
    assert torch.equal(out.record_counts, before[1])
    for arguments, message in (
        ((starts, rows, aging, 100), "policy is fifo"),
        ((starts, int32(2, 3), good, 100), r"rows\[1\]: 3"),
        ((starts, int32(2, 2), good, 100), r"rows\[1\]: partition 2 belongs"),
        ((int32(0, 1, 4), rows, good, 100), "records: 2 queries"),
        ((starts, rows, good, -5), "id_range"),
    ):
        with pytest.raises(ValueError, match=message):
            conformance.install_slots(*arguments, out, metadata_update=True)
    assert int(good.tags.max()) == -1
    assert int(good.hands.max()) == 0


def test_isa_is_selectable() -> None:
    before = ops.isa()
    try:
        for name in ops.available_isas():
            ops.set_isa(name)
            assert ops.isa() == name
        ops.set_isa("auto")
        assert ops.isa() == ops.available_isas()[-1]
        with pytest.raises(ValueError, match="isa: 'sse9' is not available here"):
            ops.set_isa("sse9")
        assert ops.isa() == ops.available_isas()[-1]
    finally:
        ops.set_isa(before)


def test_isa_from_environment() -> None:
    code = "from vllm_kvoffload import ops; print(ops.isa())"
    environment = os.environ | {"KVOFFLOAD_ISA": "portable"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "portable"
