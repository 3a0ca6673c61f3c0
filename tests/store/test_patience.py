"""The watch over a service: it sees the service end, and come back, once."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from vllm_kvoffload.store import patience
from vllm_kvoffload.store.patience import PatientCalls, ServiceWatch

DEADLINE_S = 20.0
CALM_S = 2.0
PROBE_S = 0.3
"""Duration of a probe in the tests of two watches."""


class Service:
    """Holds connections that say something, and ends the others soon."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        self._held: list[socket.socket] = []
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(0.1)
        try:
            if connection.recv(1):
                self._held.append(connection)
                return
        except OSError:
            pass
        connection.close()

    def kill(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._held:
            connection.close()


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.kill()


@pytest.fixture(params=[PROBE_S])
def slow_probes(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A probe's connection exists for so long before it is used that another watch can see it."""
    connect = socket.create_connection

    def slow(*arguments: object, **more: object) -> socket.socket:
        connection = connect(*arguments, **more)  # type: ignore[arg-type]
        time.sleep(request.param)
        return connection

    monkeypatch.setattr(socket, "create_connection", slow)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def losses_of_two_watches(service: Service) -> list[int]:
    """As an engine's scheduler and worker have them in one process, with one connection of the library."""

    def library() -> socket.socket:
        connection = socket.socket()
        connection.connect(("127.0.0.1", service.port))
        connection.send(b"l")
        return connection

    connections = [library()]
    back = [threading.Event(), threading.Event()]
    watches = [ServiceWatch("127.0.0.1", service.port, event.set) for event in back]
    try:
        time.sleep(0.5)
        service.kill()
        wait_for(lambda: all(watch.down for watch in watches))
        service.start()
        connections.append(library())  # it hasn't closed the old one yet
        assert all(event.wait(DEADLINE_S) for event in back)
        time.sleep(CALM_S)
        for watch in watches:  # one probes while the other looks for connections again
            watch.lose("a call took too long")
            time.sleep(PROBE_S / 2)
        time.sleep(CALM_S)
        return [watch.losses for watch in watches]
    finally:
        for watch in watches:
            watch.close()
        for connection in connections:
            connection.close()


@pytest.mark.slow
@pytest.mark.usefixtures("slow_probes")
def test_two_watches_of_one_process_see_no_loss_in_each_other(service: Service) -> None:
    assert losses_of_two_watches(service) == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_probes")
def test_control_probes_taken_for_the_librarys_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_probing", nullcontext())
    assert sum(losses_of_two_watches(service)) > 4


class Stumbles:
    """Stands for a function that fails a number of times."""

    def __init__(self, plain: Callable[..., object], error: Exception, times: int) -> None:
        self.plain, self.error, self.left, self.calls = plain, error, times, 0

    def __call__(self, *arguments: object, **more: object) -> object:
        self.calls += 1
        if self.left:
            self.left -= 1
            raise self.error
        return self.plain(*arguments, **more)


@pytest.mark.parametrize(
    ("slow_probes", "module", "name", "error", "times"),
    [
        (PROBE_S, socket, "getaddrinfo", socket.gaierror(-3, "Temporary failure in name resolution"), 1),
        (0.1, socket, "getaddrinfo", socket.gaierror(-2, "Name or service not known"), 25),
        (0.1, os, "listdir", OSError(errno.EMFILE, "Too many open files"), 25),
        (0.1, os, "dup", OSError(errno.EMFILE, "Too many open files"), 25),
        (0.1, os, "eventfd_read", OSError(errno.EIO, "Input/output error"), 25),
        (PROBE_S, select, "poll", MemoryError(), 1),
    ],
    ids=["name", "names", "list", "dup", "event", "poll"],
    indirect=["slow_probes"],
)
@pytest.mark.usefixtures("slow_probes")
def test_a_watch_outlives_its_own_errors(service, monkeypatch, module, name, error, times) -> None:
    """It counts as down meanwhile, says so once, and then sees the service end as ever."""
    monkeypatch.setattr(patience, "RETRY_S", 0.001)
    lines: list[str] = []
    logger = logging.getLogger(f"vllm.{patience.__name__}")
    monkeypatch.setattr(logger, "log", lambda _, text, *values, **_more: lines.append(text % values))
    library = socket.socket()
    library.connect(("127.0.0.1", service.port))
    library.send(b"l")
    watch = ServiceWatch("127.0.0.1", service.port, lambda: None)
    try:
        stumbles = Stumbles(getattr(module, name), error, times)
        monkeypatch.setattr(module, name, stumbles)

        def is_over() -> bool:
            watch._wake()
            return not stumbles.left

        wait_for(is_over)
        wait_for(lambda: watch.losses and not watch.down)
        assert watch._thread.is_alive()
        assert len([line for line in lines if "service lost" in line]) == 1
        losses = watch.losses
        service.kill()
        wait_for(lambda: bool(watch.down) and watch.losses > losses)
        service.start()
    finally:
        library.close()
        watch.close()
    assert not watch._thread.is_alive()
    assert watch.down
    watch.lose("too late")  # its descriptor may be another file's by now


def test_calls_go_on_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = PatientCalls("test")
    start, tries = threading.Thread.start, Stumbles(lambda: None, RuntimeError("can't start new thread"), 1)
    monkeypatch.setattr(threading.Thread, "start", lambda self: (tries(), start(self)))
    with pytest.raises(RuntimeError, match="new thread"):
        calls.run(lambda: 1, 1.0)
    assert calls.run(lambda: 2, DEADLINE_S) == 2
    calls.close()


def test_no_thread_is_left_when_a_call_ends_after_the_close() -> None:
    calls = PatientCalls("kvoffload-test-late")
    go = threading.Event()
    caller = threading.Thread(target=lambda: calls.run(lambda: go.wait(DEADLINE_S), DEADLINE_S))
    caller.start()
    wait_for(lambda: any(thread.name == "kvoffload-test-late" for thread in threading.enumerate()))
    calls.close()
    go.set()
    caller.join()
    wait_for(lambda: all(thread.name != "kvoffload-test-late" for thread in threading.enumerate()))
