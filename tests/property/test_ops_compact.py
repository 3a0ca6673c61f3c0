"""Compact delivery: kinds, the gathered selection and the install, by hand and against the oracle."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan_cases import Step, int32, numbered, numbers
from vllm_kvoffload import ops
from vllm_kvoffload.ops import Kind, oracle

IMPLEMENTATIONS = pytest.mark.parametrize("impl", [oracle, ops], ids=["oracle", "native"])
ROW_BYTES = 8


def plan(impl: ModuleType, step: Step, residency: ops.Residency, out: ops.PlanOut) -> None:
    impl.dsa_plan(*step.inputs, residency, out, ops.Workspace())


@IMPLEMENTATIONS
def test_kinds_by_hand(impl: ModuleType) -> None:
    residency, out = ops.Residency.allocate(2, 64), ops.PlanOut(8, 3, 6, 2, compact=True)
    first = Step(torch.tensor([[3, 4, -1, -1, -1, -1]], dtype=torch.int32), int32(0, 1), int32(9), int32(1))
    plan(impl, first, residency, out)
    out.kinds.fill_(-7)
    topk = torch.tensor(
        [
            [3, 70, 9, 10, -1, 70],  # stable 9: 9 is this token's own position, 10 the draft's
            [70, 10, 11, 9, 4, -5],
            [0, 0, 0, 0, 0, 0],  # a request without a row
            [1, 1, 1, 1, 1, 1],  # past the last request
        ],
        dtype=torch.int32,
    )
    topk[0, 1] = topk[0, 5] = topk[1, 0] = 7
    plan(impl, Step(topk, int32(0, 2, 3), int32(11, 5), int32(1, -1)), residency, out)
    slot = {int(token): i for i, token in enumerate(residency.tags[1].flatten()) if token >= 0}
    assert out.kinds[:4].tolist() == [
        [[Kind.POOL_HIT, slot[3]], [2, 7], [3, 9], [4, 10], [5, -1], [2, 7]],
        [[2, 7], [Kind.DECODE_WINDOW, 10], [4, 11], [3, 9], [1, slot[4]], [5, -5]],
        [[Kind.INVALID, -1]] * 6,
        [[Kind.INVALID, -1]] * 6,
    ]
    assert int(out.kinds[4:].max()) == -7, "only the step's part is written"
    assert out.miss_ids[0, :1].tolist() == [7]
    assert out.miss_positions[0, : int(out.miss_counts[0])].tolist() == [1]


@IMPLEMENTATIONS
def test_overflow_is_placed_last(impl: ModuleType) -> None:
    """Two sets of 16: 17 even ids first, then odd ones. The 17th must not take the odd ones' ways early."""
    residency, out = ops.Residency.allocate(1, 32, policy="fifo"), ops.PlanOut(1, 1, 32, 1, compact=True)
    even, odd = list(range(0, 36, 2)), list(range(1, 29, 2))
    ids = torch.tensor([even + odd], dtype=torch.int32)
    plan(impl, Step(ids, int32(0, 1), int32(100), int32(0)), residency, out)
    assert out.miss_ids[0, :32].tolist() == even[:16] + odd + even[16:]
    assert out.miss_slots[0, :32].tolist() == list(range(32))
    assert out.miss_positions[0, :32].tolist() == [*range(16), *range(18, 32), 16, 17]
    assert residency.tags[0, 1].tolist() == [*odd, -1, -1]
    assert dict(zip(ops.STATS, out.stats.tolist(), strict=True))["displaced"] == 2


