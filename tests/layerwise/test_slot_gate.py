"""Gates: memory is overwritten only when its contents are no longer needed (I-9); waits end (I-10)."""

from __future__ import annotations

import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_kvoffload.layerwise.slot_gate import COMPUTE, SAVE, SlotGates, Storage

A, B, C = Storage(0, 16, 160), Storage(160, 16, 160), Storage(1000, 8, 80)


class Guard:
    def __init__(self) -> None:
        self.open: set[tuple[int, str]] = set()

    def unread(self, layer, requests):
        return [request for request in requests if (layer, request) in self.open]

    def give_up(self, _requests, reason, _retry):
        raise AssertionError(reason)


def test_gates_belong_to_memory_and_not_to_layers():
    """Layers 0 and 2 share a main cache, 1 and 2 a key cache; 3 lies in the middle of layer 0's."""
    gates = SlotGates([[A], [C], [A, C], [Storage(80, 16, 32)]], [0, 1, 2, 3])
    gates.occupy(0)
    assert gates.blockers(0, []) == []
    assert gates.blockers(1, []) == []
    assert [str(blocker) for blocker in gates.blockers(2, [])] == ["compute, layer at position 0"]
    assert gates.blockers(3, []) != []
    gates.release(0, COMPUTE)
    gates.occupy(1)
    assert [blocker.position for blocker in gates.blockers(2, [])] == [1]
    assert gates.blockers(3, []) == []


def test_neighbours_are_not_the_same_memory():
    gates = SlotGates([[A], [B]], [0, 1])
    gates.occupy(0)
    assert gates.blockers(1, []) == []


def test_only_readers_of_the_requests_concerned_block():
    gates, guard = SlotGates([[A], [A]], [3, 7]), Guard()
    gates.use_guard(guard)
    gates.occupy(0)
    gates.release(0, COMPUTE)
    guard.open = {(3, "x"), (7, "y")}
    assert gates.blockers(1, ["y", "z"]) == []  # "y" reads layer 7, which is not there any more
    (blocker,) = gates.blockers(1, ["x", "y"])
    assert (blocker.kind, blocker.position, blocker.request) == ("read", 0, "x")


def test_a_wait_ends_with_the_news():
    gates = SlotGates([[A], [A]], [0, 1])
    gates.occupy(0)
    gates.hold(0, SAVE)
    timer = threading.Timer(0.05, lambda: (gates.release(0, SAVE), gates.release(0, COMPUTE)))
    timer.start()
    begin = time.monotonic()
    assert gates.wait(1, [], 10) == []
    assert time.monotonic() - begin < 5
    timer.join()


def test_a_wait_ends_with_the_deadline_and_says_why():
    gates = SlotGates([[A], [A]], [0, 1])
    gates.occupy(0)
    gates.hold(0, SAVE)
    begin = time.monotonic()
    assert [blocker.kind for blocker in gates.wait(1, [], 0.05)] == [COMPUTE, SAVE]
    assert time.monotonic() - begin < 5


def test_a_late_release_frees_nothing_of_the_next_occupant():
    gates = SlotGates([[A], [A]], [0, 1])
    gates.occupy(0)
    gates.hold(0, SAVE)
    gates.occupy(1)  # the deadline of the save was over
    gates.release(0, SAVE)
    gates.release(0, COMPUTE)
    assert [blocker.kind for blocker in gates.blockers(0, [])] == [COMPUTE]


LAYERS, REQUESTS = 5, ("x", "y")
STORAGES = [[A], [B, C], [A], [C], [B]]


class Gates(RuleBasedStateMachine):
    """Layers enter when their gates are open. A model knows what each piece of memory is needed for."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = Guard()
        self.gates = SlotGates(STORAGES, list(range(LAYERS)))
        self.gates.use_guard(self.guard)
        self.needs: dict[Storage, tuple[int, set[str]]] = {}

    def current(self, layer: int) -> bool:
        return all(self.needs.get(piece, (-1,))[0] == layer for piece in STORAGES[layer])

    @rule(layer=st.integers(0, LAYERS - 1))
    def enter(self, layer):
        busy = [
            (owner, needs, piece)
            for piece in STORAGES[layer]
            for owner, needs in [self.needs.get(piece, (layer, set()))]
            if owner != layer and (needs or any(o == owner for o, _ in self.guard.open))
        ]
        assert bool(self.gates.blockers(layer, REQUESTS)) == bool(busy)
        if not busy:
            self.gates.occupy(layer)
            for piece in STORAGES[layer]:
                self.needs[piece] = (layer, {COMPUTE})

    @rule(layer=st.integers(0, LAYERS - 1), what=st.sampled_from([COMPUTE, SAVE]))
    def release(self, layer, what):
        self.gates.release(layer, what)
        for piece in STORAGES[layer]:
            if self.needs.get(piece, (-1,))[0] == layer:
                self.needs[piece][1].discard(what)

    @rule(layer=st.integers(0, LAYERS - 1))
    def hold(self, layer):
        self.gates.hold(layer, SAVE)
        for piece in STORAGES[layer]:
            if self.needs.get(piece, (-1,))[0] == layer:
                self.needs[piece][1].add(SAVE)

    @rule(layer=st.integers(0, LAYERS - 1), request=st.sampled_from(REQUESTS))
    def publish(self, layer, request):
        if self.current(layer):
            self.guard.open.add((layer, request))

    @precondition(lambda self: self.guard.open)
    @rule(data=st.data())
    def read(self, data):
        self.guard.open.remove(data.draw(st.sampled_from(sorted(self.guard.open))))
        self.gates.notify()

    @invariant()
    def nothing_is_open_that_is_needed(self):
        for layer in range(LAYERS):
            if not self.gates.blockers(layer, REQUESTS):
                for piece in STORAGES[layer]:
                    owner, needs = self.needs.get(piece, (layer, set()))
                    assert owner == layer or not needs


TestGates = Gates.TestCase
TestGates.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


PIECES = st.builds(Storage, st.integers(0, 40), st.just(1), st.integers(1, 25))


@given(st.lists(st.lists(PIECES, min_size=1, max_size=2), min_size=2, max_size=6))
def test_layers_block_each_other_exactly_where_memory_overlaps_through_others(layers):
    pieces = [(layer, piece) for layer, mine in enumerate(layers) for piece in mine]
    component = list(range(len(pieces)))
    for _ in pieces:
        for m, (_, a) in enumerate(pieces):
            for n, (_, b) in enumerate(pieces):
                if a.overlaps(b):
                    component[m] = component[n] = min(component[m], component[n])
    shared = {(layer, component[m]) for m, (layer, _) in enumerate(pieces)}
    joined = [{other for other, c in shared if (layer, c) in shared} for layer in range(len(layers))]
    for first in range(len(layers)):
        gates = SlotGates(layers, range(len(layers)))
        gates.occupy(first)
        for other in range(len(layers)):
            blocked = bool(gates.blockers(other, []))
            assert blocked == (other != first and other in joined[first]), (first, other)
