"""The index of a pool: random programs, planted bugs that they must find, and what is evicted when."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.store.index_machine import IndexMachine
from vllm_kvoffload.store.base import WriteRefusal
from vllm_kvoffload.store.extents import FreeSpace
from vllm_kvoffload.store.index import SPARE_DEADLINES, Grant, ObjectIndex

FULL, EXISTS = WriteRefusal.FULL, WriteRefusal.EXISTS
PHASES = (Phase.generate,)  # no shrinking: it is slow and adds no information


def test_random_programs() -> None:
    run_state_machine_as_test(
        IndexMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


class FreesLapsedRoom(ObjectIndex):
    """The room of a late writer is used again at once."""

    def _lapse(self, opened):
        if not opened.lapsed:
            super()._lapse(opened)
            self._open.pop(next(handle for handle, other in self._open.items() if other is opened))
            self._free.give(opened.object.offset, opened.object.nbytes)


class EvictsPinned(ObjectIndex):
    """Leases don't hold."""

    def _evictable(self, spared):
        return (object_ for object_ in self._ready.values() if object_.key not in spared)


class PublishesLapsed(ObjectIndex):
    """A late writer publishes all the same."""

    def _lapse(self, opened):
        pass


class ReservesInPart(ObjectIndex):
    """A call that does not fit as a whole takes what there is."""

    def _make_room(self, count, size, spared):
        made = super()._make_room(count, size, spared)
        while made is None and count:
            count -= 1
            made = super()._make_room(count, size, spared)
        return made

    def open_write(self, client, keys, nbytes, now, lease_s):
        try:
            return super().open_write(client, keys, nbytes, now, lease_s)
        except ValueError:  # fewer offsets than keys
            return [FULL] * len(keys)


@pytest.mark.parametrize("broken", [FreesLapsedRoom, EvictsPinned, PublishesLapsed, ReservesInPart])
def test_planted_bugs_are_found(broken: type[ObjectIndex]) -> None:
    class Broken(IndexMachine):
        index_class = broken

    with pytest.raises(Exception):  # noqa: B017, PT011  # whichever check sees it first
        run_state_machine_as_test(
            Broken,
            settings=settings(max_examples=2000, stateful_step_count=40, deadline=None, database=None,
                              print_blob=False, phases=PHASES),
        )  # fmt: skip


def filled(count: int, capacity: int = 4) -> ObjectIndex:
    """Objects k0.. of one byte each, published in that order."""
    index = ObjectIndex(capacity, alignment=1)
    for i in range(count):
        put(index, f"k{i}")
    return index


def put(index: ObjectIndex, *keys: str, nbytes: int = 1) -> list[bool]:
    grants = index.open_write("w", keys, nbytes, 0.0, 60.0)
    handles = [grant.handle for grant in grants if isinstance(grant, Grant)]
    return index.finish_write("w", handles, [True] * len(handles), 0.0)


def there(index: ObjectIndex, *keys: str) -> list[str]:
    return [key for key in keys if index._ready.get(key)]


def test_least_recently_used_goes_first() -> None:
    index = filled(4)
    assert index.lookup(["k0"], 0.0) == 1
    put(index, "new")
    assert there(index, "k0", "k1", "k2", "k3", "new") == ["k0", "k2", "k3", "new"]
    assert index.snapshot().evicted == 1


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    index = ObjectIndex(4, alignment=1)
    put(index, "p0", "p1", "p2", "p3")
    put(index, "x")
    assert there(index, "p0", "p1", "p2", "p3", "x") == ["p0", "p1", "p2", "x"]
    assert index.lookup(["p0", "p1", "p2", "p3"], 0.0) == 3
    put(index, "y", "z")
    assert there(index, "p0", "p1", "p2", "x", "y", "z") == ["p0", "p1", "y", "z"]


def test_a_call_does_not_evict_what_it_asks_for() -> None:
    index = filled(4)
    assert index.open_write("w", ["k0", "k1", "k2", "k3", "new"], 1, 0.0, 1.0) == [EXISTS] * 4 + [FULL]
    assert there(index, "k0", "k1", "k2", "k3") == ["k0", "k1", "k2", "k3"]


