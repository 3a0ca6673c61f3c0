"""A request's life with real rows: every version of every token has its own bytes, rejected drafts are
rewritten, partitions get new owners. After each step, each attended row must be exactly that of its token.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.plan_cases import MAX_QUERY_LEN, Shape, Step
from vllm_kvoffload import ops
from vllm_kvoffload.policies import PLACEMENT_TABLE

ROW_BYTES = 8
BLOCK_SIZE = 16


class Pools:
    """Host pool, hot pool and the truth of what each token's row is, for each partition's occupant."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.blocks_per_partition = 64
        self.host = torch.zeros(
            (shape.num_partitions * self.blocks_per_partition, BLOCK_SIZE, ROW_BYTES), dtype=torch.uint8
        )
        self.hot = torch.full(
            (shape.num_partitions, shape.slots_per_partition, ROW_BYTES), 255, dtype=torch.uint8
        )
        rng = np.random.default_rng(3)
        self.tables = rng.permutation(self.host.shape[0]).reshape(shape.num_partitions, -1).astype(np.int32)
        self.truth: list[dict[int, int]] = [{} for _ in range(shape.num_partitions)]  # id -> version
        self.version = 0

    def bytes_of(self, versions: list[int]) -> torch.Tensor:
        return torch.tensor(versions, dtype=torch.int64).view(torch.uint8).view(len(versions), ROW_BYTES)

    def write_host(self, partition: int, ids: list[int]) -> torch.Tensor:
        """New versions of the tokens, in the truth and in the host pool; returns their bytes."""
        versions = list(range(self.version + 1, self.version + 1 + len(ids)))
        self.version += len(ids)
        self.truth[partition].update(zip(ids, versions, strict=True))
        mapping = [int(self.tables[partition, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in ids]
        rows = self.bytes_of(versions)
        ops.host_write(self.host, rows, torch.tensor(mapping, dtype=torch.int64))
        return rows

    def new_rows(self, step: Step) -> torch.Tensor:
        """uint8 [T, row_bytes]: writes the step's tokens and all earlier tokens not written yet."""
        starts, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        parts = [torch.zeros((0, ROW_BYTES), dtype=torch.uint8)]
        for n, partition in enumerate(step.rows.tolist()):
            query_len = starts[n + 1] - starts[n]
            stable = lengths[n] - query_len
            if partition < 0:
                parts.append(torch.zeros((query_len, ROW_BYTES), dtype=torch.uint8))
            else:
                self.write_host(
                    partition, [i for i in range(stable) if i not in self.truth[partition]]
                )  # prefill
                parts.append(self.write_host(partition, list(range(stable, lengths[n]))))
        parts.append(torch.zeros((len(step.topk) - starts[-1], ROW_BYTES), dtype=torch.uint8))
        return torch.cat(parts)

    def block_table(self, step: Step) -> torch.Tensor:
        return torch.from_numpy(self.tables[[max(partition, 0) for partition in step.rows.tolist()]])


def version_of(row: torch.Tensor) -> int:
    return int(row.contiguous().view(torch.int64)[0])


class Simulation(Pools):
    """In-place delivery: what is attended stands in the hot pool."""

    compact = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.residency = shape.residency()
        self.out = shape.plan_out(compact=self.compact)
        self.workspace = ops.Workspace()

    def step(self, step: Step) -> None:
        for partition in step.reset:
            self.residency.reset_partition(partition)
            self.truth[partition] = {}
        new_rows = self.new_rows(step)
        ops.dsa_plan(*step.inputs, self.residency, self.out, self.workspace)
        self.deliver(step, new_rows)
        self.check_residents()
        self.check_misses(step)

    def deliver(self, step: Step, new_rows: torch.Tensor) -> None:
        misses = self.out.miss_ids, self.out.miss_slots, self.out.miss_counts
        copied = ops.dsa_serve(self.host, self.hot, self.block_table(step), step.rows, *misses)
        assert copied == ROW_BYTES * int(self.out.stats[ops.STATS.index("misses")])
        self.write_new_rows(step, new_rows)
        starts, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        for n, partition in enumerate(step.rows.tolist()):
            if partition >= 0 and starts[n] < starts[n + 1]:
                self.check_request(step, partition, starts[n], starts[n + 1], lengths[n])

    def write_new_rows(self, step: Step, new_rows: torch.Tensor) -> None:
        starts = step.query_start_loc.tolist()
        lengths = torch.tensor(starts[1:]) - torch.tensor(starts[:-1])
        token_partitions = torch.repeat_interleave(step.rows, lengths)
        tokens = len(token_partitions)
        ops.write_rows(
            self.hot, token_partitions, new_rows[:tokens], self.out.new_slots[:tokens].contiguous()
        )

    def check_request(self, step: Step, partition: int, first: int, last: int, seq_len: int) -> None:
        slot_of: dict[int, int] = {}
        for t in range(first, last):
            position = seq_len - (last - first) + (t - first)
            for token, slot in zip(step.topk[t].tolist(), self.out.slots[t].tolist(), strict=True):
                if not 0 <= token <= position:
                    assert slot == -1
                    continue
                assert slot_of.setdefault(token, slot) == slot, "duplicates of an id share its slot"
                assert self.held(partition, slot) == self.truth[partition][token], (
                    f"token {token} reads another row's bytes"
                )
        assert len(set(slot_of.values())) == len(slot_of), "I-3: two needed ids in one slot"
        tags = self.residency.tags[partition]
        assert int(tags.max()) < seq_len, "I-2: a resident beyond the sequence"

    def held(self, partition: int, slot: int) -> int:
        return version_of(self.hot[partition, slot])

    def check_residents(self) -> None:
        """Every tag tells the truth: its slot holds the token's current row, in a set of its own, once."""
        placement = PLACEMENT_TABLE[self.shape.placement]
        for partition in range(self.shape.num_partitions):
            tags = self.residency.tags[partition]
            resident = [(int(s), int(w), int(tags[s, w])) for s, w in (tags >= 0).nonzero()]
            ids = [token for _, _, token in resident]
            assert len(set(ids)) == len(ids)
            high = int(self.residency.high[partition])
            for index, way, token in resident:
                assert index in placement.sets_of(token, self.shape.sets)
                assert token < high
                assert (
                    self.held(partition, index * self.shape.set_ways + way) == self.truth[partition][token]
                ), f"stale {token}"

    def check_misses(self, step: Step) -> None:
        stats = dict(zip(ops.STATS, self.out.stats.tolist(), strict=True))
        counts = self.out.miss_counts[: len(step.rows)].tolist()
        assert stats["misses"] == sum(counts)
        for n, count in enumerate(counts):
            assert len(set(self.out.miss_ids[n, :count].tolist())) == count, "a miss fetched twice"
            assert len(set(self.out.miss_slots[n, :count].tolist())) == count


def check_positions(pools: Pools, step: Step, selection: torch.Tensor) -> None:
    """Each position of a gathered selection has its token's row, or zeros where it has none to see."""
    starts, lengths, rows = step.query_start_loc.tolist(), step.seq_lens.tolist(), step.rows.tolist()
    expected = torch.zeros(step.topk.shape, dtype=torch.int64)
    for n, partition in enumerate(rows):
        stable = lengths[n] - (starts[n + 1] - starts[n])
        for t in range(starts[n], starts[n + 1] if partition >= 0 else starts[n]):
            for k, token in enumerate(step.topk[t].tolist()):
                if 0 <= token <= stable + t - starts[n]:
                    expected[t, k] = pools.truth[partition][token]
    versions = selection[: len(step.topk)].contiguous().view(torch.int64).view(step.topk.shape)
    assert torch.equal(versions, expected)


class CompactSimulation(Simulation):
    """Compact delivery: hits and misses are gathered first, the pool is refilled from that."""

    compact = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.selection = torch.full((shape.max_tokens, shape.topk, ROW_BYTES), 255, dtype=torch.uint8)

    def deliver(self, step: Step, new_rows: torch.Tensor) -> None:
        _, starts, lengths, rows = step.inputs
        fetched = ops.dsa_serve_compact(
            self.out.kinds,
            starts,
            lengths,
            self.host,
            self.hot,
            self.block_table(step),
            rows,
            new_rows,
            self.selection,
        )
        old_misses = self.out.kinds[: len(step.topk), :, 0] == ops.Kind.OLD_MISS
        assert fetched == ROW_BYTES * int(old_misses.sum())
        check_positions(self, step, self.selection)
        misses = self.out.miss_positions, self.out.miss_slots, self.out.miss_counts
        copied = ops.dsa_install(self.selection, starts, rows, *misses, self.hot)
        assert copied == ROW_BYTES * int(self.out.stats[ops.STATS.index("misses")])
        self.write_new_rows(step, new_rows)


class GatherSimulation(Pools):
    """No pool: each query's selection keeps what the step before had in it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        size = (shape.num_partitions, MAX_QUERY_LEN, shape.topk)
        self.selection = torch.full((*size, ROW_BYTES), 255, dtype=torch.uint8)
        self.status = torch.full((*size[:2], shape.topk + 1), -1, dtype=torch.int32)
        self.status[:, :, -1] = 0
        self.lengths = torch.full((shape.max_tokens,), -7, dtype=torch.int32)

    def step(self, step: Step) -> None:
        for partition in step.reset:
            self.status[partition] = -1
            self.status[partition, :, -1] = 0
            self.truth[partition] = {}
        new_rows = self.new_rows(step)
        before = self.status.clone()
        fetched = ops.gather_selection(
            *step.inputs,
            self.host,
            self.block_table(step),
            new_rows,
            self.selection,
            self.status,
            self.lengths,
        )
        assert fetched == ROW_BYTES * sum(self.check_query(step, before, t) for t in range(len(step.topk)))
        reused = torch.full_like(self.lengths, -7)[: len(step.topk)]
        ops.gather_reuse(self.status, step.rows, step.query_start_loc, reused)
        assert torch.equal(reused, self.lengths[: len(step.topk)])

    def check_query(self, step: Step, before: torch.Tensor, t: int) -> int:
        """Returns how many of its ids had to come from the host pool."""
        starts, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        n = next((n for n in range(len(starts) - 1) if starts[n] <= t < starts[n + 1]), None)
        partition = -1 if n is None else int(step.rows[n])
        if n is None or partition < 0:
            assert int(self.lengths[t]) == 0
            return 0
        s, stable = t - starts[n], lengths[n] - (starts[n + 1] - starts[n])
        ids = self.status[partition, s, : int(self.lengths[t])].tolist()
        wanted = {token for token in step.topk[t].tolist() if 0 <= token <= stable + s}
        assert len(ids) == len(wanted)
        assert set(ids) == wanted
        assert int(self.status[partition, s, -1]) == len(ids)
        assert self.status[partition, s, len(ids) : -1].tolist() == [-1] * (self.shape.topk - len(ids))
        for place, token in enumerate(ids):
            assert version_of(self.selection[partition, s, place]) == self.truth[partition][token], (
                f"token {token}"
            )
        kept = set(before[partition, s, : int(before[partition, s, -1])].tolist())
        return sum(token < stable and token not in kept for token in ids)
