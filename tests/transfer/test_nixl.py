"""NIXL between two processes."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("nixl_cu12")

from nixl_server import pattern, serve

from vllm_kvoffload.transfer import (
    ReadStatus,
    Region,
    Spans,
    TransferError,
    TransferUnavailableError,
    make_engine,
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
