"""The embedded store, by its owner directly and by another client through the socket."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

import vllm_kvoffload.ops  # noqa: F401  # brings torch, which takes longer than the leases of these tests
from tests.store.store_client import OBJECT_BYTES, Caller, content
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store import (
    CopySpans,
    StoreError,
    StoreUnavailableError,
    WriteObject,
    WriteRefusal,
    local,
    make_store,
    remote,
    service,
)
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.store.remote import RemoteIndex
from vllm_kvoffload.transfer.base import Region

POOL_OBJECTS = 8
WRITE_LEASE_S = 1.0


@pytest.fixture
def instance() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def owner(instance: str) -> Iterator[LocalStore]:
    store = LocalStore(instance, POOL_OBJECTS * OBJECT_BYTES, write_lease_s=WRITE_LEASE_S)
    yield store
    store.close()


@pytest.fixture(params=["direct", "socket"])
def store(
    request: pytest.FixtureRequest, owner: LocalStore, instance: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalStore]:
    if request.param == "direct":
        yield owner
        return
    monkeypatch.setattr(local, "_services", {})
    made = LocalStore(instance, timeout_s=5.0)
    assert made.lookup(["x"]) == 0
    assert isinstance(made._index, RemoteIndex)
    yield made
    made.close()


@pytest.fixture
def caller(store: LocalStore) -> Caller:
    return Caller(store)


def test_what_was_written_is_read(caller: Caller) -> None:
    assert caller.store.lookup(["a", "b"]) == 0
    assert caller.put(["a", "b"]) == [True, True]
    assert caller.store.lookup(["a", "b", "c"]) == 2
    assert caller.store.lookup(["c", "a"]) == 0
    assert caller.get(["a", "c", "b"]) == [True, False, True]


def test_another_client_reads_it(caller: Caller, instance: str) -> None:
    caller.put(["a"])
    other = LocalStore(instance)
    assert Caller(other).get(["a"]) == [True]
    scheduler = LocalStore(instance, maps=False)
    assert scheduler.lookup(["a"]) == 1
    other.close()
    scheduler.close()


def test_nothing_is_readable_before_it_is_finished(caller: Caller) -> None:
    objects = caller.reserve(["a"])
    caller.fill(objects)
    assert caller.get(["a"]) == [False]
    assert caller.store.lookup(["a"]) == 0
    assert caller.store.open_write(["a"], OBJECT_BYTES) == [WriteRefusal.EXISTS]
    assert caller.store.finish_write(objects, [False]) == [False]
    assert caller.get(["a"]) == [False]
    assert caller.put(["a"]) == [True]


def test_a_second_writer_changes_nothing(caller: Caller) -> None:
    assert caller.put(["a"]) == [True]
    assert caller.put(["a"], version=1) == [WriteRefusal.EXISTS]
    assert caller.get(["a"]) == [True]


def test_a_full_store_evicts_or_refuses_all(caller: Caller) -> None:
    keys = [f"k{i}" for i in range(POOL_OBJECTS)]
    assert caller.put(keys) == [True] * POOL_OBJECTS
    pinned = caller.store.open_read(keys[:3], 10.0)
    assert caller.put([f"n{i}" for i in range(6)]) == [WriteRefusal.FULL] * 6
    assert caller.store.lookup(keys) == POOL_OBJECTS
    assert caller.put([f"n{i}" for i in range(5)]) == [True] * 5
    objects = [object_ for object_ in pinned if object_ is not None]
    assert len(objects) == 3
    caller.load(objects)
    caller.store.close_read(objects)
    assert caller.get(keys) == [True] * 3 + [False] * 5


def test_an_object_evicted_between_lookup_and_use_is_gone(caller: Caller) -> None:
    caller.put(["a", "b"])
    assert caller.store.lookup(["a", "b"]) == 2
    caller.put([f"n{i}" for i in range(POOL_OBJECTS - 1)])
    assert caller.get(["a", "b"]) == [True, False]


def test_a_write_that_is_not_finished_lapses(caller: Caller) -> None:
    objects = caller.reserve(["a", "b"])
    time.sleep(WRITE_LEASE_S + 0.05)
    with pytest.raises(StoreError, match="lease"):
        caller.fill(objects)
    assert caller.put(["a"]) == [True]
    assert caller.store.finish_write(objects, [True, True]) == [False, False]
    assert caller.get(["a", "b"]) == [True, False]
    assert caller.put([f"n{i}" for i in range(POOL_OBJECTS)]) == [True] * POOL_OBJECTS  # all room is back


def test_a_read_after_its_lease_is_refused(caller: Caller) -> None:
    caller.put(["a"])
    (object_,) = caller.store.open_read(["a"], 0.5)
    assert object_ is not None
    caller.load([object_])
    time.sleep(0.55)
    with pytest.raises(StoreError, match="lease"):
        caller.load([object_])
    caller.store.close_read([object_])
    caller.store.close_read([object_])


def test_a_lease_that_ends_during_the_copy(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    caller.put(["a"])
    (object_,) = caller.store.open_read(["a"], 0.5)
    assert object_ is not None
    real = local.copy_checked

    def slow(*arguments: object) -> None:
        real(*arguments)  # type: ignore[arg-type]
        time.sleep(0.55)

    monkeypatch.setattr(local, "copy_checked", slow)
    with pytest.raises(StoreError, match="during the copy"):
        caller.load([object_])


def test_the_first_of_several_leases_does_not_end_the_others(caller: Caller) -> None:
    caller.put(["a"])
    (short,) = caller.store.open_read(["a"], 0.05)
    (long,) = caller.store.open_read(["a"], 10.0)
    assert short is not None
    assert long is not None
    time.sleep(0.06)
    caller.load([long])
    caller.store.close_read([short])
    caller.load([long])
    caller.store.close_read([long])


@pytest.mark.parametrize("what", ["object", "local", "behind", "direction", "closed", "negative", "huge"])
def test_copies_out_of_bounds_are_refused(caller: Caller, what: str) -> None:
    caller.put(["a", "b"])
    opened = caller.store.open_read(["a", "b"], 10.0)
    objects = sorted((object_ for object_ in opened if object_ is not None), key=lambda o: o.address)
    assert objects[0].address + OBJECT_BYTES == objects[1].address  # neighbours: bounds are each object's own
    address, target, nbytes, direction = objects[0].address, caller.address, OBJECT_BYTES, "load"
    if what == "object":
        address = objects[1].address + OBJECT_BYTES
    elif what == "behind":
        address += 1
    elif what == "local":
        target = caller.address + caller.buffer.nbytes - 1
    elif what == "other direction":
        direction = "save"
    elif what == "closed":
        caller.store.close_read(objects)
    elif what == "negative":
        nbytes = -1
    else:
        nbytes = 2**63 - 1
    caller.buffer[:] = 7
    spans = CopySpans(*(np.array([value], dtype=np.int64) for value in (address, target, nbytes)))
    with pytest.raises(StoreError, match=f"^{direction}: "):
        caller.store.copy(spans, direction)  # type: ignore[arg-type]
    assert np.all(caller.buffer == 7)
    assert caller.get(["a", "b"]) == [True, True]


def test_spans_must_be_vectors_of_one_length() -> None:
    one, two = np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int64)
    for columns in ((one, one, two), (one, one, one.astype(np.int32)), (one, one, one.reshape(1, 1))):
        with pytest.raises(ValueError, match="three int64 vectors"):
            CopySpans(*columns)
    assert CopySpans(two, two, two + 3).total_bytes == 6


def test_no_spans_are_no_work(caller: Caller) -> None:
    empty = np.zeros(0, dtype=np.int64)
    caller.store.copy(CopySpans(empty, empty, empty), "load")


def test_regions_must_not_overlap(caller: Caller) -> None:
    with pytest.raises(StoreError, match="overlap"):
        caller.store.register([Region(caller.address + 1, 10)])
    with pytest.raises(StoreError, match="empty"):
        caller.store.register([Region(1 << 40, 0)])
    assert caller.put(["a"]) == [True]


def test_a_closed_store_says_so(caller: Caller) -> None:
    caller.store.close()
    caller.store.close()
    assert caller.store.lookup(["a"]) == 0
    for call in (
        lambda: caller.store.open_read(["a"], 1.0),
        lambda: caller.store.open_write(["a"], 1),
        lambda: caller.load([]),
    ):
        with pytest.raises(StoreUnavailableError, match="closed"):
            call()


def test_what_a_client_had_open_is_let_go_when_it_closes(owner: LocalStore, instance: str) -> None:
    keeper = Caller(owner)
    keeper.put([f"k{i}" for i in range(POOL_OBJECTS - 1)])
    other = LocalStore(instance)
    Caller(other).reserve(["w"])
    other.open_read([f"k{i}" for i in range(POOL_OBJECTS - 1)], 1000.0)
    assert keeper.put(["n"]) == [WriteRefusal.FULL]
    other.close()
    assert keeper.put([f"n{i}" for i in range(POOL_OBJECTS)]) == [True] * POOL_OBJECTS


def test_an_instance_has_one_owner(owner: LocalStore, instance: str) -> None:
    with pytest.raises(StoreError, match="two engines have the same engine id"):
        LocalStore(instance, OBJECT_BYTES)
    assert Caller(owner).put(["a"]) == [True]


def test_a_client_without_an_owner_fails_at_once_and_finds_one_later(instance: str) -> None:
    early = Caller(LocalStore(instance))
    started = time.monotonic()
    assert early.store.lookup(["a"]) == 0
    with pytest.raises(StoreUnavailableError, match="rank 0"):
        early.store.open_write(["a"], OBJECT_BYTES)
    assert time.monotonic() - started < 1.0
    owner = LocalStore(instance, POOL_OBJECTS * OBJECT_BYTES)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            assert early.put(["a"]) == [True]
            break
        except StoreUnavailableError:
            time.sleep(0.05)
    assert Caller(owner).get(["a"]) == [True]
    early.store.close()
    owner.close()


@pytest.mark.usefixtures("owner")
def test_a_client_without_memory_does_not_copy(instance: str) -> None:
    scheduler = LocalStore(instance, maps=False)
    caller = Caller(scheduler)
    with pytest.raises(StoreError, match="made without memory"):
        caller.fill(caller.reserve(["a"]))
    scheduler.close()


def test_many_threads_share_a_client(caller: Caller) -> None:
    """Writers and readers of a pool that is too small for all; every read object has its key's bytes."""
    failures: list[BaseException] = []
    seen = [0, 0]

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            mine = Caller(caller.store)
            for _ in range(60):
                keys = [f"k{i}" for i in rng.permutation(12)[:3]]
                published = mine.put(keys)
                seen[0] += published.count(True)
                seen[1] += mine.get(keys).count(True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert seen[0] > 20
    assert seen[1] > 100


def test_registry(instance: str) -> None:
    owner = make_store("local", local_bytes=10 << 20, role="owner", instance=instance)
    rank = make_store("local", local_bytes=0, role="rank", instance=instance)
    scheduler = make_store("local", local_bytes=0, role="scheduler", instance=instance)
    assert Caller(rank).put(["a"]) == [True]
    assert scheduler.lookup(["a"]) == 1
    objects = owner.open_write(["big", "two"], 6 << 20)
    assert objects[0] is WriteRefusal.FULL
    assert isinstance(owner.open_write(["big"], 6 << 20)[0], WriteObject)
    for store in (scheduler, rank, owner):
        store.close()


def test_unknown_backends_are_refused(instance: str) -> None:
    with pytest.raises(ConfigError, match="must be one of local, memcache"):
        make_store("locale", local_bytes=0, role="owner", instance=instance)


def test_the_bytes_of_tests_differ() -> None:
    assert not np.array_equal(content("a"), content("b"))
    assert not np.array_equal(content("a"), content("a", version=1))


class Listener:
    """In front of a server's listening socket: some calls of `accept` fail."""

    def __init__(self, plain: socket.socket, times: int) -> None:
        self.plain, self.left = plain, times

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.plain.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self.plain, name)


