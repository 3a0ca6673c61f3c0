"""Reference replacement policies for evaluating the plan's: exact, in numpy, one request at a time.

All except :class:`SetFifo` are *step-granular*, like the plan: a step requests a set of ids at once, none of
which may be evicted until the step ends (attention reads them all). Ids at or beyond the stable prefix are
dropped when a step begins (I-2); new tokens' rows are inserted without being counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.trace.format import Ids
from vllm_kvoffload.trace.streams import StreamStep, TopkStream

Misses: TypeAlias = npt.NDArray[np.int64]
Slots: TypeAlias = npt.NDArray[np.intp]
FIRST = -np.inf  # key of an empty slot
NEVER = 1 << 40


class FullyAssociative:
    """Any id in any slot. Subclasses assign keys; the unneeded slots with the lowest keys are evicted.

    Args:
        slots: P, at least the number of distinct ids of any step.
        stream: the requests to come.
    """

    def __init__(self, slots: int, stream: TopkStream) -> None:
        self._id_of: Ids = np.full(slots, -1, np.int32)
        self._slot_of: Ids = np.full(stream.length + 1, -1, np.int32)
        self._keys = np.full(slots, FIRST)
        self._high = 0
        self._clock = 0

    def plan(self, index: int, step: StreamStep) -> int:
        """Plans step number ``index``; returns its number of misses."""
        self._drop_unstable(step)
        ids = np.concatenate((step.old, step.new))
        slots: Slots = self._slot_of[ids].astype(np.intp)
        resident = slots >= 0
        keys = self.keys_of(index, len(ids))
        self.on_hits(slots[resident], keys[resident])
        missing = ids[~resident]
        if len(missing):
            victims = self.victims(slots[resident], len(missing))
            evicted = self._id_of[victims]
            self._slot_of[evicted[evicted >= 0]] = -1
            self._id_of[victims] = missing
            self._slot_of[missing] = victims
            self.on_inserts(victims, keys[~resident])
        return int(len(step.old) - np.count_nonzero(resident[: len(step.old)]))

    def _drop_unstable(self, step: StreamStep) -> None:
        slots = self._slot_of[step.stable : self._high]
        slots = slots[slots >= 0]
        if len(slots):
            self._slot_of[self._id_of[slots]] = -1
            self._id_of[slots] = -1
            self._keys[slots] = FIRST
        self._high = step.seq_len

    def keys_of(self, index: int, count: int) -> npt.NDArray[np.float64]:
        """Keys of the step's ``count`` ids; by default the order of requests."""
        del index
        self._clock += count
        return np.arange(self._clock - count, self._clock, dtype=np.float64)

    def on_hits(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        """Called with the distinct slots that were hit."""

    def on_inserts(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        """Called with the distinct slots that received a new id."""
        self._keys[slots] = keys

    def victims(self, needed: Slots, count: int) -> Slots:
        """``count`` slots outside ``needed``, those with the lowest keys."""
        keys = self._keys.copy()
        keys[needed] = np.inf
        return np.argpartition(keys, count - 1)[:count]


class LRU(FullyAssociative):
    """Exact LRU; within a step, ids requested earlier are older."""

    def on_hits(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        self._keys[slots] = keys


class Fifo(FullyAssociative):
    """First in, first out: a hit only protects its slot during the step."""


class Random(FullyAssociative):
    """Evicts a random unneeded slot; uses empty slots first, like the other policies."""

    def __init__(self, slots: int, stream: TopkStream) -> None:
        super().__init__(slots, stream)
        self._rng = np.random.default_rng(0)

    def victims(self, needed: Slots, count: int) -> Slots:
        occupied = self._id_of >= 0
        self._keys[occupied] = self._rng.random(np.count_nonzero(occupied))
        return super().victims(needed, count)


class Belady(FullyAssociative):
    """Knows the future: evicts the unneeded slot whose next request (as an old id) is furthest away.

    Gives the minimum number of misses if all ids of a step must be in the pool together. This definition
    reproduces the published Belady figures.
    """

    def __init__(self, slots: int, stream: TopkStream) -> None:
        super().__init__(slots, stream)
        self._next_use = _next_uses(stream)

    def keys_of(self, index: int, count: int) -> npt.NDArray[np.float64]:
        del count
        return -self._next_use[index]

    def on_hits(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        self._keys[slots] = keys


def _next_uses(stream: TopkStream) -> list[npt.NDArray[np.float64]]:
    """For each step's old and new ids: the number of the next step that requests the id as an old one."""
    following = np.full(stream.length + 1, NEVER, np.float64)
    found = []
    for index in range(len(stream.steps) - 1, -1, -1):
        step = stream.steps[index]
        found.append(following[np.concatenate((step.old, step.new))])
        following[step.old] = index
    return found[::-1]


class Sieve(FullyAssociative):
    """SIEVE (Zhang et al., NSDI 2024): a queue, a bit per slot set by hits, a hand moving from old to new.

    The hand evicts the first unneeded slot without the bit and clears the bits it passes. It skips slots that
    the step needs, which keep their bits.
    """

    def __init__(self, slots: int, stream: TopkStream) -> None:
        super().__init__(slots, stream)
        self._visited = np.zeros(slots, np.bool_)
        self._queue: Slots = np.empty(0, np.intp)  # occupied slots, oldest first
        self._hand = 0

    def on_hits(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        del keys
        self._visited[slots] = True

    def on_inserts(self, slots: Slots, keys: npt.NDArray[np.float64]) -> None:
        del keys
        self._visited[slots] = False
        self._queue = np.concatenate((self._queue, slots))

    def _drop_unstable(self, step: StreamStep) -> None:
        super()._drop_unstable(step)
        self._remove(self._id_of[self._queue] < 0)

    def _remove(self, gone: npt.NDArray[np.bool_]) -> None:
        """Removes the marked queue positions; the hand keeps its place relative to the others."""
        if gone.any():
            self._hand -= int(np.count_nonzero(gone[: self._hand]))
            self._queue = self._queue[~gone]

    def victims(self, needed: Slots, count: int) -> Slots:
        empty = np.flatnonzero(self._id_of < 0)[:count]
        spared = np.zeros(len(self._id_of), np.bool_)
        spared[needed] = True
        taken = [empty]
        left = count - len(empty)
        while left:  # at most thrice: two rounds from the hand on, and the part before it
            passed = self._queue[self._hand :]
            passed = passed[~spared[passed]]
            free = np.flatnonzero(~self._visited[passed])[:left]
            taken.append(passed[free])
            spared[passed[free]] = True
            left -= len(free)
            stop = passed[free[-1]] if not left else None
            self._visited[passed if stop is None else passed[: free[-1]]] = False
            self._hand = 0 if stop is None else int(np.flatnonzero(self._queue == stop)[0]) + 1
        victims = np.concatenate(taken)
        evicted = np.zeros(len(self._id_of), np.bool_)
        evicted[victims] = True
        self._remove(evicted[self._queue])
        return victims


class PreviousStep:
    """Keeps only the ids of the previous step. Has no size."""

    def __init__(self, slots: int, stream: TopkStream) -> None:
        del slots
        self._chosen = np.zeros(stream.length + 1, np.bool_)
        self._before: Ids = np.empty(0, np.int32)

    def plan(self, index: int, step: StreamStep) -> int:
        del index
        hits = np.count_nonzero(self._chosen[step.old])
        self._chosen[self._before] = False
        self._before = np.concatenate((step.old, step.new))
        self._chosen[self._before] = True
        return int(len(step.old) - hits)


class SetFifo:
    """The set-associative FIFO of CANN's shared-indexer offload: 16 ways, a hand per set, nothing protected.

    A step's misses are appended to their sets after the step has been served from a separate buffer. A miss
    may therefore evict a hit of the step, and more misses than ways in a set overwrite each other. New tokens
    are not inserted: they are misses one step later.
    """

    WAYS = 16

    def __init__(self, slots: int, stream: TopkStream) -> None:
        del stream
        self._sets = slots // self.WAYS
        self._tags: Ids = np.full((self._sets, self.WAYS), -1, np.int32)
        self._hands = np.zeros(self._sets, np.int64)

    def plan(self, index: int, step: StreamStep) -> int:
        del index
        homes = step.old & (self._sets - 1)
        hits = (self._tags[homes] == step.old[:, None]).any(axis=1)
        missing = step.old[~hits]
        order = np.argsort(homes[~hits], kind="stable")
        missing, homes = missing[order], homes[~hits][order]
        counts = np.bincount(homes, minlength=self._sets)
        rank = np.arange(len(homes)) - (np.cumsum(counts) - counts)[homes]
        kept = rank >= counts[homes] - self.WAYS  # the others are overwritten within this step
        ways = (self._hands[homes] + rank) % self.WAYS
        self._tags[homes[kept], ways[kept]] = missing[kept]
        self._hands = (self._hands + counts) % self.WAYS
        return len(missing)


Reference: TypeAlias = type[FullyAssociative] | type[PreviousStep] | type[SetFifo]
REFERENCES: Mapping[str, Reference] = {
    "previous": PreviousStep,
    "lru": LRU,
    "fifo_full": Fifo,
    "random": Random,
    "sieve": Sieve,
    "belady": Belady,
    "fifo_cann": SetFifo,
}


def reference_misses(name: str, stream: TopkStream, slots: int) -> Misses:
    """Misses of each step, int64 [steps]. Raises KeyError for an unknown policy."""
    policy = REFERENCES[name](slots, stream)
    plan: Callable[[int, StreamStep], int] = policy.plan
    return np.array([plan(index, step) for index, step in enumerate(stream.steps)], np.int64)
