"""The watch over a service: it sees the service end, and come back, once."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest

from vllm_kvoffload.store import patience
from vllm_kvoffload.store.patience import ServiceWatch

DEADLINE_S = 20.0
CALM_S = 2.0
PROBE_S = 0.3
"""How long a probe takes here."""


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
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    connect = socket.create_connection

    def slow(*arguments: object, **more: object) -> socket.socket:
        connection = connect(*arguments, **more)  # type: ignore[arg-type]
        time.sleep(PROBE_S)
        return connection

    monkeypatch.setattr(socket, "create_connection", slow)
    made = Service()
    yield made
    made.kill()


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


def test_two_watches_of_one_process_see_no_loss_in_each_other(service: Service) -> None:
    assert losses_of_two_watches(service) == [2, 2]


def test_control_probes_taken_for_the_librarys_connection(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "_probing", nullcontext())
    assert sum(losses_of_two_watches(service)) > 4
