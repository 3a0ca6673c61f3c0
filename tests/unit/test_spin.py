"""vLLM's message queue as we change it in place: names are still what we think they are, and a reader whose
notification was lost finds its message."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_kvoffload.platforms.cpu.spin import RECHECK_MS, SPIN_S, shorten_spinning

LOST = 20
DEADLINE_S = 3.0
"""For all of them together: less than vLLM's own 5 s for a single one."""


@pytest.fixture
def shm_broadcast(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module with our changes, which are undone afterwards."""
    from vllm.distributed.device_communicators import shm_broadcast

    initialiser = shm_broadcast.SpinCondition.__init__
    monkeypatch.setattr(initialiser, "__defaults__", initialiser.__defaults__)
    name = "SHM_READER_RECHECK_INTERVAL_MS"
    monkeypatch.setattr(shm_broadcast, name, getattr(shm_broadcast, name))
    shorten_spinning()
    return shm_broadcast


@pytest.fixture
def queues(shm_broadcast: Any) -> Iterator[tuple[Any, Any]]:
    """A writer, and its only reader."""
    writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=4096)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    greeting = threading.Thread(target=writer.wait_until_ready)
    greeting.start()
    reader.wait_until_ready()
    greeting.join()
    yield writer, reader
    reader.shutdown()


def test_only_the_time_to_spin_has_a_default_and_ours_is_taken(shm_broadcast: Any) -> None:
    parameters = inspect.signature(shm_broadcast.SpinCondition.__init__).parameters.values()
    (spinning,) = (p for p in parameters if p.default is not inspect.Parameter.empty)
    assert (spinning.name, spinning.default) == ("busy_loop_s", SPIN_S)
    assert shm_broadcast.MessageQueue.ReadTimeoutWithWarnings(None, False).timeout_ms() == RECHECK_MS


@pytest.mark.parametrize("indefinite", [True, False], ids=["worker", "executor"])
def test_a_lost_notification_is_no_freeze(queues: tuple[Any, Any], indefinite: bool) -> None:
    writer, reader = queues
    parked, read = threading.Semaphore(0), threading.Semaphore(0)
    poller = reader._spin_condition.poller
    reader._spin_condition.poller = Announced(poller, parked)
    writer._spin_condition.notify = lambda: None  # every notification is lost
    got: list[int] = []

    def receive() -> None:
        for _ in range(LOST):
            got.append(reader.dequeue(indefinite=indefinite))
            read.release()

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    for number in range(LOST):
        assert parked.acquire(timeout=DEADLINE_S)  # so it waits for a notification
        writer.enqueue(number)
        assert read.acquire(timeout=DEADLINE_S), f"the reader still sleeps over message {number}"
        while parked.acquire(blocking=False):
            pass
    receiver.join(DEADLINE_S)
    assert got == list(range(LOST))


class Announced:
    """A poller that says when it is about to wait."""

    def __init__(self, poller: Any, parked: threading.Semaphore) -> None:
        self._poller, self._parked = poller, parked

    def poll(self, timeout: int | None = None) -> Any:
        self._parked.release()
        return self._poller.poll(timeout=timeout)
