"""The embedded store between processes: killed, stopped and restarted at every moment that matters."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_kvoffload.ops  # noqa: F401  # brings torch, which may take longer than a lease
from tests.store.peer import Peer
from tests.store.store_client import OBJECT_BYTES, Caller
from vllm_kvoffload.store import StoreUnavailableError, WriteRefusal
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.store.wire import socket_address

POOL_OBJECTS = 8
KEYS = [f"k{i}" for i in range(POOL_OBJECTS)]


@pytest.fixture
def instance() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def owner(instance: str) -> Iterator[Caller]:
    store = LocalStore(instance, POOL_OBJECTS * OBJECT_BYTES, write_lease_s=1000.0)
    yield Caller(store)
    store.close()


def ready(instance: str, role: str = "rank") -> Peer:
    peer = Peer(instance, role)
    assert peer.answer() == "ready"
    return peer


def put_all(caller: Caller) -> None:
    """Every room of the pool can be had: nothing is pinned or reserved."""
    deadline = time.monotonic() + 5.0
    while (results := caller.put([f"{uuid.uuid4().hex}-{i}" for i in range(POOL_OBJECTS)])) != [
        True
    ] * POOL_OBJECTS:
        assert results == [WriteRefusal.FULL] * POOL_OBJECTS
        assert time.monotonic() < deadline, "room was never given back"
        time.sleep(0.02)


def test_ranks_exchange_objects(owner: Caller, instance: str) -> None:
    with ready(instance) as rank:
        assert rank.ask("warm_up") == "warm"  # or the first copy takes longer than its lease
        assert rank.ask("put", ["a", "b"]) == [True, True]
        assert owner.get(["a", "b"]) == [True, True]
        owner.put(["c"])
        assert rank.ask("get", ["a", "c", "d"]) == [True, True, False]


def test_a_writer_killed_before_it_finished_leaves_no_reservation(owner: Caller, instance: str) -> None:
    with ready(instance) as rank:
        assert rank.ask("reserve", KEYS) == POOL_OBJECTS
        assert owner.put(["x"]) == [WriteRefusal.FULL]
        rank.kill()
        put_all(owner)
        assert owner.store.lookup(KEYS) == 0


def test_a_killed_reader_pins_nothing(owner: Caller, instance: str) -> None:
    owner.put(KEYS)
    with ready(instance) as rank:
        assert rank.ask("hold", KEYS) == [True] * POOL_OBJECTS
        assert owner.put(["x"]) == [WriteRefusal.FULL]
        rank.kill()
        put_all(owner)


def test_a_writer_stopped_beyond_its_lease_harms_nobody(instance: str) -> None:
    """Its late copy writes to room that no other object uses, and is not published."""
    store = LocalStore(instance, POOL_OBJECTS * OBJECT_BYTES, write_lease_s=1.0)
    owner = Caller(store)
    with ready(instance) as rank:
        assert rank.ask("warm_up") == "warm"
        assert rank.ask("reserve", ["a", "b"]) == 2
        assert rank.ask("fill") == "filled"
        rank.signal(signal.SIGSTOP)
        time.sleep(1.05)
        keys = [f"n{i}" for i in range(POOL_OBJECTS - 2)]
        assert owner.put(keys) == [True] * len(keys)
        assert owner.put([*keys, "one too many"])[-1] is WriteRefusal.FULL
        rank.signal(signal.SIGCONT)
        assert rank.ask("fill")[:2] == ["error", "StoreError"]
        assert rank.ask("finish") == [False, False]
        assert owner.get([*keys, "a", "b"]) == [True] * len(keys) + [False, False]
        put_all(owner)
    store.close()


def test_a_killed_owner_leaves_nothing_and_a_new_one_is_found(instance: str) -> None:
    before = set(os.listdir("/dev/shm"))
    rank = Caller(LocalStore(instance, timeout_s=1.0))
    with ready(instance, "owner") as first:
        assert rank.put(["a"]) == [True]
        (held,) = rank.store.open_read(["a"], 1000.0)
        assert held is not None
        first.kill()
        started = time.monotonic()
        assert rank.store.lookup(["a"]) == 0
        with pytest.raises(StoreUnavailableError, match="rank 0"):
            rank.put(["b"])
        assert time.monotonic() - started < 1.0
    assert {name for name in os.listdir("/dev/shm") if name.startswith("kvoffload")} <= before
    assert socket_address(instance)[1:] not in Path("/proc/net/unix").read_text()
    with ready(instance, "owner"):
        deadline = time.monotonic() + 5.0
        while rank.store.lookup(["a"]) == 0 and time.monotonic() < deadline:
            try:
                rank.put(["a"])
            except StoreUnavailableError:
                time.sleep(0.05)
        assert rank.get(["a"]) == [True]
        # Objects open then belong to the lost pool and are never confused with the new one.
        with pytest.raises(Exception, match="not open or registered"):
            rank.load([held])
    rank.store.close()


def test_a_stopped_owner_is_an_error_within_the_deadline(instance: str) -> None:
    rank = Caller(LocalStore(instance, timeout_s=0.5))
    with ready(instance, "owner") as owner:
        assert rank.put(["a"]) == [True]
        owner.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"deadline|timed out"):
            rank.store.open_read(["a"], 1.0)
        assert rank.store.lookup(["a"]) == 0
        assert time.monotonic() - started < 2.0
        owner.signal(signal.SIGCONT)
        deadline = time.monotonic() + 5.0
        while rank.store.lookup(["a"]) == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert rank.get(["a"]) == [True]
    rank.store.close()
