"""PrefillStream: the right prefix in every buffer, loads ahead but never too early, and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from vllm_kvoffload import ops
from vllm_kvoffload.runtime import CPURuntime, DelayPlan, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.prefill_stream import PrefillRequest, PrefillStream

pytestmark = pytest.mark.timeout(60)

LAYERS, BLOCKS, BLOCK_SIZE, ROW_BYTES = 4, 16, 4, 8


class Loads:
    """Stands in for `ops.host_read`: counts loads, holds them back, makes them fail."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.started = 0
        self.done = 0
        self._real = ops.host_read

    def __call__(self, *args: object) -> None:
        self.started += 1
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        self._real(*args)  # type: ignore[arg-type]
        self.done += 1


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    stand_in = Loads()
    monkeypatch.setattr(ops, "host_read", stand_in)
    yield stand_in
    stand_in.open.set()


class Bench:
    """A host pool whose rows say (layer, slot), a stream, and the engine's part of a step."""

    def __init__(
        self, runtime: CPURuntime, num_buffers: int = 2, deadline_s: float = 10.0, barrier: object = None
    ) -> None:
        slots = torch.arange(BLOCKS * BLOCK_SIZE, dtype=torch.uint8)
        self.layers = []
        for layer in range(LAYERS):
            rows = torch.stack([torch.full_like(slots, layer), slots], 1).repeat(1, ROW_BYTES // 2)
            self.layers.append(rows.view(BLOCKS, BLOCK_SIZE, ROW_BYTES).contiguous())
        self.host_rows = HostRows(self.layers, runtime, writer=True, barrier=barrier, deadline_s=deadline_s)  # type: ignore[arg-type]
        self.buffers = torch.full((num_buffers, 32, ROW_BYTES), 0xEE, dtype=torch.uint8)
        self.stream = PrefillStream(self.host_rows, runtime, self.buffers, deadline_s)

    def expected(self, layer: int, request: PrefillRequest) -> list[list[int]]:
        blocks = request.blocks.tolist()
        return [
            [layer, blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE] for i in range(request.computed)
        ]

    def attend(self, layer: int, index: int, request: PrefillRequest, hold_s: float = 0.0) -> None:
        buffer = self.stream.open(layer, index)
        for pause_s in (0.0, hold_s):
            time.sleep(pause_s)
            assert buffer[: request.computed, :2].tolist() == self.expected(layer, request)
        self.stream.close()

    def step(self, requests: list[PrefillRequest], hold_s: float = 0.0) -> None:
        self.stream.begin_step(requests, range(LAYERS))
        for layer in range(LAYERS):
            for index, request in enumerate(requests):
                self.attend(layer, index, request, hold_s)


def request(computed: int, *blocks: int, in_step: bool = False) -> PrefillRequest:
    return PrefillRequest(computed, torch.tensor(blocks, dtype=torch.int32), in_step)


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    before = set(threading.enumerate())
    with CPURuntime() as runtime:
        yield runtime
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", range(3))
def test_every_job_finds_its_prefix_under_random_delays(num_buffers: int, seed: int) -> None:
    with CPURuntime(DelayPlan(seed, max_ms=2)) as runtime:
        bench = Bench(runtime, num_buffers)
        one = [request(9, 3, 1, 7)]
        three = [request(4, 5), request(0), request(13, 2, 8, 9, 4)]
        for requests in (one, three, [], one):
            bench.step(requests, hold_s=0.001)
        assert bench.stream.bytes_loaded == LAYERS * (9 + 17 + 9) * ROW_BYTES


def test_loads_run_as_far_ahead_as_there_are_buffers_and_no_further(
    loads: Loads, runtime: CPURuntime
) -> None:
    bench, prefix = Bench(runtime, num_buffers=2), request(5, 1, 2)
    bench.stream.begin_step([prefix], range(LAYERS))
    runtime.synchronize()
    assert loads.done == 2  # before any layer ran
    bench.stream.open(0, 0)
    runtime.synchronize()
    assert loads.done == 2  # both buffers are taken
    bench.stream.close()
    runtime.synchronize()
    assert loads.done == 3


def test_a_first_chunk_loads_nothing(loads: Loads, runtime: CPURuntime) -> None:
    bench = Bench(runtime)
    bench.step([request(0, 1), request(0, 2)])
    assert loads.started == 0


def test_a_prefix_computed_in_the_step_is_loaded_after_it_is_written(runtime: CPURuntime) -> None:
    bench, prefix = Bench(runtime, num_buffers=3), request(2, 6, in_step=True)
    slots = torch.tensor([24, 25])
    bench.stream.begin_step([request(4, 5), prefix], range(LAYERS))
    for layer in range(LAYERS):
        rows = torch.full((2, ROW_BYTES), 100 + layer, dtype=torch.uint8)
        bench.host_rows.write(layer, rows, slots)
        bench.attend(layer, 0, request(4, 5))
        assert (bench.stream.open(layer, 1)[:2] == 100 + layer).all()
        bench.stream.close()


def test_ranks_meet_before_loads_that_run_ahead_of_the_step(runtime: CPURuntime, loads: Loads) -> None:
    met: list[int] = []
    bench = Bench(runtime, barrier=lambda: met.append(loads.started))
    bench.stream.begin_step([request(4, 1)], range(LAYERS))
    assert met == [0]
    runtime.synchronize()
    bench = Bench(runtime, barrier=lambda: met.append(loads.started))
    bench.stream.begin_step([], range(LAYERS))
    bench.stream.begin_step([request(0, 1), request(4, 1, in_step=True)], range(LAYERS))
    assert met == [0]  # nothing is loaded ahead


def test_jobs_out_of_order_are_refused(runtime: CPURuntime) -> None:
    bench = Bench(runtime)
    bench.stream.begin_step([request(4, 1), request(4, 2)], range(LAYERS))
    with pytest.raises(RuntimeError, match=r"prefill job 1 \(layer 0, request 1\) out of order: expected 0"):
        bench.stream.open(0, 1)


def test_without_buffers_prefill_is_refused_with_the_reason(runtime: CPURuntime) -> None:
    with pytest.raises(
        RuntimeError, match=r"layer 0.*no prefill buffers.*prefill_buffers=0.*keep_device_kv_cache"
    ):
        Bench(runtime, num_buffers=0).stream.open(0, 0)


def test_loads_of_a_failed_step_never_reach_the_next_steps_buffers(loads: Loads, runtime: CPURuntime) -> None:
    """A first chunk loads nothing, so only joining keeps the old load out of its buffer."""
    bench = Bench(runtime)
    loads.open.clear()
    bench.stream.begin_step([request(8, 3, 4)], range(LAYERS))  # and its forward pass fails
    threading.Timer(0.1, loads.open.set).start()
    bench.stream.begin_step([request(0, 1)], range(LAYERS))
    buffer = bench.stream.open(0, 0)
    buffer.fill_(77)
    runtime.synchronize()
    assert (buffer == 77).all()


def test_a_failed_load_fails_its_step_and_not_the_next(loads: Loads, runtime: CPURuntime) -> None:
    bench, prefix = Bench(runtime), request(6, 2, 5)
    loads.error = OSError("bad page")
    bench.stream.begin_step([prefix], range(LAYERS))
    with pytest.raises(TaskFailedError, match=r"load layer 0.*bad page"):
        bench.stream.open(0, 0)
    loads.error = None
    bench.step([request(0, 1)])  # what failed is not taken for a job of this step
    bench.step([prefix])


@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_failed_load_in_a_later_layer_is_forgotten_too(
    loads: Loads, runtime: CPURuntime, layer: int
) -> None:
    bench, prefix = Bench(runtime, num_buffers=1), request(6, 2, 5)
    bench.stream.begin_step([prefix], range(LAYERS))
    for before in range(layer):
        runtime.synchronize()
        if before == layer - 1:
            loads.error = OSError("bad page")  # closing this one starts the load of `layer`
        bench.attend(before, 0, prefix)
    with pytest.raises(TaskFailedError, match=f"load layer {layer}"):
        bench.stream.open(layer, 0)
    loads.error = None
    bench.step([prefix])


def test_a_stuck_load_ends_the_wait_and_is_joined_before_its_buffer_is_used_again(
    loads: Loads, runtime: CPURuntime
) -> None:
    bench = Bench(runtime, num_buffers=1, deadline_s=0.1)
    loads.open.clear()
    bench.stream.begin_step([request(8, 3, 4)], range(LAYERS))
    with pytest.raises(WaitTimeoutError, match="prefix of layer 0"):
        bench.stream.open(0, 0)
    with pytest.raises(WaitTimeoutError, match="prefix of layer 0"):
        bench.stream.begin_step([request(0, 1)], range(LAYERS))
    loads.open.set()
    bench.step([request(8, 3, 4)])
