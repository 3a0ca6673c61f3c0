"""I-2, I-3 and I-4, checked on the data itself and without the oracle.

A request's life is simulated with real rows: every version of every token has its own bytes, rejected drafts
are rewritten, rows are handed on. After each step, each attended slot must hold exactly the row of its token.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from plan_cases import Shape, Step, sequences

from vllm_kvoffload import ops

ROW_BYTES = 8
BLOCK_SIZE = 16


class Simulation:
    """Host pool, hot pool and the truth of what each token's row is, for each residency row's occupant."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.residency = shape.residency()
        self.out = shape.plan_out()
        self.workspace = ops.Workspace()
        self.blocks_per_row = 64
        self.host = torch.zeros(
            (shape.num_rows * self.blocks_per_row, BLOCK_SIZE, ROW_BYTES), dtype=torch.uint8
        )
        self.hot = torch.full((shape.num_rows, shape.slots_per_row, ROW_BYTES), 255, dtype=torch.uint8)
        rng = np.random.default_rng(3)
        self.tables = rng.permutation(self.host.shape[0]).reshape(shape.num_rows, -1).astype(np.int32)
        self.truth: list[dict[int, int]] = [{} for _ in range(shape.num_rows)]  # id -> version
        self.version = 0

    def bytes_of(self, versions: list[int]) -> torch.Tensor:
        return torch.tensor(versions, dtype=torch.int64).view(torch.uint8).view(len(versions), ROW_BYTES)

    def write_host(self, row: int, ids: list[int]) -> torch.Tensor:
        """New versions of the tokens, in the truth and in the host pool; returns their bytes."""
        versions = list(range(self.version + 1, self.version + 1 + len(ids)))
        self.version += len(ids)
        self.truth[row].update(zip(ids, versions, strict=True))
        mapping = [int(self.tables[row, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in ids]
        rows = self.bytes_of(versions)
        ops.host_write(self.host, rows, torch.tensor(mapping, dtype=torch.int64))
        return rows

    def step(self, step: Step) -> None:
        for row in step.reset:
            self.residency.reset_row(row)
            self.truth[row] = {}
        new_rows, token_rows = [], []
        starts, lengths, rows = step.query_start_loc.tolist(), step.seq_lens.tolist(), step.rows.tolist()
        for n, row in enumerate(rows):
            query_len = starts[n + 1] - starts[n]
            stable = lengths[n] - query_len
            if row < 0:
                new_rows.append(torch.zeros((query_len, ROW_BYTES), dtype=torch.uint8))
            else:
                self.write_host(row, [i for i in range(stable) if i not in self.truth[row]])  # prefill
                new_rows.append(self.write_host(row, list(range(stable, lengths[n]))))
            token_rows += [row] * query_len
        ops.dsa_plan(*step.inputs, self.residency, self.out, self.workspace)
        tables = torch.from_numpy(self.tables[[max(row, 0) for row in rows]])
        misses = self.out.miss_ids, self.out.miss_slots, self.out.miss_counts
        copied = ops.dsa_serve(self.host, self.hot, tables, step.rows, *misses)
        assert copied == ROW_BYTES * int(self.out.stats[ops.STATS.index("misses")])
        tokens = len(token_rows)
        new_slots = self.out.new_slots[:tokens].contiguous()
        ops.write_rows(self.hot, torch.tensor(token_rows, dtype=torch.int32), torch.cat(new_rows), new_slots)
        for n, row in enumerate(rows):
            if row >= 0 and starts[n] < starts[n + 1]:
                self.check_request(step, row, starts[n], starts[n + 1], lengths[n])
        self.check_residents()
        self.check_misses(step)

    def check_request(self, step: Step, row: int, first: int, last: int, seq_len: int) -> None:
        slot_of: dict[int, int] = {}
        for t in range(first, last):
            position = seq_len - (last - first) + (t - first)
            for token, slot in zip(step.topk[t].tolist(), self.out.slots[t].tolist(), strict=True):
                if not 0 <= token <= position:
                    assert slot == -1
                    continue
                assert slot_of.setdefault(token, slot) == slot, "duplicates of an id share its slot"
                assert self.held(row, slot) == self.truth[row][token], (
                    f"token {token} reads another row's bytes"
                )
        assert len(set(slot_of.values())) == len(slot_of), "I-3: two needed ids in one slot"
        tags = self.residency.tags[row]
        assert int(tags.max()) < seq_len, "I-2: a resident beyond the sequence"

    def held(self, row: int, slot: int) -> int:
        return int(self.hot[row, slot].view(torch.int64)[0])

    def check_residents(self) -> None:
        """Every tag tells the truth: its slot holds the token's current row, in its own set, once."""
        for row in range(self.shape.num_rows):
            tags = self.residency.tags[row]
            resident = [(int(s), int(w), int(tags[s, w])) for s, w in (tags >= 0).nonzero()]
            ids = [token for _, _, token in resident]
            assert len(set(ids)) == len(ids)
            high = int(self.residency.high[row])
            for index, way, token in resident:
                assert token % self.shape.sets == index
                assert token < high
                assert self.held(row, index * self.shape.ways + way) == self.truth[row][token], (
                    f"stale {token}"
                )

    def check_misses(self, step: Step) -> None:
        stats = dict(zip(ops.STATS, self.out.stats.tolist(), strict=True))
        counts = self.out.miss_counts[: len(step.rows)].tolist()
        assert stats["misses"] == sum(counts)
        for n, count in enumerate(counts):
            assert len(set(self.out.miss_ids[n, :count].tolist())) == count, "a miss fetched twice"
            assert len(set(self.out.miss_slots[n, :count].tolist())) == count


@settings(max_examples=150, deadline=None)
@given(sequences())
def test_attended_rows_are_the_tokens_own(case: tuple[Shape, list[Step]]) -> None:
    shape, steps = case
    simulation = Simulation(shape)
    for step in steps:
        simulation.step(step)


class OneRow:
    """A residency of one row, planned one step at a time with plain lists."""

    def __init__(self, policy: ops.Policy, sets: int = 1, topk: int = 16) -> None:
        self.residency = ops.Residency.allocate(1, 16 * sets, 16, policy)
        self.topk = topk
        self.out = ops.PlanOut(4, 1, topk, max_query_len=16 * sets // topk)
        self.workspace = ops.Workspace()

    def plan(self, *queries: list[int], seq_len: int = 10_000) -> list[list[int]]:
        """Slots of each query's ids."""
        ids = torch.tensor([q + [-1] * (self.topk - len(q)) for q in queries], dtype=torch.int32)
        starts = torch.tensor([0, len(queries)], dtype=torch.int32)
        lengths = torch.tensor([seq_len], dtype=torch.int32)
        row = torch.tensor([0], dtype=torch.int32)
        ops.dsa_plan(ids, starts, lengths, row, self.residency, self.out, self.workspace)
        return [self.out.slots[t, : len(q)].tolist() for t, q in enumerate(queries)]

    def stat(self, name: str) -> int:
        return int(self.out.stats[ops.STATS.index(name)])

    def resident(self) -> set[int]:
        return set(self.residency.tags.flatten().tolist()) - {-1}


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_rejected_drafts_are_dropped(policy: ops.Policy) -> None:
    """I-2: four tokens were planned from 100 on, one was accepted; the rest must not be hits any more."""
    row = OneRow(policy, sets=4)
    row.plan([100], [101], [102], [103], seq_len=104)
    assert row.resident() == {100, 101, 102, 103}
    row.plan([100], [101, 102], seq_len=103)
    assert row.stat("hits") == 1
    assert row.stat("new") == 2
    assert row.resident() == {100, 101, 102}
    row.plan([5], seq_len=51)  # far back, as after preemption
    assert row.resident() == {5, 50}


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_needed_rows_are_not_evicted(policy: ops.Policy) -> None:
    """I-3: a full set keeps all that the step needs, named before or after the miss."""
    for victim_first in (True, False):
        row = OneRow(policy)
        slots = dict(zip(range(16), row.plan(list(range(16)))[0], strict=True))
        needed = list(range(1, 16))
        ids = [99, *needed] if victim_first else [*needed, 99]
        after = dict(zip(ids, row.plan(ids)[0], strict=True))
        assert after[99] == slots[0], "the only unneeded slot"
        assert all(after[i] == slots[i] for i in needed)
        assert row.stat("misses") == 1


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_a_plan_always_exists(policy: ops.Policy) -> None:
    """I-4: as many ids of one set as the row has slots; those without room in it are gone afterwards."""
    row = OneRow(policy, sets=4)
    queries = [[64 * t + 4 * k for k in range(16)] for t in range(4)]
    slots = row.plan(*queries)
    assert sorted(slot for query in slots for slot in query) == list(range(64))
    assert row.stat("misses") == 64
    assert row.stat("displaced") == 48
    assert row.resident() == set(queries[0])
    row.plan(queries[0], queries[1])
    assert row.stat("hits") == 16
    assert row.stat("misses") == 16


@pytest.mark.parametrize("policy", ops.POLICIES)
def test_displaced_ids_are_shared_by_duplicates(policy: ops.Policy) -> None:
    row = OneRow(policy, sets=4)
    first, second = [4 * k for k in range(16)], [4 * k for k in range(16, 32)]
    slots = row.plan(first, second, second, first)
    assert slots[1] == slots[2]
    assert slots[0] == slots[3]
    assert row.stat("duplicates") == 32
    assert row.stat("displaced") == 16


def test_fifo_evicts_in_order_of_arrival() -> None:
    row = OneRow("fifo")
    row.plan(list(range(16)), seq_len=16)
    row.plan([0, 1, 2], seq_len=16)  # hits change nothing
    evicted = []
    for new in range(100, 104):
        before = row.resident()
        row.plan([new], seq_len=new + 1)
        evicted += sorted(before - row.resident())
    assert evicted == [0, 1, 2, 3]


def test_clock_gives_a_second_chance() -> None:
    row = OneRow("clock")
    row.plan(list(range(16)), seq_len=16)
    row.plan([0, 1, 3], seq_len=16)
    evicted = []
    for new in (200, 201, 202):
        before = row.resident()
        row.plan([new], seq_len=new + 1)
        evicted += sorted(before - row.resident())
    assert evicted == [2, 4, 5]


def test_rrip_keeps_what_is_hit_again_through_a_scan() -> None:
    """Eight ids are chosen at every step while a scan of 200 others passes by."""
    row = OneRow("rrip")
    hot = list(range(8))
    row.plan(hot, seq_len=50)
    misses = 0
    for new in range(100, 300):
        row.plan([*hot, new], seq_len=new + 1)
        misses += row.stat("misses")
    assert misses == 0


def test_counts_add_up() -> None:
    row = OneRow("rrip", sets=2)
    row.plan([3, 4, 5], seq_len=100)
    row.plan([3, 3, 7, 7, 98, 99, -1, 120, 4], [4, 99, 8, 98, 100], seq_len=101)
    assert dict(zip(ops.STATS, row.out.stats.tolist(), strict=True)) == {
        "hits": 2,  # 3 and 4
        "misses": 3,  # 7, 8 and 98
        "new": 2,  # 99 and 100
        "displaced": 0,
        "duplicates": 5,
        "invalid": 20,  # -1, 120 and the 18 that fill the queries up to 16
    }


def test_new_tokens_without_room_get_no_slot() -> None:
    row = OneRow("rrip")
    row.plan(list(range(16)), seq_len=100)
    assert int(row.out.new_slots[0]) == -1
    row.plan(list(range(15)), seq_len=101)
    assert int(row.out.new_slots[0]) == 15
