"""Calls with a deadline into a library that may block for minutes, and a watch over the service behind it."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_kvoffload.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

MAX_STUCK = 4
PROBE_S = 1.0
READY_S = 5.0


class PatientCalls:
    """Runs calls on threads of its own, one at a time per thread, and gives up waiting at a deadline.

    A call that was given up goes on in its thread, which ends with it. While MAX_STUCK calls are stuck, no
    further ones are tried. The library must release the GIL while it blocks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._stuck = 0

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """The call's result, or what it raised. Raises TimeoutError."""
        with self._lock:
            if self._stuck >= MAX_STUCK:
                raise TimeoutError(f"{self._stuck} earlier calls have not returned")
            worker = self._idle.pop() if self._idle else self._start()
        result: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        given_up = threading.Event()

        def work() -> None:
            outcome: tuple[bool, Any]
            try:
                outcome = (True, call())
            except BaseException as error:
                outcome = (False, error)
            with self._lock:
                if given_up.is_set():
                    self._stuck -= 1
                    worker.put(None)
                else:
                    self._idle.append(worker)
                    result.put(outcome)

        worker.put(work)
        try:
            good, value = result.get(timeout=timeout_s)
        except queue.Empty:
            good, value = self._give_up(given_up, result)
        if not good:
            raise value
        return value  # type: ignore[no-any-return]

    def _give_up(
        self, given_up: threading.Event, result: queue.SimpleQueue[tuple[bool, Any]]
    ) -> tuple[bool, Any]:
        with self._lock:
            if not result.empty():  # it was just in time
                return result.get()
            given_up.set()
            self._stuck += 1
        return False, TimeoutError("no answer in time")

    def close(self) -> None:
        """Ends the idle threads."""
        with self._lock:
            for worker in self._idle:
                worker.put(None)
            self._idle.clear()

    def _start(self) -> queue.SimpleQueue[Callable[[], None] | None]:
        jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

        def loop() -> None:
            while (job := jobs.get()) is not None:
                job()

        threading.Thread(target=loop, name=self._name, daemon=True).start()
        return jobs


class ServiceWatch:
    """Knows at once when a TCP service ends, and finds out when it is back.

    Holds an idle connection, which the kernel ends with the service. `losses` counts the times that the
    service was lost: what it promised before is void then. `down`: "" or why the service can't be used.

    Args:
        host, port: of the service. ready: asked before the service counts as back; raises while it isn't.
    """

    def __init__(self, host: str, port: int, ready: Callable[[], None]) -> None:
        self._address = (host, port)
        self._ready = ready
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._connection: socket.socket | None = None
        self._stopping = False
        self.losses = 0
        self.down = ""
        self._hold(probe(host, port, PROBE_S))
        self._thread = threading.Thread(target=self._watch, name="kvoffload-store-watch", daemon=True)
        self._thread.start()

    def lose(self, reason: str) -> None:
        """The service does not answer, whatever its connection looks like: try it again from the start."""
        with self._lock:
            if not self.down:
                self.losses += 1
                logger.warning("store service %s:%d: %s; trying again", *self._address, reason)
            self.down = reason
            connection, self._connection = self._connection, None
        if connection is not None:
            _end(connection)
        self._wake.set()

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        self._stopping = True
        self.lose("closed in this process") if not self.down else self._wake.set()
        self._thread.join(PROBE_S + READY_S)

    def _hold(self, connection: socket.socket) -> None:
        with self._lock:
            self._connection = connection

    def _watch(self) -> None:
        while not self._stopping:
            connection = self._connection
            if connection is not None and not self.down:
                _wait_for_end(connection)
                if not self._stopping:
                    self.lose("its connection ended")
            self._wake.clear()
            if not self._stopping:
                self._return()

    def _return(self) -> None:
        try:
            connection = probe(*self._address, PROBE_S)
        except OSError as error:
            self.down = f"not reached: {error}"
            self._wake.wait(PROBE_S)
            return
        try:
            self._ready()
        except Exception as error:
            self.down = f"does not serve yet: {error}"
            _end(connection)
            self._wake.wait(PROBE_S)
            return
        self._hold(connection)
        self.down = ""
        logger.warning("store service %s:%d is back", *self._address)


def probe(host: str, port: int, timeout_s: float) -> socket.socket:
    """A connection. Raises OSError."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return connection


def _wait_for_end(connection: socket.socket) -> None:
    try:
        while connection.recv(4096):
            continue
    except OSError:
        return


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # ended by the other side
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
