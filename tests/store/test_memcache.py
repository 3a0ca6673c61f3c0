"""Real MemCache without an NPU: a MetaService, and clients in processes of their own.

Real control plane, stand-in copy: see tests/hostsim. Clients have a process each, as the library can be
started once in a process, and so that they can be killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hostsim
from tests.hostsim.cluster import MetaCluster
from tests.store.peer import Peer, wait_until_stopped
from vllm_kvoffload.store.memcache import BEING_WRITTEN

MISSING = hostsim.missing()
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"real MemCache: {MISSING}"),
    pytest.mark.slow,
    pytest.mark.timeout(600),  # another process of the tests may have the machine's one cluster
]

START_S = 150.0
"""MemCache's own connect has been seen to take 59 s after several clients had been killed."""
POOL_OBJECTS = 32
"""Room in one client's memory (8 MB of 256 KB objects)."""


def ready(cluster: MetaCluster, role: str = "rank", **options: Any) -> Peer:
    """A client that has started."""
    environ = cluster.environ | {f"PEER_{name.upper()}": str(value) for name, value in options.items()}
    peer = Peer("memcache", role, environ=environ)
    answer = peer.answer(START_S)
    assert answer == "ready", answer
    return peer


def handshake(peer: Peer, probe: str) -> Any:
    """The store's answer, once it has one: a connection that ended, as others were killed, comes back."""
    deadline = time.monotonic() + 30.0
    while (answer := peer.ask("handshake", probe))[:2] == ["error", "StoreUnavailableError"]:
        assert time.monotonic() < deadline, answer
        time.sleep(0.2)
    return answer


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MetaCluster]:
    with MetaCluster(tmp_path_factory.mktemp("meta")) as made:
        yield made


@pytest.fixture(scope="module")
def shared(cluster: MetaCluster) -> Iterator[tuple[Peer, Peer, Peer]]:
    """Two ranks and a scheduler, for tests that leave them as they were."""
    with ready(cluster) as first, ready(cluster) as second, ready(cluster, "scheduler") as scheduler:
        yield first, second, scheduler


@pytest.fixture
def own(tmp_path: Path) -> Iterator[MetaCluster]:
    """A MetaService that the test may kill."""
    with MetaCluster(tmp_path) as made:
        yield made


# -- with a MetaService of their own: first, as there can be one at a time ----------------------------------


def test_the_service_is_killed_and_comes_back(own: MetaCluster) -> None:
    with ready(own) as rank, ready(own, "scheduler") as scheduler:
        assert rank.ask("put", ["a", "b"]) == [True, True]
        assert rank.ask("hold", ["a"]) == [True]
        own.kill()
        time.sleep(0.2)
        for _ in range(3):
            started = time.monotonic()
            assert scheduler.ask("lookup", ["a"]) == 0
            assert rank.ask("put", ["c"])[:2] == ["error", "StoreUnavailableError"]
            assert rank.ask("load")[1] == "StoreUnavailableError"
            assert time.monotonic() - started < 1.0
        own.wait_until_free()
        own.start()
        deadline = time.monotonic() + 30.0
        while rank.ask("put", [f"d{time.monotonic()}"]) != [True]:
            assert time.monotonic() < deadline, "the store did not come back"
            time.sleep(0.2)
        # Leases of before are void: what is open then can't be read any more, even if it is still there.
        assert rank.ask("load")[:2] == ["error", "StoreError"]
        assert isinstance(rank.ask("get", ["a", "b"])[0], bool)
        assert rank.ask("put", ["e"]) == [True]
        while scheduler.ask("lookup", ["e"]) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_the_service_is_stopped_and_goes_on(own: MetaCluster) -> None:
    with ready(own, timeout_s=0.5) as rank:
        assert rank.ask("put", ["a"]) == [True]
        own.signal(signal.SIGSTOP)
        wait_until_stopped(own.pid)
        started = time.monotonic()
        assert rank.ask("put", ["b"])[:2] == ["error", "StoreUnavailableError"]
        assert rank.ask("lookup", ["a"]) == 0
        assert time.monotonic() - started < 2.0
        own.signal(signal.SIGCONT)
        deadline = time.monotonic() + 30.0
        while rank.ask("lookup", ["a"]) == 0:
            assert time.monotonic() < deadline, "the store did not come back"
            time.sleep(0.2)
        assert rank.ask("get", ["a"]) == [True]


def test_nothing_is_left_in_shared_memory(own: MetaCluster) -> None:
    before = set(os.listdir("/dev/shm"))
    with ready(own) as rank:
        assert rank.ask("put", ["a"]) == [True]
        rank.ask("close")
    deadline = time.monotonic() + 10.0
    while left := {name for name in set(os.listdir("/dev/shm")) - before if "memfabric" in name}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert left == set()


