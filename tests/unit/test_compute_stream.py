"""Copies wait for the computation before them where it runs on a stream of its own, as on an NPU.

On CPU the caller computes itself, so that these waits are over when they are recorded and their absence
would not show. Here computation is a stream that is held until the copies had every chance to run too early.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from tests.unit import test_prefetch, test_prefill_stream
from vllm_kvoffload.runtime import CPURuntime
from vllm_kvoffload.runtime.base import Stream
from vllm_kvoffload.sparse.host_rows import STREAM as WRITES
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.prefetch import STREAM as PREFETCH
from vllm_kvoffload.sparse.prefill_stream import STREAM as LOADS
from vllm_kvoffload.sparse.prefill_stream import PrefillRequest

pytestmark = pytest.mark.timeout(60)

CHANCE_S = 0.05  # for a copy that does not wait: it takes microseconds


class DeviceRuntime(CPURuntime):
    """A runtime whose computation is a stream, which can be held."""

    def __init__(self) -> None:
        super().__init__()
        self._go_on = threading.Event()

    def current_stream(self) -> Stream:
        return self.stream("compute")

    def hold(self) -> None:
        self.current_stream().submit(self._go_on.wait, 20)

    def let_copies_run(self, stream: str) -> None:
        """Gives the copies submitted to `stream` their chance, then lets the computation go on."""
        self._go_on.wait(CHANCE_S)
        self._go_on.set()
        self.current_stream().synchronize(10)
        self.stream(stream).synchronize(10)


@pytest.fixture
def runtime() -> Iterator[DeviceRuntime]:
    with DeviceRuntime() as runtime:
        yield runtime


def test_new_rows_are_written_after_they_are_computed(runtime: DeviceRuntime) -> None:
    host = torch.zeros(2, 2, 8, dtype=torch.uint8)
    host_rows = HostRows([host], runtime, writer=True, barrier=None, deadline_s=10)
    rows = torch.full((1, 8), 7, dtype=torch.uint8)
    runtime.hold()
    runtime.current_stream().submit(rows.fill_, 9)
    host_rows.write(0, rows, torch.tensor([3]))
    runtime.let_copies_run(WRITES)
    assert host[1, 1].tolist() == [9] * 8


def test_a_prefill_buffer_is_loaded_after_its_last_use(runtime: DeviceRuntime) -> None:
    bench = test_prefill_stream.Bench(runtime, num_buffers=1)
    request = PrefillRequest(4, torch.arange(1, dtype=torch.int32), False)
    bench.stream.begin_step([request], range(2))
    buffer, seen = bench.stream.open(0, 0), torch.zeros(4, 8, dtype=torch.uint8)
    runtime.hold()
    runtime.current_stream().submit(seen.copy_, buffer[:4])  # attention
    bench.stream.close()
    runtime.let_copies_run(LOADS)
    assert seen[:, 0].tolist() == [0] * 4, "layer 0, not the next one"
    assert bench.stream.open(1, 0)[:4, 0].tolist() == [1] * 4


def test_followers_rows_are_fetched_after_the_last_use_of_their_slots(runtime: DeviceRuntime) -> None:
    bench = test_prefetch.Bench(runtime)
    pool = bench.hot.layers[1]
    seen = torch.full_like(pool, 99)
    runtime.hold()
    runtime.current_stream().submit(seen.copy_, pool)  # attention of the step before
    bench.start()
    runtime.let_copies_run(PREFETCH)
    assert not seen.any(), "the slots as they were"
    assert bench.fetched(1, 0) == test_prefetch.TOPK
    bench.prefetch.join()
