"""When a layer's buffer may be written: the gates of a prefill engine whose layers share memory.

A gate belongs to a piece of memory, not to a layer: layers whose caches lie in the same place are behind the
same gate, whatever they are called. Its *occupant* is the layer whose KV it holds. Another layer may write
there only when the occupant's computation is over, its KV is saved, and every remote reader of the blocks
that are about to be overwritten has read them (I-9).

Every wait is bounded. A gate that is still closed at the deadline is reported, with what holds it; the caller
ends the requests concerned, and the engine goes on (I-10).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

COMPUTE = "compute"
SAVE = "save"


@dataclass(frozen=True)
class Storage:
    """Blocks of a cache in memory: address of the first, bytes from one to the next, bytes in all."""

    base: int
    stride: int
    length: int

    def overlaps(self, other: Storage) -> bool:
        """Whether any byte belongs to both."""
        return self.base < other.base + other.length and other.base < self.base + self.length


class ReadGuard(Protocol):
    """Who knows of remote reads. Any thread may call."""

    def unread(self, layer: int, requests: Collection[str]) -> list[str]:
        """Those of the requests whose KV of this layer (its number in the model) may still be read."""

    def give_up(self, requests: Collection[str], reason: str, retry: bool) -> None:
        """Nothing that is read of these requests counts from now on. retry: they will be computed again."""


@dataclass(frozen=True)
class Blocker:
    """What holds a gate. kind: "compute", "save" or "read"; position: the occupant; request: the reader's."""

    kind: str
    position: int
    request: str = ""

    def __str__(self) -> str:
        whose = f" of request {self.request}" if self.request else ""
        return f"{self.kind}{whose}, layer at position {self.position}"


@dataclass
class _Gate:
    occupant: int | None = None
    pending: set[str] = field(default_factory=set)


class SlotGates:
    """Gates of all buffers. Thread-safe; owns no memory and copies nothing.

    Args:
        storages: for each position (see `buffer_plan`), where its caches lie.
        indices: number in the model of each position, which a guard knows layers by.
    """

    def __init__(self, storages: Sequence[Sequence[Storage]], indices: Sequence[int]) -> None:
        self._indices = indices
        self._changed = threading.Condition()
        self._gates, self._gates_of = _group(storages)
        self._guard: ReadGuard | None = None

    def use_guard(self, guard: ReadGuard) -> None:
        """From now on gates stay closed while the guard knows of readers. Call `notify` after its news."""
        self._guard = guard

    def notify(self) -> None:
        """The guard has news."""
        with self._changed:
            self._changed.notify_all()

    def begin_step(self) -> None:
        """Everything of earlier steps but remote reads is over."""
        with self._changed:
            for gate in self._gates:
                gate.pending.clear()

    def blockers(self, position: int, requests: Collection[str]) -> list[Blocker]:
        """What keeps a layer from writing KV of these requests; empty when its gates are open."""
        found: list[Blocker] = []
        for gate in self._gates_of[position]:
            if gate.occupant is None or gate.occupant == position:
                continue
            found += [Blocker(kind, gate.occupant) for kind in sorted(gate.pending)]
            if self._guard is not None and requests:
                readers = self._guard.unread(self._indices[gate.occupant], requests)
                found += [Blocker("read", gate.occupant, request) for request in readers]
        return found

    def wait(self, position: int, requests: Collection[str], deadline_s: float) -> list[Blocker]:
        """Waits until a layer's gates are open; what held them at the deadline, empty if they opened."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while found := self.blockers(position, requests):
                left = end - time.monotonic()
                if left <= 0:
                    return found
                self._changed.wait(left)
        return []

    def occupy(self, position: int) -> None:
        """The layer's KV is written from now on, once a step; its computation is outstanding."""
        with self._changed:
            for gate in self._gates_of[position]:
                gate.occupant, gate.pending = position, {COMPUTE}

    def hold(self, position: int, what: str) -> None:
        """Something more must be over before another layer may write."""
        self._change(position, what, add=True)

    def release(self, position: int, what: str) -> None:
        """That is over. Nothing happens if the layer is not the occupant any more."""
        self._change(position, what, add=False)

    def _change(self, position: int, what: str, add: bool) -> None:
        with self._changed:
            for gate in self._gates_of[position]:
                if gate.occupant == position:
                    (gate.pending.add if add else gate.pending.discard)(what)
            self._changed.notify_all()


def _group(storages: Sequence[Sequence[Storage]]) -> tuple[list[_Gate], list[list[_Gate]]]:
    """One gate for all storages that overlap, directly or through others."""
    pieces = sorted({piece for mine in storages for piece in mine}, key=lambda piece: piece.base)
    gates: list[_Gate] = []
    gate_of: dict[Storage, _Gate] = {}
    end = -1
    for piece in pieces:
        if piece.base >= end:
            gates.append(_Gate())
        gate_of[piece] = gates[-1]
        end = max(end, piece.base + piece.length)
    return gates, [list({id(gate_of[s]): gate_of[s] for s in mine}.values()) for mine in storages]