def test_full_changes_nothing() -> None:
    index = filled(4)
    pinned = index.open_read("r", ["k0"], 0.0, 10.0)
    assert isinstance(pinned[0], Grant)
    assert index.open_write("w", ["a", "b", "c", "d"], 1, 0.0, 1.0) == [FULL] * 4
    assert there(index, "k0", "k1", "k2", "k3") == ["k0", "k1", "k2", "k3"]
    assert index.snapshot().refused_full == 4
    assert all(isinstance(x, Grant) for x in index.open_write("w", ["a", "b", "c"], 1, 0.0, 1.0))


def test_an_object_larger_than_the_pool_is_refused() -> None:
    assert ObjectIndex(4, alignment=1).open_write("w", ["a"], 5, 0.0, 1.0) == [FULL]


def test_only_one_writes_a_key() -> None:
    index = ObjectIndex(4, alignment=1)
    first, again = index.open_write("a", ["k", "k"], 1, 0.0, 1.0)
    assert isinstance(first, Grant)
    assert again is EXISTS
    assert index.open_write("b", ["k"], 1, 0.0, 1.0) == [EXISTS]
    assert index.open_read("b", ["k"], 0.0, 1.0) == [None]
    assert index.finish_write("b", [first.handle], [True], 0.0) == [False]
    assert index.finish_write("a", [first.handle], [True], 0.0) == [True]
    assert index.open_write("b", ["k"], 1, 0.0, 1.0) == [EXISTS]


def test_a_lapsed_key_can_be_written_by_another() -> None:
    index = ObjectIndex(4, alignment=1)
    (late,) = index.open_write("a", ["k"], 1, 0.0, 1.0)
    (grant,) = index.open_write("b", ["k"], 1, 2.0, 1.0)
    assert isinstance(grant, Grant)
    assert isinstance(late, Grant)
    assert grant.offset != late.offset
    assert index.snapshot().lapsed == 1
    assert index.finish_write("a", [late.handle], [True], 2.0) == [False]
    assert index.finish_write("b", [grant.handle], [True], 2.0) == [True]
    assert index.occupied() == [(grant.offset, 1)]


def test_leases_end() -> None:
    index = filled(4)
    index.open_read("r", ["k0", "k1", "k2", "k3"], 0.0, 5.0)
    assert index.open_write("w", ["new"], 1, 4.9, 1.0) == [FULL]
    assert isinstance(index.open_write("w", ["new"], 1, 5.0, 1.0)[0], Grant)


def test_sizes_are_aligned_and_merge_again() -> None:
    index = ObjectIndex(10_000, alignment=4096)
    (grant,) = index.open_write("w", ["k"], 1, 0.0, 1.0)
    assert isinstance(grant, Grant)
    assert grant.nbytes == 4096
    assert index.free_extents() == [(4096, 4096)]  # what is left beyond whole units is never used
    index.finish_write("w", [grant.handle], [False], 0.0)
    assert index.free_extents() == [(0, 8192)]


def test_free_space_refuses_what_is_free() -> None:
    free = FreeSpace(10)
    assert free.take(4) == 0
    for start, nbytes in ((4, 1), (3, 2), (9, 5), (2, 20)):
        with pytest.raises(ValueError, match="free already"):
            free.give(start, nbytes)
    free.give(0, 4)
    assert free.extents() == [(0, 10)]
    assert free.total == 10


def test_what_was_closed_leaves_nothing() -> None:
    """Closed openings don't keep an entry until the end of a long lease; open ones still expire."""
    index = ObjectIndex(1 << 20)
    (made,) = index.open_write("c", ["k"], 10, 0.0, 60.0)
    assert isinstance(made, Grant)
    index.finish_write("c", [made.handle], [True], 0.0)
    (kept,) = index.open_read("c", ["k"], 0.0, 300.0)
    assert kept is not None
    for _ in range(10_000):
        (grant,) = index.open_read("c", ["k"], 1.0, 300.0)
        assert grant is not None
        index.close_read("c", [grant.handle])
    assert len(index._deadlines) <= SPARE_DEADLINES + 3
    assert index.clients() == {"c"}
    index.expire(300.0)
    assert index.clients() == set()
