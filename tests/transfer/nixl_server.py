"""A process with registered memory to read from."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

SEED = 7


def pattern(nbytes: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, 256, nbytes, dtype=np.uint8)


def _serve(connection: Any, nbytes: int, num_regions: int) -> None:
    from vllm_kvoffload.transfer import Region, make_engine

    engine = make_engine("nixl", role="prefill", host="127.0.0.1", device_id=0)
    data = pattern(nbytes)
    step = nbytes // num_regions
    base = data.ctypes.data
    engine.register([Region(base + n * step, step) for n in range(num_regions)])
    connection.send((engine.local_metadata(), base))
    connection.recv()
    engine.close()


@dataclass
class Server:
    process: Any
    connection: Any
    metadata: bytes
    base: int


@contextmanager
def serve(nbytes: int, num_regions: int = 1) -> Iterator[Server]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, nbytes, num_regions), daemon=True)
    process.start()
    try:
        assert ours.poll(60), "the server did not start"
        yield Server(process, ours, *ours.recv())
    finally:
        if process.is_alive():
            process.kill()
        process.join(10)
        ours.close()
