"""CANN's plan and install: by hand, against a model of its tables, core against oracle."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan_cases import MAX_QUERY_LEN, Shape, Step, int32, sequences
from tests.property.ops_simulation import ROW_BYTES, Pools, check_positions, version_of
from vllm_kvoffload import ops
from vllm_kvoffload.ops import Kind, conformance
from vllm_kvoffload.ops.oracle import conformance as oracle

IMPLEMENTATIONS = pytest.mark.parametrize("impl", [oracle, conformance], ids=["oracle", "native"])
ID_RANGE = 1 << 17


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


def conformance_out(shape: Shape) -> conformance.ConformanceOut:
    return conformance.ConformanceOut(shape.max_tokens, shape.num_partitions + 1, shape.topk, MAX_QUERY_LEN)


def as_fifo(shape: Shape) -> Shape:
    """The same pool in sets of 16."""
    return replace(shape, ways=16, sets=shape.slots_per_partition // 16, policy="fifo", placement="one_set")


class CannTables:
    """CANN's state: slot of every id, id of every slot, counter of every set. For one row."""

    def __init__(self, slots: int, id_range: int) -> None:
        self.slot_of = np.full(id_range, -1)
        self.id_of = np.full(slots, -1)
        self.counters = np.zeros(slots // 16, dtype=int)

    def plan(
        self, ids: list[int], query: int, raw_seq: int, length: int
    ) -> tuple[list[tuple[int, int]], list[list[tuple[int, int, int, int]]], int]:
        """(kinds, records per chunk, actual) of one query."""
        max_sel, max_valid = length - (raw_seq - 1 - query) - 1, max(length - raw_seq - 1, 0)
        kinds, chunks, stopped = [], [[] for _ in range(8)], False
        size = (len(ids) + 7) // 8
        for k, token in enumerate(ids):
            if k % size == 0:
                stopped = k > 0 and ids[k - 1] < 0
            slot = self.slot_of[token] if 0 <= token < len(self.slot_of) else -1
            if stopped:
                kinds.append((0, -1))
            elif token < 0:
                kinds.append((5, token))
                stopped = True
            elif length <= 0 or max_sel < 0 or token > max_sel:
                kinds.append((4, token))
            elif slot >= 0 and token <= max_valid:
                kinds.append((1, int(slot)))
            elif token > max_valid:
                kinds.append((3, token))
            else:
                kinds.append((2, token))
                chunks[k // size].append((token & (len(self.counters) - 1), token, query, k))
        head = ids[: next((k for k, token in enumerate(ids) if token < 0), len(ids))]
        return kinds, chunks, sum(token <= max_sel for token in head) if length > 0 else 0

    def install(self, records: list[tuple[int, int, int, int]], width: int) -> list[tuple[int, int]]:
        """[(slot, position)], and the tables brought up to date."""
        done: dict[int, tuple[int, int]] = {}
        for home, token, query, k in records:
            if token >= len(self.slot_of) or token in done:
                continue
            slot = home * 16 + self.counters[home] % 16
            self.counters[home] = (self.counters[home] + 1) % 16
            if self.id_of[slot] >= 0:
                self.slot_of[self.id_of[slot]] = -1
            self.id_of[slot], self.slot_of[token] = token, slot
            done[token] = int(slot), query * width + k
        return list(done.values())


def shifted_lengths(step: Step, rng: np.random.Generator) -> Step:
    """Some sequences shorter than their query, also empty and negative: any will do."""
    shift = rng.integers(0, 8, len(step.seq_lens)) * (rng.random(len(step.seq_lens)) < 0.2)
    return replace(step, seq_lens=step.seq_lens - torch.from_numpy(shift.astype(np.int32)))


@settings(max_examples=150, deadline=None)
@given(sequences(), st.integers(0, 2**32), st.sampled_from([16, 100, 5000]))
def test_equals_cann_tables(case: tuple[Shape, list[Step]], seed: int, id_range: int) -> None:
    shape, steps = as_fifo(case[0]), case[1]
    rng = np.random.default_rng(seed)
    residency, out = shape.residency(), conformance_out(shape)
    tables = [CannTables(shape.slots_per_partition, id_range) for _ in range(shape.num_partitions)]
    for step in (shifted_lengths(step, rng) for step in steps):
        conformance.plan(*step.inputs, residency, id_range, out)
        starts = step.query_start_loc
        records: list[list[Any]] = []
        for n, row in enumerate(step.rows.tolist()):
            first, query_len = int(starts[n]), int(starts[n + 1] - starts[n])
            records.append([])
            for s in range(query_len if row >= 0 else 0):
                ids, length = step.topk[first + s].tolist(), int(step.seq_lens[n])
                kinds, chunks, actual = tables[row].plan(ids, s, query_len, length)
                assert out.kinds[first + s].tolist() == [list(kind) for kind in kinds]
                assert int(out.actual[first + s]) == actual
                for chunk, expected in enumerate(chunks):
                    count = int(out.record_counts[n, s, chunk])
                    assert out.records[n, s, chunk, :count].tolist() == [list(r) for r in expected]
                    records[-1] += expected
        conformance.install_slots(starts, step.rows, residency, id_range, out, metadata_update=True)
        for n, row in enumerate(step.rows.tolist()):
            expected = tables[row].install(records[n], shape.topk) if row >= 0 else []
            count = int(out.miss_counts[n])
            got = out.miss_slots[n, :count].tolist(), out.miss_positions[n, :count].tolist()
            assert list(zip(*got, strict=True)) == expected
        for row, table in enumerate(tables):
            assert residency.tags[row].flatten().tolist() == table.id_of.tolist()
            assert residency.hands[row].tolist() == table.counters.tolist()
            slots: npt.NDArray[Any] = np.nonzero(table.id_of >= 0)[0]
            assert np.array_equal(table.slot_of[table.id_of[slots]], slots), "the model itself"


BUFFERS = ("kinds", "actual", "records", "record_counts", "miss_positions", "miss_slots", "miss_counts")


@settings(max_examples=150, deadline=None)
@given(sequences(), st.integers(0, 2**32), st.booleans())
def test_equals_oracle(case: tuple[Shape, list[Step]], seed: int, damaged: bool) -> None:
    """Also with records and pointers that no plan left behind."""
    shape, steps = as_fifo(case[0]), case[1]
    rng = np.random.default_rng(seed)
    states = [(impl, shape.residency(), conformance_out(shape)) for impl in (oracle, conformance)]
    for step in (shifted_lengths(step, rng) for step in steps):
        noise = torch.from_numpy(rng.integers(-2, 40, states[0][2].records.shape).astype(np.int32))
        changed = torch.from_numpy(rng.random(noise.shape) < 0.1)
        for impl, residency, out in states:
            impl.plan(*step.inputs, residency, 300, out)
            if damaged:
                residency.hands += 7
                out.records[changed] = noise[changed]
                out.record_counts += noise[:, :, :, 0, 0] // 8
            for update in (False, True):
                impl.install_slots(
                    step.query_start_loc, step.rows, residency, 300, out, metadata_update=update
                )
        (_, expected_state, expected), (_, state, out) = states
        for name in BUFFERS:
            assert torch.equal(getattr(out, name), getattr(expected, name)), name
        assert torch.equal(state.tags, expected_state.tags)
        assert torch.equal(state.hands, expected_state.hands)
        assert int(state.ages.max()) == int(state.high.max()) == 0


@settings(max_examples=60, deadline=None)
@given(sequences(), st.integers(1, 3))
def test_layers_of_a_group_agree(case: tuple[Shape, list[Step]], followers: int) -> None:
    """The owner plans, followers install without metadata, the owner last with it: one residency is true of
    every layer's pool, and every layer attends to its own rows."""
    shape, steps = as_fifo(case[0]), case[1]
    residency, out = shape.residency(), conformance_out(shape)
    layers = [Pools(shape) for _ in range(1 + followers)]
    for number, layer in enumerate(layers):
        layer.version = number * 1_000_000
    selection = torch.full((shape.max_tokens, shape.topk, ROW_BYTES), 255, dtype=torch.uint8)
    for step in steps:
        reset_rewound(step, residency, layers)
        conformance.plan(*step.inputs, residency, ID_RANGE, out)
        lists = []
        for layer in (*layers[1:], layers[0]):
            serve(layer, step, out, selection)
            owner = layer is layers[0]
            conformance.install_slots(
                step.query_start_loc, step.rows, residency, ID_RANGE, out, metadata_update=owner
            )
            misses = out.miss_positions, out.miss_slots, out.miss_counts
            lists.append([buffer.clone() for buffer in misses])
            ops.dsa_install(selection, step.query_start_loc, step.rows, *misses, layer.hot)
        for buffers in zip(*lists, strict=True):
            assert all(torch.equal(buffers[0], other) for other in buffers[1:])
        for layer in layers:
            for row, index, way in (residency.tags >= 0).nonzero().tolist():
                token = int(residency.tags[row, index, way])
                assert version_of(layer.hot[row, index * 16 + way]) == layer.truth[row][token]


def reset_rewound(step: Step, residency: ops.Residency, layers: list[Pools]) -> None:
    """This mode has no roll-back: a row starts anew when its request went back or its new token is 0."""
    for n, row in enumerate(step.rows.tolist()):
        query_len = int(step.query_start_loc[n + 1] - step.query_start_loc[n])
        stable = int(step.seq_lens[n]) - query_len
        if row in step.reset or (row >= 0 and (stable == 0 or int(residency.tags[row].max()) >= stable)):
            residency.reset_partition(row)
            for layer in layers:
                layer.truth[row] = {}


def serve(layer: Pools, step: Step, out: conformance.ConformanceOut, selection: torch.Tensor) -> None:
    new_rows = layer.new_rows(step)
    ops.dsa_serve_compact(
        out.kinds,
        step.query_start_loc,
        step.seq_lens,
        layer.host,
        layer.hot,
        layer.block_table(step),
        step.rows,
        new_rows,
        selection,
    )
    stops = (step.topk < 0).any(dim=1)  # positions behind a stop are zeros in this mode, whatever their id
    unstopped = replace(
        step, topk=torch.where(stops[:, None] & (out.kinds[: len(step.topk), :, 0] == 0), -1, step.topk)
    )
    check_positions(layer, unstopped, selection)