@pytest.mark.parametrize("times", [1, 50])
@pytest.mark.parametrize("what", ["accept", "thread"])
def test_clients_are_served_after_the_server_ran_out_of_something(
    owner: LocalStore, instance: str, monkeypatch: pytest.MonkeyPatch, times: int, what: str
) -> None:
    monkeypatch.setattr(service, "PAUSE_S", 0.001)
    monkeypatch.setattr(service, "MAX_PAUSE_S", 0.002)
    server, lines = owner._server, list[str]()
    assert server is not None
    logger = logging.getLogger(f"vllm.{service.__name__}")
    monkeypatch.setattr(logger, "log", lambda _, text, *values, **__: lines.append(text % values))
    start, left = threading.Thread.start, [times]

    def failing_start(self: threading.Thread) -> None:
        if self.name == "kvoffload-store-client" and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        start(self)

    if what == "accept":
        server._listener = Listener(server._listener, times)
    else:
        monkeypatch.setattr(threading.Thread, "start", failing_start)
    monkeypatch.setattr(local, "_services", {})
    monkeypatch.setattr(remote, "RETRY_S", 0.001)
    deadline = time.monotonic() + 30.0
    while True:
        client = LocalStore(instance, timeout_s=1.0)
        try:
            assert Caller(client).put([uuid.uuid4().hex]) == [True]
            if server.failures == times:
                break
        except StoreUnavailableError:
            pass
        finally:
            client.close()
        assert time.monotonic() < deadline
    assert server._thread.is_alive()
    assert len([line for line in lines if "could not be connected" in line]) == 1
