"""NIXL between two processes."""

from __future__ import annotations

import os
import signal
import socket
import time

import msgspec
import numpy as np
import psutil
import pytest

pytest.importorskip("nixl_cu12")

from tests.transfer.nixl_server import pattern, serve
from vllm_kvoffload.transfer import (
    ReadStatus,
    Region,
    Spans,
    TransferError,
    TransferUnavailableError,
    make_engine,
    net_devices,
    nixl,
)

BLOCK = 4096
NUM_BLOCKS = 64
NBYTES = BLOCK * NUM_BLOCKS


@pytest.fixture
def engine():
    made = make_engine("nixl", role="decode", host="127.0.0.1", device_id=0)
    yield made
    made.close()


def region(array: np.ndarray) -> Region:
    return Region(array.ctypes.data, array.nbytes)


def block_reads(target: np.ndarray, base: int, pairs: list[tuple[int, int]]) -> Spans:
    return Spans.of([(target.ctypes.data + a * BLOCK, base + b * BLOCK, BLOCK) for a, b in pairs])


def test_bytes_arrive_where_they_should(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    order = np.random.default_rng(1).permutation(NUM_BLOCKS)[: NUM_BLOCKS // 2].tolist()
    with serve(NBYTES, num_regions=4) as server:
        peer = engine.add_peer(server.metadata)
        assert engine.add_peer(server.metadata) == peer
        handle = engine.read(peer, block_reads(target, server.base, list(enumerate(order))))
        assert engine.wait(handle, 30) is ReadStatus.DONE
        server.connection.send("end")
        server.process.join(20)
        assert server.process.exitcode == 0
    expected = pattern(NBYTES).reshape(NUM_BLOCKS, BLOCK)
    got = target.reshape(NUM_BLOCKS, BLOCK)
    assert np.array_equal(got[: len(order)], expected[order])
    assert not got[len(order) :].any()


def test_spans_outside_of_registered_memory_are_refused(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    with serve(NBYTES) as server:
        peer = engine.add_peer(server.metadata)
        with pytest.raises(TransferError, match="remote memory"):
            engine.read(peer, block_reads(target, server.base, [(0, 0), (1, NUM_BLOCKS)]))
        with pytest.raises(TransferError, match="local memory"):
            engine.read(peer, block_reads(target, server.base, [(NUM_BLOCKS, 0)]))
    assert not target.any()


def test_overlapping_registrations_are_refused(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    with pytest.raises(TransferError, match="overlap"):
        engine.register([Region(target.ctypes.data + 100, 10)])


def test_a_dead_peer_fails_the_read_and_a_restarted_one_is_another(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    with serve(NBYTES) as server:
        first = engine.add_peer(server.metadata)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.join(10)
        handle = engine.read(first, block_reads(target, server.base, [(0, 1)]))
        assert engine.wait(handle, 30) is ReadStatus.FAILED
        assert handle.reason
    assert not target.any()
    with serve(NBYTES) as server:
        second = engine.add_peer(server.metadata)
        assert second != first
        handle = engine.read(second, block_reads(target, server.base, [(0, 1)]))
        assert engine.wait(handle, 30) is ReadStatus.DONE
    engine.remove_peer(first)
    engine.remove_peer(first)
    assert np.array_equal(target[:BLOCK], pattern(NBYTES)[BLOCK : 2 * BLOCK])


def test_a_removed_peer_is_unknown(engine):
    with serve(NBYTES) as server:
        peer = engine.add_peer(server.metadata)
        engine.remove_peer(peer)
        with pytest.raises(TransferError, match="never added"):
            engine.read(peer, Spans.of([]))


def test_a_cancelled_read_ends(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    with serve(NBYTES) as server:
        peer = engine.add_peer(server.metadata)
        os.kill(server.process.pid, signal.SIGSTOP)
        handle = engine.read(peer, block_reads(target, server.base, [(0, 1)]))
        engine.cancel(handle)
        begin = time.monotonic()
        os.kill(server.process.pid, signal.SIGCONT)
        assert engine.wait(handle, 10) is not ReadStatus.PENDING
        assert time.monotonic() - begin < 10


def test_an_empty_read_is_done(engine):
    with serve(NBYTES) as server:
        handle = engine.read(engine.add_peer(server.metadata), Spans.of([]))
        assert engine.poll(handle) is ReadStatus.DONE


def test_metadata_of_something_else_are_refused(engine):
    for metadata in (b"", b"junk", b"\x93\xa9memfabric\xa0\x90"):
        with pytest.raises(TransferError, match="not those of a nixl"):
            engine.add_peer(metadata)


def test_unknown_engines_are_refused():
    with pytest.raises(TransferUnavailableError, match="memfabric, nixl"):
        make_engine("mooncake", role="decode", host="127.0.0.1", device_id=0)


@pytest.mark.usefixtures("engine")
def test_an_engine_that_transfers_nothing_takes_no_core():
    """Its progress thread would take a whole one, if NIXL had its way."""
    before, begin = time.process_time(), time.monotonic()
    time.sleep(2)
    assert time.process_time() - before < 0.1 * (time.monotonic() - begin)


def test_damaged_metadata_never_reach_nixl(engine, monkeypatch):
    """A byte that differs ends the process in NIXL's parser."""
    metadata = engine.local_metadata()
    monkeypatch.setattr(engine._agent, "add_remote_agent", lambda _: pytest.fail("it was parsed"))
    dice = np.random.default_rng(1)
    for at in range(len(metadata)):
        for other in {0xFF, int(dice.integers(256))} - {metadata[at]}:
            with pytest.raises(TransferError):
                engine.add_peer(metadata[:at] + bytes([other]) + metadata[at + 1 :])
        with pytest.raises(TransferError):
            engine.add_peer(metadata[:at])
    for wrong in (metadata + b"\0", b"\x95" + metadata[1:] + b"\xc0", b"\x91" * 100_000, b"\x9f" * 200):
        with pytest.raises(TransferError):
            engine.add_peer(wrong)


@pytest.mark.parametrize(
    ("agent", "blob", "regions"),
    [
        ("a", b"x", [(1 << 63, 10, "host")]), ("a", b"x", [((1 << 63) - 1, 10, "host")]),
        ("a", b"x", [(10, (1 << 63) - 1, "host")]), ("a", b"x", [(-1, 5, "host")]),
        ("a", b"x", [(10, 0, "host")]), ("a", b"x", [(10, 5, "host"), (12, 5, "host")]),
        ("a", b"x", [(10, 5, "h" * 17)]), ("a", b"x", [(10.5, 5, "host")]),
        ("a", b"", []), ("", b"x", []), ("a" * 65, b"x", []), ("a\n", b"x", []), ("a b", b"x", []),
        ("☃", b"x", []), (7, b"x", []), ("a", "x", []), ("a", b"x", None),
    ],
)  # fmt: skip
def test_metadata_with_values_that_none_can_have_are_refused(engine, agent, blob, regions):
    digest = nixl._digest(agent, blob, tuple(regions or ()))
    wrong = msgspec.msgpack.encode(["nixl", agent, blob, regions, digest])
    with pytest.raises(TransferError, match="not those of a nixl"):
        engine.add_peer(wrong)


def test_too_many_regions_are_refused(engine):
    regions = tuple(Region(10 * (n + 1), 5) for n in range(nixl.MAX_REGIONS + 1))
    with pytest.raises(TransferError, match="not those of a nixl"):
        engine.add_peer(msgspec.msgpack.encode(nixl._NixlMetadata.of("a", b"x", regions)))


def test_hostile_spans_are_refused(engine):
    target = np.zeros(NBYTES, dtype=np.uint8)
    engine.register([region(target)])
    top = (1 << 63) - 1
    with serve(NBYTES) as server:
        peer = engine.add_peer(server.metadata)
        here, there = target.ctypes.data, server.base
        for span in (
            (here, there, top), (here, top, top), (top, there, top), (here + 1, there, NBYTES),
            (here, there, 0), (here, there, -1), (-1, there, 5), (here, -top, top),
            (here, top - 5, 10), (here, there, -top),
        ):  # fmt: skip
            for spans in (Spans.of([span]), Spans.of([(here, there, 5), span])):
                with pytest.raises(TransferError, match="not registered"):
                    engine.read(peer, spans)
        column = np.array([here], dtype=np.int64)
        for kind in (np.uint64, np.float64, object):
            with pytest.raises(TransferError, match="int64"):
                engine.read(peer, Spans(column, np.array([there], dtype=kind), column))
    assert not target.any()


def listening() -> set[str]:
    """Addresses that this process listens at, with their ports."""
    mine = psutil.Process().net_connections("tcp")
    return {f"{one.laddr.ip} {one.laddr.port}" for one in mine if one.status == psutil.CONN_LISTEN}


ADDRESSES = sorted(
    entry.address
    for entries in psutil.net_if_addrs().values()
    for entry in entries
    if entry.family is socket.AF_INET
)


@pytest.mark.parametrize("host", ADDRESSES)
def test_it_listens_where_peers_are_told_to_find_it(host):
    before = listening()
    made = make_engine("nixl", role="decode", host=host, device_id=0)
    try:
        assert {at.partition(" ")[0] for at in listening() - before} == {host}
        assert net_devices.VARIABLE not in os.environ
    finally:
        made.close()


def test_the_users_choice_of_devices_is_left_alone(monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    before = listening()
    made = make_engine("nixl", role="decode", host="127.0.0.1", device_id=0)
    assert len(listening() - before) > 1 or len(ADDRESSES) == 1
    made.close()
    monkeypatch.setenv("UCX_NET_DEVICES", "nosuch0")
    with pytest.raises(TransferUnavailableError, match="UCX backend: "):
        make_engine("nixl", role="decode", host="127.0.0.1", device_id=0)


def test_interfaces_are_found_by_address():
    for host in ("127.0.0.1", "127.0.1.1", "::1", "localhost"):
        assert net_devices.interface_of(host) == "lo"
    for host in ("203.0.113.9", "0.0.0.0", "", "a..b", "a" * 64, "☃" * 70, "a\0b", "999.1.1.1", "a b"):
        assert net_devices.interface_of(host) is None


def test_rdma_stays_in_use(tmp_path):
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / "sys/class/infiniband" / port).mkdir(parents=True)
    assert net_devices.ucx_devices("127.0.0.1", tmp_path) == "lo,mlx5_0:1,mlx5_0:2,mlx5_1:1"
    assert net_devices.ucx_devices("203.0.113.9", tmp_path) is None
