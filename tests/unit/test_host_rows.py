"""HostRows: what is written where, who waits for it, and how a failed or stuck write comes to light."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from vllm_kvoffload import ops
from vllm_kvoffload.runtime import CPURuntime, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.sparse.host_rows import HostRows

pytestmark = pytest.mark.timeout(60)

ROW_BYTES = 8
EMPTY = 0xEE


class HeldWrites:
    """Stands in for `ops.host_write`: writes wait for `open`, and fail on demand."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.error: Exception | None = None
        self._real = ops.host_write

    def __call__(self, *args: torch.Tensor) -> None:
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error
        self._real(*args)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWrites]:
    writes = HeldWrites()
    monkeypatch.setattr(ops, "host_write", writes)
    yield writes
    writes.open.set()


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    before = set(threading.enumerate())
    with CPURuntime() as runtime:
        yield runtime
    assert set(threading.enumerate()) <= before


def make_store(
    runtime: CPURuntime, *, writer: bool = True, deadline_s: float = 10.0, barrier: object = None
) -> HostRows:
    layers = [torch.full((4, 2, ROW_BYTES), EMPTY, dtype=torch.uint8) for _ in range(3)]
    return HostRows(layers, runtime, writer=writer, barrier=barrier, deadline_s=deadline_s)  # type: ignore[arg-type]


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8).unsqueeze(1).expand(-1, ROW_BYTES).contiguous()


def test_rows_go_to_their_slots_and_padding_nowhere(runtime: CPURuntime) -> None:
    store = make_store(runtime)
    store.write(1, rows(1, 2, 3), torch.tensor([5, -1, 0]))
    store.begin_step()
    flat = store.layers[1].flatten(0, 1)[:, 0].tolist()
    assert flat == [3, EMPTY, EMPTY, EMPTY, EMPTY, 1, EMPTY, EMPTY]
    assert (store.layers[0] == EMPTY).all()
    assert store.bytes_written == 3 * ROW_BYTES


def test_slot_mapping_may_be_overwritten_before_the_write_runs(held: HeldWrites, runtime: CPURuntime) -> None:
    """vLLM computes the next step's slots into the same buffer before that step begins."""
    store, slot_mapping = make_store(runtime), torch.tensor([2, 3])
    store.write(0, rows(1, 2), slot_mapping)
    slot_mapping.copy_(torch.tensor([6, 7]))
    held.open.set()
    store.begin_step()
    assert store.layers[0].flatten(0, 1)[:, 0].tolist() == [EMPTY, EMPTY, 1, 2, EMPTY, EMPTY, EMPTY, EMPTY]


@pytest.mark.parametrize("wait", ["begin_step", "join", "await_layer"])
def test_waits_end_after_the_write(held: HeldWrites, runtime: CPURuntime, wait: str) -> None:
    store = make_store(runtime)
    store.write(0, rows(1), torch.tensor([0]))
    store.write(2, rows(2), torch.tensor([0]))
    threading.Timer(0.05, held.open.set).start()
    getattr(store, wait)(*([2] if wait == "await_layer" else []))
    assert store.layers[2][0, 0, 0] == 2


def test_await_layer_waits_for_that_layer_only(held: HeldWrites, runtime: CPURuntime) -> None:
    store = make_store(runtime, deadline_s=0.05)
    store.write(1, rows(1), torch.tensor([0]))
    store.await_layer(0)
    store.await_layer(2)
    with pytest.raises(WaitTimeoutError, match="host rows of layer 1"):
        store.await_layer(1)
    held.open.set()


def test_a_reading_rank_writes_nothing_but_takes_part_in_barriers(runtime: CPURuntime) -> None:
    calls: list[str] = []
    store = make_store(runtime, writer=False, barrier=lambda: calls.append("barrier"))
    store.write(0, rows(1), torch.tensor([0]))
    store.begin_step()
    assert not calls  # joining its own writes needs no other rank
    store.await_layer(0)
    assert calls == ["barrier"]
    assert (store.layers[0] == EMPTY).all()
    assert store.bytes_written == 0


def test_a_writing_rank_enters_the_barrier_after_its_writes(held: HeldWrites, runtime: CPURuntime) -> None:
    seen: list[int] = []
    store = make_store(runtime, barrier=lambda: seen.append(int(store.layers[0][0, 0, 0])))
    store.write(0, rows(7), torch.tensor([0]))
    threading.Timer(0.05, held.open.set).start()
    store.await_layer(0)
    assert seen == [7]


def test_a_failed_write_is_an_error_of_the_next_step_and_stays_one(
    held: HeldWrites, runtime: CPURuntime
) -> None:
    """Its rows are lost: going on would attend to whatever the blocks held before."""
    store = make_store(runtime)
    held.error = OSError("bus error")
    held.open.set()
    store.write(1, rows(1), torch.tensor([0]))
    store.write(2, rows(1), torch.tensor([0]))
    for _ in range(2):
        with pytest.raises(TaskFailedError, match=r"write layer 1.*bus error"):
            store.begin_step()
    held.error = None
    store.write(0, rows(1), torch.tensor([0]))  # not even a later write gets through
    with pytest.raises(TaskFailedError, match="write layer 1"):
        store.begin_step()
    assert (store.layers[0] == EMPTY).all()


def test_a_stuck_write_ends_the_wait_at_the_deadline_and_is_waited_for_again(
    held: HeldWrites, runtime: CPURuntime
) -> None:
    store = make_store(runtime, deadline_s=0.1)
    for layer in range(3):
        store.write(layer, rows(9), torch.tensor([0]))
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="write layer 0"):
        store.begin_step()
    assert time.monotonic() - began < 5
    held.open.set()
    store.begin_step()
    assert all(layer[0, 0, 0] == 9 for layer in store.layers)
