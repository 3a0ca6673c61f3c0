"""Coalescing and region checks, against plain byte maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload.transfer import Region, RegionTable, Spans, TransferError, coalesce
from vllm_kvoffload.transfer.base import prepare
from vllm_kvoffload.transfer.spans import block_spans


def byte_map(spans: Spans) -> dict[int, int]:
    """Local byte -> remote byte."""
    copies = {}
    for local, remote, count in zip(spans.local, spans.remote, spans.nbytes, strict=True):
        for n in range(count):
            assert local + n not in copies
            copies[int(local + n)] = int(remote + n)
    return copies


@st.composite
def block_copies(draw):
    size = draw(st.integers(1, 5))
    count = draw(st.integers(0, 12))
    local = draw(st.permutations(range(16)))[:count]
    remote = draw(st.lists(st.integers(0, 15), min_size=count, max_size=count))
    return Spans.of([(100 + a * size, 1000 + b * size, size) for a, b in zip(local, remote, strict=True)])


@given(block_copies(), st.sampled_from([3, 7, 1 << 62]))
def test_coalescing_copies_the_same_bytes(spans, max_bytes):
    merged = coalesce(spans, max_bytes)
    assert byte_map(merged) == byte_map(spans)
    assert len(merged) <= len(spans)
    assert merged.nbytes.max(initial=0) <= max(max_bytes, spans.nbytes.max(initial=0))


@given(st.integers(1, 30), st.randoms())
def test_a_contiguous_range_becomes_one_span(count, random):
    blocks = list(range(count))
    random.shuffle(blocks)
    numbers = np.array(blocks, dtype=np.int64)
    merged = coalesce(block_spans(numbers + 3, 4096, 64, numbers + 9, 1 << 40, 64, 64))
    assert [a.tolist() for a in (merged.local, merged.remote, merged.nbytes)] == [
        [4096 + 3 * 64],
        [(1 << 40) + 9 * 64],
        [64 * count],
    ]


def test_neighbours_on_one_side_only_stay_apart():
    spans = Spans.of([(0, 100, 4), (8, 104, 4), (12, 200, 4)])
    assert len(coalesce(spans)) == 3


def test_empty_spans_vanish():
    assert len(coalesce(Spans.of([(0, 0, 0), (5, 5, 0)]))) == 0


def test_offsets_beyond_32_bits():
    numbers = np.array([1 << 20], dtype=np.int64)
    spans = block_spans(numbers, 0, 1 << 20, numbers, 0, 1 << 20, 1)
    assert spans.local[0] == 1 << 40


@pytest.mark.parametrize(
    "regions", [[(10, 5), (14, 1)], [(10, 5), (10, 5)], [(10, 0)], [(0, 5)], [(20, 3), (5, 16)]]
)
def test_bad_regions_are_refused(regions):
    with pytest.raises(ValueError, match="region"):
        RegionTable([Region(*region) for region in regions])


@given(st.integers(0, 60), st.integers(-1, 30))
def test_a_span_must_lie_in_one_region(address, nbytes):
    regions = [(10, 10), (20, 5), (40, 10)]
    table = RegionTable([Region(*region) for region in regions])
    inside = nbytes > 0 and any(start <= address and address + nbytes <= start + n for start, n in regions)
    found = table.find_outside(np.array([12, address]), np.array([1, nbytes]))
    assert found == (None if inside else 1)


def test_no_region_holds_nothing():
    assert RegionTable([]).find_outside(np.array([5]), np.array([1])) == 0


def test_prepare_does_not_merge_across_regions():
    two = RegionTable([Region(100, 8), Region(108, 8)])
    one = RegionTable([Region(500, 16)])
    spans = Spans.of([(500, 100, 8), (508, 108, 8)])
    assert len(prepare(spans, one, two)) == 2
    assert len(prepare(spans, one, RegionTable([Region(100, 16)]))) == 1


def test_prepare_names_the_side():
    table = RegionTable([Region(100, 8)])
    with pytest.raises(TransferError, match="span 0: remote"):
        prepare(Spans.of([(100, 101, 8)]), table, table)
    with pytest.raises(TransferError, match="span 1: local"):
        prepare(Spans.of([(100, 100, 8), (99, 100, 8)]), table, table)


END = (1 << 63) - 1


@pytest.mark.parametrize(
    ("address", "nbytes"), [(1 << 63, 1), (END, 1), (1, END), (64, 1 << 63), (-1, 5), (5, -5)]
)
def test_regions_beyond_an_int64_are_an_error(address, nbytes):
    """They came as OverflowError, which is no ValueError, or went around."""
    with pytest.raises(ValueError, match="a region"):
        RegionTable([Region(address, nbytes)])


def test_a_span_that_would_go_around_lies_in_no_region():
    table = RegionTable([Region(64, 64), Region(END - 64, 64)])
    addresses = np.array([END - 10, 64], dtype=np.int64)
    assert table.find_outside(addresses, np.array([END - 5, 64], dtype=np.int64)) == 0
    assert table.find_outside(addresses, np.array([10, 64], dtype=np.int64)) is None


@pytest.mark.parametrize("blocks", [[0, 1 << 62], [-1]])
@pytest.mark.parametrize("stride", [64, 1 << 61])
def test_blocks_beyond_an_int64_are_an_error(blocks, stride):
    numbers, here = np.array(blocks, dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
    with pytest.raises(ValueError, match="blocks"):
        block_spans(here, 64, 64, numbers, 64, stride, 64)
    assert len(block_spans(here, 64, 64, here, 64, stride, 64)) == len(blocks)
