"""The plan: the slot of every top-k token, and the tokens to fetch."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.ops.types import STATS, Kind, PlanOut, Residency
from vllm_kvoffload.policies import PLACEMENT_TABLE, TABLE

Array: TypeAlias = npt.NDArray[Any]

EMPTY = -1
NO_SLOT = -1


class _Ways:
    """An id's ways, numbered from 0, in its sets: the policy's view of their ages."""

    def __init__(self, sets: tuple[int, ...], set_ways: int, ages: Array) -> None:
        self.places = [(index, way) for index in sets for way in range(set_ways)]
        self.set_ways = set_ways
        self._ages = ages

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, way: int) -> Any:
        return self._ages[self.places[way]]

    def __setitem__(self, way: int, age: int) -> None:
        self._ages[self.places[way]] = age

    def emptiest(self, empty: list[int]) -> int:
        """Of these empty ways, ascending, the lowest in the set that has most of them; the first such set."""
        return max(
            empty, key=lambda way: (sum(w // self.set_ways == way // self.set_ways for w in empty), -way)
        )


class _PartitionPlan:
    """One request's plan on its partition."""

    def __init__(self, residency: Residency, partition: int) -> None:
        self.tags: Array = residency.tags.numpy()[partition]
        self.ages: Array = residency.ages.numpy()[partition]
        self.hands: Array = residency.hands.numpy()[partition]
        self.high: Array = residency.high.numpy()[partition : partition + 1]
        self.sets: int = self.tags.shape[0]
        self.set_ways: int = self.tags.shape[1]
        self.policy = TABLE[residency.policy]
        self.placement = PLACEMENT_TABLE[residency.placement]
        self.needed: set[tuple[int, int]] = set()  # (set, way of the set) used by this step
        self.slot_of: dict[int, int] = {}  # of ids placed by this step
        self.stats = dict.fromkeys(STATS, 0)
        self.misses: list[tuple[int, int, int]] = []  # (id, slot, position of its first occurrence)

    def ways_of(self, token: int) -> _Ways:
        """The ways that an id can be resident in."""
        return _Ways(self.placement.sets_of(token, self.sets), self.set_ways, self.ages)

    def find(self, token: int) -> int:
        """Slot of a resident id, or NO_SLOT."""
        for index in self.placement.sets_of(token, self.sets):
            (ways,) = np.nonzero(self.tags[index] == token)
            if len(ways):
                return index * self.set_ways + int(ways[0])
        return NO_SLOT

    def drop_unstable(self, stable: int, seq_len: int) -> None:
        """Forgets residents at or beyond the stable prefix: their rows belong to rejected drafts (I-2)."""
        high = int(self.high[0])
        if high - stable > self.tags.size:
            gone = self.tags >= stable
        else:
            gone = (self.tags >= stable) & (self.tags < high)
        self.tags[gone] = EMPTY
        self.ages[gone] = 0
        self.high[0] = seq_len

    def mark_hits(self, ids: Array, limit: int, slots: Array) -> None:
        """Hits of one query token; slots of the others stay NO_SLOT for now."""
        for k, token in enumerate(ids.tolist()):
            slots[k] = NO_SLOT
            if not 0 <= token <= limit:
                self.stats["invalid"] += 1
                continue
            slot = self.find(token)
            if slot == NO_SLOT:
                continue
            where = divmod(slot, self.set_ways)
            slots[k] = slot
            if where in self.needed:
                self.stats["duplicates"] += 1
                continue
            self.stats["hits"] += 1
            self.needed.add(where)
            self.ages[where] = self.policy.age_after_hit(int(self.ages[where]))

    def take_way(self, ways: _Ways) -> tuple[int, int] | None:
        """Takes one of these ways that this step does not need: an empty one (:meth:`_Ways.emptiest`), else
        the policy's victim, behind which the hand of the first set then stands. Marks it as needed. Returns
        its set and number there, None if the step needs all of them."""
        unneeded = {way for way, place in enumerate(ways.places) if place not in self.needed}
        if not unneeded:
            return None
        empty = [way for way in sorted(unneeded) if self.tags[ways.places[way]] == EMPTY]
        if empty:
            way = ways.emptiest(empty)
        else:
            first = ways.places[0][0]
            way = self.policy.victim(ways, int(self.hands[first]), unneeded)
            self.hands[first] = (way + 1) % len(ways)
        self.needed.add(ways.places[way])
        return ways.places[way]

    def install(self, token: int) -> int:
        """Makes an id resident in a set of its own; NO_SLOT if the step needs all their ways."""
        place = self.take_way(self.ways_of(token))
        if place is None:
            return NO_SLOT
        self.tags[place] = token
        self.ages[place] = self.policy.new_age
        return place[0] * self.set_ways + place[1]

    def displace(self, token: int) -> int:
        """Takes a way of the first other set with a spare one, going round from the id's first set; with two
        sets per id, from its neighbour too. Leaves it untagged, so that the id is not resident after this
        step (I-4)."""
        home = self.placement.sets_of(token, self.sets)[0]
        for step in range(1, self.sets):
            sets = self.placement.sets_beside((home + step) % self.sets)
            place = self.take_way(_Ways(sets, self.set_ways, self.ages))
            if place is not None:
                self.tags[place] = EMPTY
                self.ages[place] = 0
                self.stats["displaced"] += 1
                return place[0] * self.set_ways + place[1]
        raise AssertionError("more ids than slots")

    def describe(self, ids: Array, stable: int, limit: int, slots: Array, kinds: Array) -> None:
        """Kinds of one query token's positions. ``slots``: of the hits only, because ids placed by this step,
        including their duplicates, are not in the pool until they are installed."""
        for k, token in enumerate(ids.tolist()):
            if token < 0:
                kinds[k] = Kind.NEGATIVE_STOP, token
            elif token > limit:
                kinds[k] = Kind.FUTURE_SKIP, token
            elif slots[k] != NO_SLOT:
                kinds[k] = Kind.POOL_HIT, slots[k]
            else:
                kinds[k] = Kind.OLD_MISS if token < stable else Kind.DECODE_WINDOW, token

    def placed(self, token: int, slot: int, position: int, stable: int, new_slots: Array) -> None:
        """Records the slot assigned to an id at its first position."""
        self.slot_of[token] = slot
        if token >= stable:
            new_slots[token - stable] = slot
            self.stats["new"] += 1
        else:
            self.misses.append((token, slot, position))
            self.stats["misses"] += 1

    def place(self, pending: list[tuple[int, int]], stable: int, slots: Array, new_slots: Array) -> None:
        """Places ids that were not resident when the step began. In two passes: the first fills the sets
        with their own ids; only then does the second place the remaining ids in other sets."""
        overflow = []
        for position, token in pending:
            if token in self.slot_of:
                self.stats["duplicates"] += 1
            elif (slot := self.install(token)) != NO_SLOT:
                self.placed(token, slot, position, stable, new_slots)
            else:
                overflow.append((position, token))
                continue
            slots[position] = self.slot_of[token]
        for position, token in overflow:
            if token in self.slot_of:
                self.stats["duplicates"] += 1
            else:
                self.placed(token, self.displace(token), position, stable, new_slots)
            slots[position] = self.slot_of[token]

    def run(self, topk: Array, seq_len: int, slots: Array, new_slots: Array, kinds: Array | None) -> None:
        query_len, width = topk.shape
        stable = seq_len - query_len
        new_slots[:] = NO_SLOT
        self.drop_unstable(stable, seq_len)
        for t in range(query_len):
            self.mark_hits(topk[t], stable + t, slots[t])
            if kinds is not None:
                self.describe(topk[t], stable, stable + t, slots[t], kinds[t])
        pending = [
            (t * width + k, int(topk[t, k]))
            for t in range(query_len)
            for k in range(width)
            if 0 <= topk[t, k] <= stable + t and slots[t, k] == NO_SLOT
        ]
        self.place(pending, stable, slots.reshape(-1), new_slots)
        for t in range(query_len):
            if new_slots[t] == NO_SLOT:
                new_slots[t] = self.install(stable + t)
                self.stats["new"] += int(new_slots[t] != NO_SLOT)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_plan(
    topk: Array, starts: Array, seq_lens: Array, rows: Array, residency: Residency, out: PlanOut
) -> None:
    expect(topk.shape[1] == out.slots.shape[1], "topk: width differs from out.slots'")
    expect(topk.shape[0] <= out.slots.shape[0], "topk: more tokens than out.slots")
    expect(len(seq_lens) <= len(out.miss_counts), "seq_lens: more requests than out.miss_counts")
    expect(len(starts) == len(seq_lens) + 1 and starts[0] == 0, "query_start_loc: expected N + 1, from 0")
    expect(bool(np.all(np.diff(starts.astype(np.int64)) >= 0)), "query_start_loc: must not decrease")
    expect(int(starts[-1]) <= topk.shape[0], "query_start_loc: exceeds topk's tokens")
    expect(len(rows) == len(seq_lens), "rows: must have N entries")
    seen: set[int] = set()
    for n, partition in enumerate(rows.tolist()):
        query_len = int(starts[n + 1]) - int(starts[n])
        if partition < 0 or query_len == 0:
            continue
        ids = query_len * topk.shape[1]
        expect(partition < residency.num_partitions, f"rows[{n}]: outside the residency")
        expect(partition not in seen, f"rows[{n}]: belongs to an earlier request too")
        seen.add(partition)
        expect(int(seq_lens[n]) >= query_len, f"seq_lens[{n}]: less than the query length")
        expect(ids <= residency.slots_per_partition, "topk: more ids than a partition has slots")
        expect(ids <= out.miss_ids.shape[1], "out.miss_ids: capacity less than the ids")