@IMPLEMENTATIONS
def test_serve_and_install_by_hand(impl: ModuleType) -> None:
    host = numbered(100, 6).view(3, 2, ROW_BYTES)
    hot = numbered(200, 8).view(2, 4, ROW_BYTES).clone()
    kinds = torch.full((4, 3, 2), -1, dtype=torch.int32)
    kinds[0] = torch.tensor([[1, 3], [2, 3], [3, 5]])
    kinds[1] = torch.tensor([[4, 9], [3, 6], [5, -1]])
    kinds[2] = torch.tensor([[1, 0], [2, 0], [3, 0]])  # of a request without a row
    kinds[3] = torch.tensor([[1, 0], [0, -1], [2, 1]])
    selection = numbered(900, 15).view(5, 3, ROW_BYTES).clone()
    starts, rows, table = int32(0, 2, 3, 4), int32(1, -1, 0), torch.tensor([[0, 2], [0, 0], [1, 1]])
    fetched = impl.dsa_serve_compact(
        kinds,
        starts,
        int32(7, 1, 3),
        host,
        hot,
        table.to(torch.int32),
        rows,
        numbered(300, 4),
        selection,
    )
    assert fetched == 2 * ROW_BYTES
    assert numbers(selection) == [207, 105, 300, 0, 301, 0, 0, 0, 0, 200, 0, 103, 912, 913, 914]
    positions = torch.tensor([[1, 4, 0], [0, 0, 0], [2, 0, 0]], dtype=torch.int32)
    slots = torch.tensor([[2, 0, 0], [0, 0, 0], [3, 0, 0]], dtype=torch.int32)
    copied = impl.dsa_install(selection, starts, rows, positions, slots, int32(2, 3, 1), hot)
    assert copied == 3 * ROW_BYTES
    assert numbers(hot) == [200, 201, 202, 103, 301, 205, 105, 207]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    row_bytes=st.sampled_from([1, 7, 656, 1152]),
    block_size=st.sampled_from([1, 3, 16]),
    lengths=st.lists(st.integers(0, 4), max_size=4),
    padding=st.integers(0, 2),
)
def test_equals_oracle(seed: int, row_bytes: int, block_size: int, lengths: list[int], padding: int) -> None:
    """Kinds that no plan wrote: any mix, also where there is no request, in buffers longer than the step."""
    rng = np.random.default_rng(seed)
    blocks, width, slots, table_width = 9, 7, 20, 5
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    tokens, requests = int(starts[-1]) + padding, len(lengths)

    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))

    def random_ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape, dtype=np.int32))

    host, hot = random_bytes(blocks, block_size, row_bytes), random_bytes(6, slots, row_bytes)
    rows = torch.from_numpy(rng.permutation(np.arange(-1, 6, dtype=np.int32))[:requests].copy())
    query_lens = np.asarray(lengths, dtype=np.int32)
    seq_lens = torch.from_numpy(rng.integers(0, 50, requests).astype(np.int32) + query_lens)
    kinds = torch.from_numpy(rng.integers(0, 6, (tokens + 2, width, 2)).astype(np.int32))
    index = kinds[:, :, 1]
    index[kinds[:, :, 0] == Kind.POOL_HIT] = 13
    index[kinds[:, :, 0] == Kind.OLD_MISS] = table_width * block_size - 1
    for n, (first, last) in enumerate(pairwise(starts.tolist())):
        window = kinds[first:last, :, 0] == Kind.DECODE_WINDOW
        index[first:last][window] = int(seq_lens[n]) - 1
    selection = random_bytes(tokens + 1, width, row_bytes)
    expected, expected_hot = selection.clone(), hot.clone()
    query_start_loc = torch.from_numpy(starts)
    table = random_ints(0, blocks, requests + 1, table_width)
    inputs = kinds, query_start_loc, seq_lens, host, hot, table, rows, random_bytes(tokens, row_bytes)
    assert ops.dsa_serve_compact(*inputs, selection) == oracle.dsa_serve_compact(*inputs, expected)
    assert torch.equal(selection, expected)

    capacity = 9
    positions = random_ints(0, 7, requests + 1, capacity)
    counts = random_ints(0, capacity + 1, requests + 1)
    counts[:requests][query_lens == 0] = 0
    lists = query_start_loc, rows, positions, random_ints(0, slots, requests + 1, capacity), counts
    assert ops.dsa_install(selection, *lists, hot) == oracle.dsa_install(expected, *lists, expected_hot)
    assert torch.equal(hot, expected_hot)
