"""Index of a pool: objects, their readers and writers, and eviction. A pure state machine.

Time is an argument, in seconds of any monotonic clock. Not locked. An object is

- reserved from `open_write` on: it has room and an exclusive key, and can't be read;
- ready after `finish_write`: it can be read, and evicted (least recently used first) while it is not open;
- lapsed if its writer did not finish in time: the key is free, but the room is reused only when the writer
  has reported that its copies have drained, or is known to be dead. A writer that was merely stopped for a
  while may still be copying into it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvoffload.store.base import WriteRefusal
from vllm_kvoffload.store.extents import FreeSpace

ALIGNMENT = 4096
SPARE_DEADLINES = 1024
"""Maximum number of deadlines kept for closed objects, in addition to the number of open objects."""


@dataclass(frozen=True)
class Grant:
    """An opened object: its `offset` in the pool, the `deadline` of its lease, and its `handle`."""

    handle: int
    offset: int
    nbytes: int
    deadline: float


@dataclass(eq=False)
class _Object:
    key: str
    offset: int
    nbytes: int
    readers: int = 0


@dataclass
class _Open:
    client: str
    object: _Object
    deadline: float
    writing: bool
    lapsed: bool = False


@dataclass
class IndexStats:
    """Counters since the start, and current use of the pool (bytes)."""

    used_bytes: int = 0
    ready_objects: int = 0
    published: int = 0
    evicted: int = 0
    refused_full: int = 0
    lapsed: int = 0


class ObjectIndex:
    """Index of a pool of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, alignment: int = ALIGNMENT) -> None:
        self._alignment = alignment
        self._free = FreeSpace(capacity_bytes // alignment * alignment)
        self._ready: OrderedDict[str, _Object] = OrderedDict()  # least recently used first
        self._reserved: dict[str, _Object] = {}
        self._open: dict[int, _Open] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._last_handle = 0
        self.stats = IndexStats()

    # ------------------------------------------------------------------------------------------- reading

    def lookup(self, keys: Sequence[str], now: float) -> int:
        """Length of the leading run of ready keys. Marks each as used, the first key most recently."""
        self.expire(now)
        run = 0
        while run < len(keys) and keys[run] in self._ready:
            run += 1
        self._touch(keys[:run])
        return run

    def open_read(self, client: str, keys: Sequence[str], now: float, lease_s: float) -> list[Grant | None]:
        """Pins the ready ones among `keys` until `now + lease_s`."""
        self.expire(now)
        found = [self._ready.get(key) for key in keys]
        self._touch([object_.key for object_ in found if object_ is not None])
        return [
            None if object_ is None else self._grant(client, object_, now + lease_s, writing=False)
            for object_ in found
        ]

    def close_read(self, client: str, handles: Sequence[int]) -> None:
        """Unpins objects; ignores unknown handles and those of other clients."""
        for handle in handles:
            opened = self._open.get(handle)
            if opened is not None and opened.client == client and not opened.writing:
                del self._open[handle]
                opened.object.readers -= 1

    # ------------------------------------------------------------------------------------------- writing

    def open_write(
        self, client: str, keys: Sequence[str], nbytes: int, now: float, lease_s: float
    ) -> list[Grant | WriteRefusal]:
        """Reserves room for all keys that are neither ready nor reserved, or for none."""
        self.expire(now)
        new = [key for key in dict.fromkeys(keys) if key not in self._ready and key not in self._reserved]
        self._touch([key for key in keys if key in self._ready])
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        offsets = self._make_room(len(new), size, set(keys))
        if offsets is None:
            self.stats.refused_full += len(new)
            refused = set(new)
            return [WriteRefusal.FULL if key in refused else WriteRefusal.EXISTS for key in keys]
        grants: dict[str, Grant] = {}
        for key, offset in zip(new, offsets, strict=True):
            object_ = self._reserved[key] = _Object(key, offset, size)
            grants[key] = self._grant(client, object_, now + lease_s, writing=True)
        # A key that occurs twice in one call is written once.
        return [grants.pop(key, WriteRefusal.EXISTS) for key in keys]

    def finish_write(self, client: str, handles: Sequence[int], ok: Sequence[bool], now: float) -> list[bool]:
        """Publishes or discards objects; True where the object is now ready."""
        self.expire(now)
        published = [self._finish(client, handle, good) for handle, good in zip(handles, ok, strict=True)]
        self._touch([object_.key for object_ in published if object_ is not None])
        self.stats.published += sum(object_ is not None for object_ in published)
        return [object_ is not None for object_ in published]

    def _finish(self, client: str, handle: int, good: bool) -> _Object | None:
        opened = self._open.get(handle)
        if opened is None or opened.client != client or not opened.writing:
            return None
        del self._open[handle]
        object_ = opened.object
        if not opened.lapsed:
            del self._reserved[object_.key]
            if good:
                self._ready[object_.key] = object_
                return object_
        self._free.give(object_.offset, object_.nbytes)
        return None

    # ------------------------------------------------------------------------------------ clients and time

    def drop(self, client: str, *, drained: bool) -> None:
        """Closes everything that a client has open. drained: its copies are known to have drained.

        Otherwise its reservations lapse, and its reads stay pinned until their leases end.
        """
        for handle in [handle for handle, opened in self._open.items() if opened.client == client]:
            opened = self._open[handle]
            if not drained:
                if opened.writing:
                    self._lapse(opened)
            elif opened.writing:
                self._finish(client, handle, False)
            else:
                self.close_read(client, [handle])

    def clients(self) -> set[str]:
        """Clients with open or lapsed objects."""
        return {opened.client for opened in self._open.values()}

    def expire(self, now: float) -> None:
        """Ends expired leases; every other method does this first."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, handle = heapq.heappop(self._deadlines)
            opened = self._open.get(handle)
            if opened is None:
                continue
            if opened.writing:
                self._lapse(opened)
            else:
                self.close_read(opened.client, [handle])

    def _lapse(self, opened: _Open) -> None:
        if not opened.lapsed:
            opened.lapsed = True
            del self._reserved[opened.object.key]
            self.stats.lapsed += 1

    # ----------------------------------------------------------------------------------------------- room

    def _make_room(self, count: int, size: int, spared: set[str]) -> list[int] | None:
        """Allocates `count` objects, evicting as few as needed; None, with nothing changed, if impossible."""
        free = self._free.copy()
        victims: list[_Object] = []
        candidates = self._evictable(spared)
        offsets: list[int] = []
        while len(offsets) < count:
            offset = free.take(size)
            if offset is not None:
                offsets.append(offset)
                continue
            victim = next(candidates, None)
            if victim is None:
                return None
            victims.append(victim)
            free.give(victim.offset, victim.nbytes)
        for victim in victims:
            del self._ready[victim.key]
        self.stats.evicted += len(victims)
        self._free = free
        return offsets

    def _evictable(self, spared: set[str]) -> Iterator[_Object]:
        return (
            object_ for object_ in self._ready.values() if not object_.readers and object_.key not in spared
        )

    def _grant(self, client: str, object_: _Object, deadline: float, *, writing: bool) -> Grant:
        self._last_handle += 1
        handle = self._last_handle
        self._open[handle] = _Open(client, object_, deadline, writing)
        if not writing:
            object_.readers += 1
        heapq.heappush(self._deadlines, (deadline, handle))
        if len(self._deadlines) > 2 * len(self._open) + SPARE_DEADLINES:  # most belong to closed objects
            self._deadlines = [(opened.deadline, number) for number, opened in self._open.items()]
            heapq.heapify(self._deadlines)
        return Grant(handle, object_.offset, object_.nbytes, deadline)

    def _touch(self, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            self._ready.move_to_end(key)

    # ---------------------------------------------------------------------------------------- what is there

    def snapshot(self) -> IndexStats:
        """The counters, including current use."""
        objects = [*self._ready.values(), *self._reserved.values()]
        self.stats.used_bytes = sum(object_.nbytes for object_ in objects)
        self.stats.ready_objects = len(self._ready)
        return self.stats

    def occupied(self) -> list[tuple[int, int]]:
        """(offset, bytes) of all occupied room, in order; for checks."""
        lapsed = [opened.object for opened in self._open.values() if opened.lapsed]
        objects = [*self._ready.values(), *self._reserved.values(), *lapsed]
        return sorted((object_.offset, object_.nbytes) for object_ in objects)

    def free_extents(self) -> list[tuple[int, int]]:
        """(offset, bytes) of all free room, in order; for checks."""
        return self._free.extents()
