"""Gates that decide when a layer's buffer may be overwritten, on a prefill engine whose layers share memory.

A gate belongs to a piece of memory rather than a layer: layers whose caches overlap share a gate. Its
*occupant* is the layer whose KV the memory holds. Another layer may write there only when the occupant's
computation has ended, its KV is saved, and every remote reader of the blocks to be overwritten has read them
(I-9). Every wait is bounded. A gate still closed at the deadline is reported together with its blockers; the
caller fails the requests concerned, and the engine continues (I-10).
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
        """Whether the two have any byte in common."""
        return self.base < other.base + other.length and other.base < self.base + self.length


class ReadGuard(Protocol):
    """Tracks remote reads. Thread-safe."""

    def unread(self, layer: int, requests: Collection[str]) -> list[str]:
        """Returns the requests whose KV of this layer (its number in the model) may still be read."""

    def give_up(self, requests: Collection[str], reason: str, retry: bool) -> None:
        """Marks the KV read of these requests as invalid. retry: they will be computed again."""


@dataclass(frozen=True)
class Blocker:
    """Reason why a gate is closed. kind: "compute", "save" or "read"; position: the occupant's; request: the
    one being read."""

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
        storages: for each position (see `buffer_plan`), the memory of its caches.
        indices: for each position, the layer's number in the model, as passed to the guard.
    """

    def __init__(self, storages: Sequence[Sequence[Storage]], indices: Sequence[int]) -> None:
        self._indices = indices
        self._changed = threading.Condition()
        self._gates, self._gates_of = _group(storages)
        self._guard: ReadGuard | None = None

    def use_guard(self, guard: ReadGuard) -> None:
        """Keeps gates closed while the guard reports readers. Call `notify` when the guard changes."""
        self._guard = guard

    def notify(self) -> None:
        """Wakes waiters after a change of the guard."""
        with self._changed:
            self._changed.notify_all()

    def begin_step(self) -> None:
        """Clears all blockers of earlier steps except remote reads."""
        with self._changed:
            for gate in self._gates:
                gate.pending.clear()

    def blockers(self, position: int, requests: Collection[str]) -> list[Blocker]:
        """Reasons why a layer may not write KV of these requests; empty if its gates are open."""
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
        """Waits until a layer's gates open. Returns the blockers at the deadline, empty if they opened."""
        end = time.monotonic() + deadline_s
        with self._changed:
            while found := self.blockers(position, requests):
                left = end - time.monotonic()
                if left <= 0:
                    return found
                self._changed.wait(left)
        return []

    def occupy(self, position: int) -> None:
        """Makes a layer the occupant, once a step, with its computation pending."""
        with self._changed:
            for gate in self._gates_of[position]:
                gate.occupant, gate.pending = position, {COMPUTE}

    def hold(self, position: int, what: str) -> None:
        """Adds a blocker that must be released before another layer may write."""
        self._change(position, what, add=True)

    def release(self, position: int, what: str) -> None:
        """Removes a blocker. Does nothing if the layer is no longer the occupant."""
        self._change(position, what, add=False)

    def _change(self, position: int, what: str, add: bool) -> None:
        with self._changed:
            for gate in self._gates_of[position]:
                if gate.occupant == position:
                    (gate.pending.add if add else gate.pending.discard)(what)
            self._changed.notify_all()


def _group(storages: Sequence[Sequence[Storage]]) -> tuple[list[_Gate], list[list[_Gate]]]:
    """Makes one gate for each set of storages that overlap, directly or through others."""
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