def test_objects_cross_a_network(tmp_path: Path) -> None:
    """Over host_tcp, where MemFabric itself moves the bytes between the processes."""
    with (
        MetaCluster(tmp_path, protocol="host_tcp") as cluster,
        ready(cluster) as first,
        ready(cluster) as second,
    ):
        keys = [f"t{i}" for i in range(8)]
        assert first.ask("put", keys[:4]) == [True] * 4
        assert second.ask("put", keys[4:]) == [True] * 4
        assert first.ask("get", keys) == [True] * 8
        assert second.ask("get", keys) == [True] * 8


def test_a_service_that_is_down_at_the_start(tmp_path: Path) -> None:
    cluster = MetaCluster(tmp_path)
    started = time.monotonic()
    with Peer("memcache", "rank", environ=cluster.environ) as peer:
        kind, name, text = peer.answer()
        assert (kind, name) == ("error", "StoreUnavailableError")
        assert "kvoffload meta" in text
    assert time.monotonic() - started < 20.0


# -- with one MetaService for all ---------------------------------------------------------------------------


def test_a_write_that_is_not_finished_lapses(cluster: MetaCluster) -> None:
    """Before a client of this service is killed: after that, MemCache may take a minute to connect."""
    with ready(cluster, write_lease_s=0.3) as writer:
        assert writer.ask("reserve", ["l0"]) == 1
        time.sleep(0.4)
        assert "lease" in writer.ask("fill")[2]
        assert writer.ask("finish") == [False]
        assert writer.ask("get", ["l0"]) == [False]


def test_ranks_exchange_objects(shared: tuple[Peer, Peer, Peer]) -> None:
    first, second, scheduler = shared
    assert scheduler.ask("lookup", ["e0", "e1"]) == 0
    assert first.ask("put", ["e0", "e1"]) == [True, True]
    assert second.ask("put", ["e2", "e0"]) == [True, "exists"]
    assert scheduler.ask("lookup", ["e0", "e1", "e2", "e3"]) == 3
    assert second.ask("get", ["e0", "e3", "e1", "e2"]) == [True, False, True, True]
    assert first.ask("get", ["e2"]) == [True]


def test_nothing_is_readable_before_it_is_finished(shared: tuple[Peer, Peer, Peer]) -> None:
    first, second, scheduler = shared
    assert first.ask("reserve", ["f0"]) == 1
    assert first.ask("fill") == "filled"
    assert scheduler.ask("lookup", ["f0"]) == 0
    assert second.ask("get", ["f0"]) == [False]
    assert first.ask("finish") == [True]
    assert second.ask("get", ["f0"]) == [True]


def test_only_one_writes_a_key(shared: tuple[Peer, Peer, Peer]) -> None:
    """MemCache itself would give both the same address."""
    first, second, _ = shared
    assert first.ask("reserve", ["w0"]) == 1
    (theirs,) = second.ask("raw", "batch_alloc", ["w0"], [1 << 18])
    assert theirs == first.ask("addresses")[0]
    assert second.ask("put", ["w0"]) == ["exists"]
    assert first.ask("fill") == "filled"
    assert first.ask("finish") == [True]
    assert second.ask("put", ["w0"]) == ["exists"]
    assert first.ask("get", ["w0"]) == [True]


def test_an_object_that_somebody_else_has_yet_to_fill_is_withdrawn(shared: tuple[Peer, Peer, Peer]) -> None:
    """Its key was given up, and reserved anew, while the first writer was at it."""
    first, second, _ = shared
    assert first.ask("reserve", ["s0"]) == 1
    assert first.ask("fill") == "filled"
    assert second.ask("raw", "remove_batch", ["s0"]) == [0]
    assert second.ask("reserve", ["s0"]) == 1
    assert first.ask("finish") == [False]
    assert second.ask("get", ["s0"]) == [False]


def test_a_failed_write_is_never_readable(shared: tuple[Peer, Peer, Peer]) -> None:
    first, second, _ = shared
    assert first.ask("reserve", ["b0"]) == 1
    assert first.ask("fill") == "filled"
    assert first.ask("discard") == [False]
    assert second.ask("get", ["b0"]) == [False]


def test_copies_out_of_bounds_are_refused(shared: tuple[Peer, Peer, Peer]) -> None:
    first, _, _ = shared
    assert first.ask("put", ["c0"]) == [True]
    assert first.ask("hold", ["c0"]) == [True]
    assert first.ask("load") == "loaded"
    beyond = first.ask("load_beyond")
    assert beyond[1] == "StoreError"
    assert "not open or registered" in beyond[2]
    assert first.ask("release") == "released"
    assert first.ask("load")[1] == "StoreError"


def test_memory_of_a_device(shared: tuple[Peer, Peer, Peer]) -> None:
    """Local memory in MemFabric's address range of device memory goes by the directions for NPUs."""
    first, second, _ = shared
    assert first.ask("device_put", ["n0"]) == [True]
    assert second.ask("get", ["n0"]) == [True]
    assert second.ask("device_get", ["n0"]) == [True]


