"""The index under random programs: clients read, write late, crash, and time passes, over real bytes."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_kvoffload.store.base import WriteRefusal
from vllm_kvoffload.store.index import Grant, ObjectIndex

CAPACITY = 8
CLIENTS = ("a", "b")
KEYS = tuple(f"k{i}" for i in range(5))

clients = st.sampled_from(CLIENTS)
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


class IndexMachine(RuleBasedStateMachine):
    """The bytes that a grant covers in a pool; each writer leaves its own mark.

    A writer may copy as long as it holds its grant, also after its lease: it may have been stopped meanwhile.
    """

    index_class: type[ObjectIndex] = ObjectIndex

    @initialize(capacity=st.sampled_from([CAPACITY, 4]))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.index = self.index_class(capacity, alignment=1)
        self.pool = [0] * capacity
        self.now = 0.0
        self.marks = 0
        self.writing: dict[int, tuple[str, Grant, str, int]] = {}
        self.reading: dict[int, tuple[str, Grant, list[int]]] = {}
        self.content: dict[str, int] = {}  # the mark that a published key must show

    def scribble(self, grant: Grant, mark: int) -> None:
        self.pool[grant.offset : grant.offset + grant.nbytes] = [mark] * grant.nbytes

    def bytes_of(self, grant: Grant) -> list[int]:
        return self.pool[grant.offset : grant.offset + grant.nbytes]

    @rule(
        client=clients,
        keys=key_lists,
        nbytes=st.integers(1, 3),
        lease=st.sampled_from([1.0, 5.0]),
        then=st.sampled_from(["nothing", "copy", "publish", "publish"]),
    )
    def open_write(self, client: str, keys: list[str], nbytes: int, lease: float, then: str) -> None:
        before = self.index.occupied()
        results = self.index.open_write(client, keys, nbytes, self.now, lease)
        full = [result is WriteRefusal.FULL for result in results]
        if any(full):
            assert not any(isinstance(result, Grant) for result in results)
            assert self.index.occupied() == before
        for key, grant in zip(keys, results, strict=True):
            if isinstance(grant, Grant):
                assert key not in [held[2] for held in self.writing.values() if held[1].deadline > self.now]
                self.marks += 1
                self.writing[grant.handle] = (client, grant, key, self.marks)
                if then != "nothing":
                    self.scribble(grant, self.marks)
                if then == "publish":
                    del self.writing[grant.handle]
                    assert self.index.finish_write(client, [grant.handle], [True], self.now) == [True]
                    self.content[key] = self.marks

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def copy_in(self, data: st.DataObject) -> None:
        _, grant, _, mark = self.writing[data.draw(st.sampled_from(sorted(self.writing)))]
        self.scribble(grant, mark)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans())
    def finish_write(self, data: st.DataObject, ok: bool) -> None:
        client, grant, key, mark = self.writing.pop(data.draw(st.sampled_from(sorted(self.writing))))
        self.scribble(grant, mark)
        (published,) = self.index.finish_write(client, [grant.handle], [ok], self.now)
        assert published == (ok and self.now < grant.deadline)
        if published:
            self.content[key] = mark
        assert self.index.finish_write(client, [grant.handle], [True], self.now) == [False]

    @rule(client=clients, keys=key_lists, lease=st.sampled_from([1.0, 5.0]))
    def open_read(self, client: str, keys: list[str], lease: float) -> None:
        for key, grant in zip(keys, self.index.open_read(client, keys, self.now, lease), strict=True):
            if grant is not None:
                found = self.bytes_of(grant)
                assert found == [self.content[key]] * grant.nbytes
                self.reading[grant.handle] = (client, grant, found)

    @rule(keys=key_lists)
    def lookup(self, keys: list[str]) -> None:
        run = self.index.lookup(keys, self.now)
        assert 0 <= run <= len(keys)
        assert all(key in self.content for key in keys[:run])

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def close_read(self, data: st.DataObject) -> None:
        client, grant, _ = self.reading.pop(data.draw(st.sampled_from(sorted(self.reading))))
        self.index.close_read(client, [grant.handle])

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(client=clients, drained=st.booleans())
    def lose(self, client: str, drained: bool) -> None:
        """drained: its process is dead. Else it goes on copying into what it held, and reading it."""
        self.index.drop(client, drained=drained)
        if drained:
            self.writing = {h: held for h, held in self.writing.items() if held[0] != client}
            self.reading = {h: held for h, held in self.reading.items() if held[0] != client}
        else:
            for handle, (owner, grant, key, mark) in self.writing.items():
                if owner == client:
                    ended = Grant(grant.handle, grant.offset, grant.nbytes, self.now)
                    self.writing[handle] = (owner, ended, key, mark)

    @invariant()
    def pinned_bytes_stay(self) -> None:
        for _, grant, found in self.reading.values():
            if self.now < grant.deadline:
                assert self.bytes_of(grant) == found

    @invariant()
    def room_is_counted_once(self) -> None:
        pieces = sorted([*self.index.occupied(), *self.index.free_extents()])
        at = 0
        for start, nbytes in pieces:
            assert (start, nbytes > 0) == (at, True)
            at += nbytes
        assert at == self.capacity

    def teardown(self) -> None:
        """Nothing leaks: once all clients are gone, everything can be evicted."""
        if not hasattr(self, "index"):
            return
        for client in CLIENTS:
            self.index.drop(client, drained=True)
        results = self.index.open_write("last", ["all"], self.capacity, self.now, 1.0)
        assert isinstance(results[0], Grant)