def dsa_plan(
    topk: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    rows: torch.Tensor,
    residency: Residency,
    out: PlanOut,
    workspace: object = None,
) -> None:
    """The plan. Per request with a partition, in this order:

    1. residents at or beyond ``stable = seq_len - query_len`` are dropped;
    2. every position is looked up: ids below 0 or beyond the query token's own position are invalid,
       residents are hits and their slots are needed by this step;
    3. the other ids, in order of position, get a slot each on first sight: first all that find a way in their
       own sets (:meth:`_PartitionPlan.install`), then the rest (:meth:`_PartitionPlan.displace`). Ids below
       ``stable`` are misses, listed in the order in which they were placed; the others are new tokens;
    4. new tokens outside every top-k are installed too, where their sets have a spare way.

    Requests without a partition or without tokens and tokens past the last request get slots of -1 and kinds
    of (INVALID, -1); the state of their partitions is untouched. ``workspace`` is accepted for the common
    signature only.
    """
    del workspace
    ids, starts = topk.numpy(), query_start_loc.numpy()
    _check_plan(ids, starts, seq_lens.numpy(), rows.numpy(), residency, out)
    slots, new_slots = out.slots.numpy(), out.new_slots.numpy()
    slots[: len(ids)] = NO_SLOT
    new_slots[: len(ids)] = NO_SLOT
    if out.compact:
        out.kinds[: len(ids)] = torch.tensor([Kind.INVALID, -1], dtype=torch.int32)
    totals = np.zeros(len(STATS), dtype=np.int64)
    for n, partition in enumerate(rows.tolist()):
        tokens = slice(int(starts[n]), int(starts[n + 1]))
        out.miss_counts[n] = 0
        if partition < 0 or tokens.start == tokens.stop:
            continue
        plan = _PartitionPlan(residency, partition)
        kinds = out.kinds.numpy()[tokens] if out.compact else None
        plan.run(ids[tokens], int(seq_lens[n]), slots[tokens], new_slots[tokens], kinds)
        for i, (token, slot, position) in enumerate(plan.misses):
            out.miss_ids[n, i] = token
            out.miss_slots[n, i] = slot
            if out.compact:
                out.miss_positions[n, i] = position
        out.miss_counts[n] = len(plan.misses)
        totals += np.array([plan.stats[name] for name in STATS])
    out.stats.numpy()[:] = totals