def test_a_scheduler_does_not_copy(shared: tuple[Peer, Peer, Peer]) -> None:
    assert "made without memory" in shared[2].ask("load")[2]


def test_a_worker_and_a_scheduler_in_one_process(shared: tuple[Peer, Peer, Peer]) -> None:
    """The library has one client per process, which the first to close must not take along."""
    first, second, _ = shared
    assert second.ask("put", ["p0"]) == [True]
    assert first.ask("second_client", ["p0", "p1"]) == 1
    assert first.ask("get", ["p0"]) == [True]


def test_bad_keys_are_errors(shared: tuple[Peer, Peer, Peer]) -> None:
    assert shared[0].ask("put", ["k" * 257])[1] == "StoreError"
    assert shared[0].ask("put", ["k" * 256]) == [True]


def test_eviction_between_lookup_and_use(shared: tuple[Peer, Peer, Peer]) -> None:
    """Leased objects survive a pool that turns over; what is there of the others is right."""
    first, second, scheduler = shared
    keys = [f"v{i}" for i in range(8)]
    assert first.ask("put", keys) == [True] * 8
    assert scheduler.ask("lookup", keys) == 8
    assert second.ask("hold", keys[:2]) == [True, True]
    written = 0
    for i in range(40):
        written += first.ask("put", [f"x{i}-{j}" for j in range(4)]).count(True)
    assert written > 2 * POOL_OBJECTS  # both clients' memory, filled anew
    assert second.ask("load") == "loaded"
    assert first.ask("get", keys) == [True, True] + [False] * 6
    assert second.ask("release") == "released"


def test_a_batch_larger_than_the_store(shared: tuple[Peer, Peer, Peer]) -> None:
    first, second, _ = shared
    results = first.ask("put_many", "huge", 5 * POOL_OBJECTS)
    assert results["refused"] > 0
    assert results["published"] + results["refused"] == 5 * POOL_OBJECTS
    assert second.ask("get", ["huge0"]) in ([True], [False])
    deadline = time.monotonic() + 20.0
    while second.ask("put", [f"after{time.monotonic()}"]) != [True]:
        assert time.monotonic() < deadline, "the store stays full"
        time.sleep(0.2)


def test_a_writer_killed_before_it_finished_leaves_no_reservation(cluster: MetaCluster) -> None:
    """Neither in its own memory, which goes with it, nor in another's, where MemCache would keep it."""
    keys = [f"r{i}" for i in range(6)]
    limits = {"write_lease_s": 0.5, "margin_s": 0.5}
    with ready(cluster, **limits) as writer, ready(cluster, **limits) as other:
        assert writer.ask("reserve", keys) == len(keys)
        assert other.ask("put", keys) == ["exists"] * len(keys)
        writer.kill()
        time.sleep(0.3)
        codes = other.ask("raw", "batch_add_lease", keys, 1000)
        assert BEING_WRITTEN in codes  # the control: there is something to give up
        deadline = time.monotonic() + 30.0
        while other.ask("lookup", keys) < len(keys):
            assert time.monotonic() < deadline, "a reservation was never given up"
            time.sleep(0.2)
            other.ask("put", keys)
        assert other.ask("get", keys) == [True] * len(keys)


def test_a_killed_owner_takes_its_objects_along(cluster: MetaCluster) -> None:
    with ready(cluster) as survivor, ready(cluster) as owner:
        # The service chooses each object's location: of 48 objects some are in this owner's memory.
        keys = [f"o{i}" for i in range(48)]
        assert [owner.ask("put", [key]) for key in keys] == [[True]] * 48
        assert survivor.ask("get", keys[:8]) == [True] * 8
        owner.kill()
        deadline = time.monotonic() + 20.0
        while (there := survivor.ask("lookup", keys)) == 48 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert there < 48
        for first in range(0, 48, 8):
            assert len(survivor.ask("get", keys[first : first + 8])) == 8  # each right, or gone; no error
        assert survivor.ask("put", ["o-new"]) == [True]


def test_engines_that_differ_are_told(shared: tuple[Peer, Peer, Peer]) -> None:
    first, second, _ = shared
    assert handshake(first, "same") == "agreed"
    assert handshake(second, "same") == "agreed"
    error = handshake(second, "other")
    assert error[1] == "StoreMismatchError"
    assert "hash_probe differs" in error[2]


def test_a_second_service_is_refused(cluster: MetaCluster, tmp_path: Path) -> None:
    """For another port, on the same machine: the lock file is what tells."""
    second = MetaCluster(tmp_path)
    second.share_lock_with(cluster)
    with pytest.raises(RuntimeError, match="another one running on this machine"):
        second.start()
    again = MetaCluster(tmp_path)
    again.folder = cluster.folder
    with pytest.raises(RuntimeError, match=r"meta_port=\d+: .* can't be listened at"):
        again.start()
