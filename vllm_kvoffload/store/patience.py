"""Calls with a deadline into a library that may block for minutes, and a watch on the library's service."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from vllm_kvoffload.log import RateLimitedLog, get_logger

logger = get_logger(__name__)

T = TypeVar("T")

MAX_STUCK = 4
PROBE_S = 1.0
READY_S = 5.0
RETRY_S = 0.5
SEEK_S = 1.0


class PatientCalls:
    """Runs calls on threads of its own, one at a time per thread, and gives up waiting at a deadline.

    An abandoned call continues in its thread, which ends with it. While MAX_STUCK calls are stuck, new calls
    are rejected. The library must release the GIL while it blocks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._stuck = 0
        self._closed = False

    def run(self, call: Callable[[], T], timeout_s: float) -> T:
        """Returns the call's result or raises its exception; TimeoutError; RuntimeError: out of threads."""
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
                    if self._closed:
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
            if not result.empty():  # the call ended just before the deadline
                return result.get()
            given_up.set()
            self._stuck += 1
        return False, TimeoutError("no answer in time")

    def close(self) -> None:
        """Ends idle threads now and the others when their calls return."""
        with self._lock:
            self._closed = True
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
    """Detects immediately when a library's service ends, and when it is available again.

    Watches the library's own connection, which the kernel closes with the service; a separate connection
    would have to speak the library's protocol. `losses` counts losses of the service, each of which voids its
    earlier grants. `down`: "" or the reason why the service is unusable; a watch without a visible connection
    counts as down, too. `failures`: errors of the watch itself (an unresolvable name, no descriptors).

    Args:
        host, port: of the service. ready: called before the service counts as available; raises if not.
    """

    def __init__(self, host: str, port: int, ready: Callable[[], None]) -> None:
        self._address = (host, port)
        self._name = f"{host}:{port}"
        self._ready = ready
        self._lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._ended: set[int] = set()  # connections that have ended, but may not be closed yet
        self._log = RateLimitedLog(__name__, subject="store")
        self.losses = 0
        self.failures = 0
        self.down = ""
        self._thread = threading.Thread(target=self._watch, name="kvoffload-store-watch", daemon=True)
        self._thread.start()

    def lose(self, reason: str) -> None:
        """Marks the service as lost even if its connection looks alive; the watch then retries it."""
        with self._lock:
            if not self.down:
                self.losses += 1
                self._log.warning("service lost", f"{self._name}: {reason}; trying again")
            self.down = reason
        self._wake()

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        self._wake()
        self._thread.join(PROBE_S + READY_S)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:  # otherwise the watch has ended, and the number may have been reused
                with contextlib.suppress(BlockingIOError):  # a wake-up is already pending
                    os.eventfd_write(self._wake_fd, 1)

    def _watch(self) -> None:
        """The watch's loop. No error ends it, because a lost service would then go unnoticed."""
        try:
            while not self._stopping:
                try:
                    if self.down:
                        self._try_again()
                    else:
                        self._wait_for_end()
                except Exception as error:
                    self._fail(error)
        finally:
            with self._lock:
                self.down = self.down or "its watch has ended"
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.lose(f"it can't be watched: {error!r}")
        time.sleep(RETRY_S)  # a plain sleep, which can't fail in turn

    def _wait_for_end(self) -> None:
        with contextlib.ExitStack() as stack:
            connections: dict[int, socket.socket] = {}
            for made in map(stack.enter_context, own_connections(*self._address)):
                connections.setdefault(os.fstat(made.fileno()).st_ino, made)  # else another watch's duplicate
            self._ended &= connections.keys()
            watched = {s.fileno(): inode for inode, s in connections.items() if inode not in self._ended}
            poller = select.poll()
            poller.register(self._wake_fd, select.POLLIN)
            for fd in watched:
                poller.register(fd, select.POLLRDHUP)
            # Without a connection there is nothing to watch: failing calls then report the loss.
            events = dict(poller.poll(None if watched else SEEK_S * 1000))
        if events.pop(self._wake_fd, None):
            os.eventfd_read(self._wake_fd)
        if events and not self._stopping:
            self._ended |= {watched[fd] for fd in events}  # the library closes them later
            self.lose("its connection ended")

    def _try_again(self) -> None:
        try:
            probe(*self._address, PROBE_S)
            self._ready()
            for connection in own_connections(*self._address):  # unusable until it can be watched
                connection.close()
        except Exception as error:
            self.down = f"does not serve: {error}"
            self._pause()
            return
        with self._lock:
            self.down = ""
        self._log.warning("service back", f"{self._name} serves again")

    def _pause(self) -> None:
        poller = select.poll()  # select() takes no descriptor above 1023
        poller.register(self._wake_fd, select.POLLIN)
        if poller.poll(RETRY_S * 1000):
            os.eventfd_read(self._wake_fd)


_probing = threading.Lock()
"""A probe's connection, which ends at once, must never be taken for the library's: two watches in a process
would mistake the end of each other's probes for the end of the service."""


def probe(host: str, port: int, timeout_s: float) -> None:
    """Checks that the address accepts connections. Raises OSError if it doesn't."""
    with _probing:
        socket.create_connection((host, port), timeout=timeout_s).close()


def own_connections(host: str, port: int) -> list[socket.socket]:
    """Duplicates of this process's sockets that are connected to an address."""
    with _probing:
        return _own_connections(host, port)


def _own_connections(host: str, port: int) -> list[socket.socket]:
    wanted = {info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    with contextlib.ExitStack() as stack:
        found = []
        for name in os.listdir("/proc/self/fd"):
            connection = _duplicate(name)
            if connection is None:
                continue
            stack.enter_context(connection)
            try:
                peer = connection.getpeername()
            except OSError:
                peer = ()
            here = isinstance(peer, tuple) and peer[1:2] == (port,)
            if here and str(peer[0]).removeprefix("::ffff:") in wanted:
                found.append(connection)
            else:
                connection.close()
        stack.pop_all()
        return found


def _duplicate(name: str) -> socket.socket | None:
    """A duplicate of a socket's descriptor; None for any other file, or one closed meanwhile.

    Raises OSError: duplication failed, which must not be mistaken for a service without connections.
    """
    try:
        if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
            return None
        fd = os.dup(int(name))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EBADF):
            return None
        raise
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
