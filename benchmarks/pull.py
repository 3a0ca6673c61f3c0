"""Pulling a layer's KV from another process, coalesced, against one big read of the same bytes."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import numpy.typing as npt

from benchmarks.registry import Row, higher_is_better
from vllm_kvoffload.transfer import ReadStatus, Region, Spans, TransferEngine, make_engine
from vllm_kvoffload.transfer.base import PeerHandle
from vllm_kvoffload.transfer.spans import block_spans

BLOCK_BYTES = 128 * 1152
"""A block of 128 tokens of the main KV of one layer."""

NUM_BLOCKS = 1024
"""A prompt of 131072 tokens."""

RUN_BLOCKS = 32
"""Neighbours in a block table: an allocator hands blocks out in runs until it is fragmented."""

ROUNDS = 20
DEADLINE_S = 60.0


def _serve(connection: Connection, nbytes: int) -> None:
    engine = make_engine("nixl", role="prefill", host="127.0.0.1", device_id=0)
    memory = np.ones(nbytes, dtype=np.uint8)
    engine.register([Region(memory.ctypes.data, nbytes)])
    connection.send((engine.local_metadata(), memory.ctypes.data))
    connection.recv()
    engine.close()


def _shuffled_runs(seed: int, run_blocks: int) -> npt.NDArray[np.int64]:
    runs = np.random.default_rng(seed).permutation(NUM_BLOCKS // run_blocks)
    table: npt.NDArray[np.int64] = (runs[:, None] * run_blocks + np.arange(run_blocks)).ravel()
    return table


def _rate(engine: TransferEngine, peer: PeerHandle, spans: Spans) -> float:
    begin = time.process_time()
    if engine.wait(engine.read(peer, spans), DEADLINE_S) is not ReadStatus.DONE:
        raise RuntimeError("a read did not finish")
    return spans.total_bytes / (time.process_time() - begin) / 1e9


def run() -> Iterable[Row]:
    """GB per CPU second of a layer pull; baseline: one read of as many bytes at once.

    Over shared memory the reader's processor copies, so its time is the read's, less what neighbours take.
    """
    nbytes = NUM_BLOCKS * BLOCK_BYTES
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs, nbytes), daemon=True)
    server.start()
    target = np.zeros(nbytes, dtype=np.uint8)
    engine = make_engine("nixl", role="decode", host="127.0.0.1", device_id=0)
    try:
        engine.register([Region(target.ctypes.data, nbytes)])
        if not ours.poll(DEADLINE_S):
            raise RuntimeError("the other process did not start")
        metadata, remote = ours.recv()
        peer = engine.add_peer(metadata)
        yield from _compare(engine, peer, target.ctypes.data, remote)
    finally:
        engine.close()
        server.kill()
        server.join()


def _compare(engine: TransferEngine, peer: PeerHandle, local: int, remote: int) -> Iterable[Row]:
    def layer(run_blocks: int) -> Spans:
        tables = _shuffled_runs(1, run_blocks), _shuffled_runs(2, run_blocks)
        return block_spans(tables[0], local, BLOCK_BYTES, tables[1], remote, BLOCK_BYTES, BLOCK_BYTES)

    contenders = {
        "one": Spans.of([(local, remote, NUM_BLOCKS * BLOCK_BYTES)]),
        "pull/layer": layer(RUN_BLOCKS),
        "pull/layer/scattered": layer(1),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(1 + ROUNDS):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            rate = _rate(engine, peer, contenders[name])
            if number:  # the first touches every page
                rates[name].append(rate)
    baseline = median(rates.pop("one"))
    for name, values in rates.items():
        yield higher_is_better(name, median(values), "GB/s", baseline)
