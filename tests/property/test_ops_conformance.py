"""The seeds' plan and install: by hand, against a model of the seeds' tables, core against oracle."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from vllm_kvoffload import ops
from vllm_kvoffload.ops import Kind, conformance
from vllm_kvoffload.ops.oracle import conformance as oracle

IMPLEMENTATIONS = pytest.mark.parametrize("impl", [oracle, conformance], ids=["oracle", "native"])
ID_RANGE = 1 << 17


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_query(
    impl: ModuleType, ids: list[int], length: int, residency: ops.Residency, **options: int
) -> conformance.ConformanceOut:
    """The out buffers after a plan of one query of one request on row 0."""
    out = conformance.ConformanceOut(1, 1, len(ids), 1)
    id_range = options.get("id_range", ID_RANGE)
    impl.plan(
        torch.tensor([ids], dtype=torch.int32), int32(0, 1), int32(length), int32(0), residency, id_range, out
    )
    return out


def fifo(slots: int = 64) -> ops.Residency:
    return ops.Residency.allocate(1, slots, 16, "fifo")


@IMPLEMENTATIONS
def test_published_vector(impl: ModuleType) -> None:
    """One query, L = 10: 9 is in the decode window, 10 in the future, 3 old, missing and then resident."""
    residency = fifo()
    ids = [9, 10, 3, *[-1] * 61]
    out = one_query(impl, ids, 10, residency)
    assert out.kinds[0, :5].tolist() == [
        [Kind.DECODE_WINDOW, 9],
        [Kind.FUTURE_SKIP, 10],
        [Kind.OLD_MISS, 3],
        [Kind.NEGATIVE_STOP, -1],
        [Kind.INVALID, -1],
    ]
    assert out.actual.tolist() == [2], "9 and 3; the future one is not counted"
    assert out.record_counts[0, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert out.records[0, 0, 0, 0].tolist() == [3, 3, 0, 2]
    assert int(residency.tags.max()) == -1, "the plan writes no metadata"
    impl.install_slots(int32(0, 1), int32(0), residency, ID_RANGE, out, metadata_update=True)
    assert out.miss_slots[0, :1].tolist() == [3 * 16]
    again = one_query(impl, ids, 10, residency)
    assert again.kinds[0, 2].tolist() == [Kind.POOL_HIT, 48]
    assert again.record_counts.sum() == 0


@IMPLEMENTATIONS
def test_token_0_counts_as_old(impl: ModuleType) -> None:
    """max(L - q - 1, 0) is 0 for the first token too, which is thus a miss, not in the window."""
    out = one_query(impl, [0, 1], 1, fifo())
    assert out.kinds[0].tolist() == [[Kind.OLD_MISS, 0], [Kind.FUTURE_SKIP, 1]]
    assert out.actual.tolist() == [1]


@IMPLEMENTATIONS
@pytest.mark.parametrize("length", [0, -3])
def test_no_tokens(impl: ModuleType, length: int) -> None:
    out = one_query(impl, [0, 1, -1], length, fifo())
    assert out.kinds[0].tolist() == [[4, 0], [4, 1], [5, -1]]
    assert out.actual.tolist() == [0]


@IMPLEMENTATIONS
def test_stops_hold_for_their_chunk(impl: ModuleType) -> None:
    """Chunks of two: a stop reaches the next chunk only if its last position is negative itself."""
    out = one_query(impl, [-1, 1, 2, -1, 4, 5, -1, -1, 8, 9, *range(10, 16)], 100, fifo())
    kinds = out.kinds[0, :, 0].tolist()
    assert kinds == [5, 0, 2, 5, 0, 0, 5, 0, 0, 0, 2, 2, 2, 2, 2, 2]
    assert out.actual.tolist() == [0]


@IMPLEMENTATIONS
def test_ids_beyond_the_range_are_recorded_and_dropped(impl: ModuleType) -> None:
    residency = fifo()
    residency.tags[0, 0, 3] = 40
    out = one_query(impl, [40, 44, 1], 100, residency, id_range=40)
    assert out.kinds[0].tolist() == [[2, 40], [2, 44], [2, 1]]
    assert int(out.record_counts.sum()) == 3
    impl.install_slots(int32(0, 1), int32(0), residency, 40, out, metadata_update=True)
    assert out.miss_counts.tolist() == [1]
    assert out.miss_positions[0, 0] == 2
    assert one_query(impl, [40], 100, residency, id_range=41).kinds[0, 0].tolist() == [1, 3]


@IMPLEMENTATIONS
def test_install_wraps_and_the_first_record_wins(impl: ModuleType) -> None:
    """One set: 18 new ids, three of them twice and across queries; the last two overwrite the first two."""
    residency = fifo(16)
    residency.hands[0, 0] = 14
    out = conformance.ConformanceOut(2, 1, 16, 2)
    topk = torch.tensor([list(range(16)), [3, 16, 3, 17, 0, *[-1] * 11]], dtype=torch.int32)
    impl.plan(topk, int32(0, 2), int32(60), int32(0), residency, ID_RANGE, out)
    for metadata_update in (False, False, True):
        assert residency.tags.max() == -1
        impl.install_slots(int32(0, 2), int32(0), residency, ID_RANGE, out, metadata_update=metadata_update)
        assert out.miss_counts.tolist() == [18]
        assert out.miss_slots[0, :18].tolist() == [14, 15, *range(14), 14, 15]
        assert out.miss_positions[0, :18].tolist() == [*range(16), 17, 19]
    assert residency.hands.tolist() == [[0]]
    assert residency.tags[0, 0].tolist() == [*range(2, 16), 16, 17]


@IMPLEMENTATIONS
def test_damaged_records_are_dropped(impl: ModuleType) -> None:
    residency = fifo()
    out = one_query(impl, list(range(16)), 100, residency)
    good = out.records.clone()
    for field, values in enumerate(([-1, 4], [-1, ID_RANGE], [-1, 1], [-1, 16])):
        for value in values:
            out.records.copy_(good)
            out.records[0, 0, 2, 1, field] = value
            impl.install_slots(int32(0, 1), int32(0), residency, ID_RANGE, out, metadata_update=False)
            assert out.miss_counts.tolist() == [15]
            assert 5 not in out.miss_positions[0, :15].tolist()
    out.records.copy_(good)
    out.record_counts[0, 0] = torch.tensor([-5, 1 << 30, 2, 2, 2, 2, 2, 2])
    impl.install_slots(int32(0, 1), int32(0), residency, ID_RANGE, out, metadata_update=False)
    assert out.miss_positions[0, : int(out.miss_counts[0])].tolist() == list(range(2, 16))
