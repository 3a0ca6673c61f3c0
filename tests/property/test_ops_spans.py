"""Copies of raw memory equal the oracle, and refuse what lies outside the ranges they were given."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvoffload import ops
from vllm_kvoffload.ops import oracle


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_copy_spans_equals_oracle(data: st.DataObject) -> None:
    """Spans between two memories whose ranges have gaps; what lies outside stays as it is."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    source = rng.integers(0, 256, 400, dtype=np.uint8)
    got = rng.integers(0, 256, 400, dtype=np.uint8)
    expected = got.copy()
    ranges = [(0, 100), (100, 130), (150, 400)]
    spans = []
    for _ in range(data.draw(st.integers(0, 12))):
        nbytes = data.draw(st.integers(1, 30))
        places = [
            data.draw(st.integers(start, end - nbytes))
            for start, end in (data.draw(st.sampled_from(ranges)) for _ in range(2))
        ]
        spans.append((*places, nbytes))
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    bounds = np.array(ranges, dtype=np.int64)

    def run(copy_spans, target: np.ndarray) -> int:
        to, origin = target.ctypes.data, source.ctypes.data
        return copy_spans(columns[0] + to, columns[1] + origin, columns[2], bounds + to, bounds + origin)

    assert run(ops.copy_spans, got) == run(oracle.copy_spans, expected) == columns[2].sum()
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("to", "source", "nbytes", "message"),
    [
        (999, 2000, 1, r"to\[0\]: 999\+1 lies in none of the 2 ranges"),
        (1099, 2000, 2, r"to\[0\]"),  # crosses from one range to its neighbour
        (1200, 2000, 1, r"to\[0\]"),
        (1000, 1999, 1, r"source\[0\]"),
        (1000, 2099, 2, r"source\[0\]"),
        (1000, 2000, 0, r"nbytes\[0\]: 0"),
        (1000, 2000, -1, r"nbytes\[0\]: -1"),
        (1000, 2000, 2**63 - 1, r"to\[0\]"),
        (-(2**63), 2000, 1, r"to\[0\]"),
        (2**63 - 1, 2000, 2**63 - 1, r"to\[0\]"),
    ],
)
def test_bad_spans_are_refused_before_anything_moves(to: int, source: int, nbytes: int, message: str) -> None:
    ranges = np.array([[1000, 1100], [1100, 1200]]), np.array([[2000, 2100]])
    with pytest.raises(ValueError, match=message):
        ops.copy_spans(int64(to), int64(source), int64(nbytes), *ranges)


def test_a_bad_span_stops_those_before_it() -> None:
    memory = np.arange(100, dtype=np.uint8)
    at = memory.ctypes.data
    bounds = np.array([[at, at + 100]])
    with pytest.raises(ValueError, match=r"to\[1\]"):
        ops.copy_spans(int64(at, at + 99), int64(at + 50, at), int64(10, 10), bounds, bounds)
    with pytest.raises(ValueError, match="overlaps its source"):
        ops.copy_spans(int64(at), int64(at + 9), int64(10), bounds, bounds)
    assert np.array_equal(memory, np.arange(100))


@pytest.mark.parametrize("bounds", [[[5, 4]], [[-1, 4]], [[0, 10], [9, 20]], [[10, 20], [0, 5]]])
def test_bad_ranges_are_refused(bounds: list[list[int]]) -> None:
    good = np.array([[1, 2]])
    for ranges in ((np.array(bounds), good), (good, np.array(bounds))):
        with pytest.raises(ValueError, match=r"ranges\[\d\]"):
            ops.copy_spans(int64(), int64(), int64(), *ranges)


@pytest.mark.parametrize("place", range(5))
def test_spans_of_other_types_are_refused(place: int) -> None:
    arguments = [
        int64(),
        int64(),
        int64(),
        np.zeros((0, 2), dtype=np.int64),
        np.zeros((0, 2), dtype=np.int64),
    ]
    assert ops.copy_spans(*arguments) == 0
    arguments[place] = arguments[place].astype(np.int32)
    with pytest.raises(ValueError, match="int64"):
        ops.copy_spans(*arguments)
