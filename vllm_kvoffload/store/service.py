"""The index and the memory of a local store, served to clients in this process and in others.

Other processes connect through a Unix socket; one thread per connection answers requests. Memory and socket
have no names in the file system, so nothing is left behind however this process ends. Clients receive the
memory's file descriptor through the socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.memory.segment import SharedSegment, start_ticks
from vllm_kvoffload.store.base import StoreError, WriteRefusal
from vllm_kvoffload.store.index import Grant, IndexStats, ObjectIndex
from vllm_kvoffload.store.wire import (
    PROTOCOL_VERSION,
    CloseRead,
    ConnectionLost,
    FinishWrite,
    Goodbye,
    Granted,
    Lookup,
    OpenRead,
    OpenWrite,
    Reply,
    Request,
    StoreHello,
    peer_process,
    receive_body,
    request_decoder,
    send_message,
    socket_address,
)

logger = get_logger(__name__)

DESCRIPTION = "kv store pool 1"
HELLO_S = 10.0
SEND_S = 10.0
JOIN_S = 5.0
PAUSE_S, MAX_PAUSE_S = 0.02, 1.0
"""Pause between failed attempts to accept a connection."""

Process = tuple[int, int | None]


class IndexService:
    """One pool of shared memory and its index.

    Args:
        pool_bytes: of memory, reserved immediately. write_lease_s: limit of an unfinished write.
        clock: seconds of the machine's monotonic clock; other processes compare deadlines with theirs.

    Raises:
        SegmentMemoryError: not enough memory.
    """

    def __init__(
        self, pool_bytes: int, write_lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._segment, self.memory_fd = SharedSegment.create_unnamed(pool_bytes, DESCRIPTION)
        self._index = ObjectIndex(pool_bytes)
        self._write_lease_s = write_lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._serial = 0
        self._current: dict[str, str] = {}  # for each client, the name of its current connection in the index
        self._disconnected: dict[str, Process] = {}  # ended, but their process may still copy
        self._closed = False

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """uint8 [pool_bytes]."""
        return self._segment.data

    def stats(self) -> IndexStats:
        """A copy of the index's counters."""
        with self._lock:
            return replace(self._index.snapshot())

    def connect(self, client: str) -> str:
        """Returns a new name for `call`, for a client without running copies, and closes its open objects.

        Later calls with its earlier names are rejected.
        """
        with self._lock:
            self._refuse_if_closed()
            for name in {self._current.get(client, ""), *self._disconnected}:
                if name.partition(".")[0] == client:
                    self._release(name)
            self._serial += 1
            name = self._current[client] = f"{client}.{self._serial}"
            return name

    def call(self, name: str, request: Request) -> Reply:
        """Answers a request. Raises StoreError: the service is closed, or the client has reconnected."""
        now = self._clock()
        with self._lock:
            self._refuse_if_closed()
            if self._current.get(name.partition(".")[0]) != name:
                raise StoreError("the client has another connection by now")
            return self._answer(name, request, now)

    def _answer(self, name: str, request: Request, now: float) -> Reply:
        index = self._index
        if isinstance(request, Lookup):
            return Reply(run=index.lookup(request.keys, now))
        if isinstance(request, OpenRead):
            return Reply(grants=_granted(index.open_read(name, request.keys, now, request.lease_s)))
        if isinstance(request, OpenWrite):
            self._release_dead()
            lease_s = self._write_lease_s
            return Reply(grants=_granted(index.open_write(name, request.keys, request.nbytes, now, lease_s)))
        if isinstance(request, FinishWrite):
            return Reply(ok=index.finish_write(name, request.handles, request.ok, now))
        if isinstance(request, CloseRead):
            index.close_read(name, request.handles)
        elif isinstance(request, Goodbye):
            self._release(name)
        else:
            raise StoreError("a connection says hello once")
        return Reply()

    def disconnected(self, name: str, process: Process) -> None:
        """Called when a connection ends without a Goodbye."""
        with self._lock:
            client = name.partition(".")[0]
            if self._current.get(client) != name:
                return
            del self._current[client]
            self._index.drop(name, drained=False)
            if name in self._index.clients():
                self._disconnected[name] = process
            self._release_dead()

    def _release(self, name: str) -> None:
        self._index.drop(name, drained=True)
        self._disconnected.pop(name, None)
        client = name.partition(".")[0]
        if self._current.get(client) == name:
            del self._current[client]

    def _release_dead(self) -> None:
        """Frees open objects of disconnected clients whose processes are dead: their copies have drained."""
        left = self._index.clients() if self._disconnected else set()
        for name, (pid, ticks) in list(self._disconnected.items()):
            if name not in left or ticks is None or start_ticks(pid) != ticks:
                self._release(name)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError("the store was closed")

    def close(self) -> None:
        """Rejects all further calls and releases the memory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.close(self.memory_fd)
        self._segment.close()


def _granted(results: list[Grant | None] | list[Grant | WriteRefusal]) -> list[Granted | str | None]:
    return [
        Granted(result.handle, result.offset, result.nbytes, result.deadline)
        if isinstance(result, Grant)
        else (None if result is None else result.value)
        for result in results
    ]


class IndexServer:
    """Serves an IndexService at an instance's socket.

    `failures`: number of connections that could not be accepted.

    Raises StoreError: another process serves this instance.
    """

    def __init__(self, service: IndexService, instance: str) -> None:
        self._service = service
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(socket_address(instance))
        except OSError as error:
            self._listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise StoreError(
                f"another process serves the local store of {instance!r}: two engines have the same engine "
                "id and data parallel rank; give each its own, or end the other one"
            ) from error
        self._listener.listen(64)
        self._log = RateLimitedLog(__name__, subject="store")
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._stopping = threading.Event()
        self.failures = 0
        self._thread = threading.Thread(target=self._accept, name="kvoffload-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and threads. Idempotent."""
        with self._lock:
            self._stopping.set()
            connections = dict(self._connections)
        _shut(self._listener)
        for connection in connections:
            _shut(connection)
        for thread in (self._thread, *connections.values()):
            thread.join(JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        """Accepts connections. No error, such as too many open files, ends it: other ranks need the index."""
        pause_s = PAUSE_S
        while not self._stopping.is_set():
            try:
                self._take(self._listener.accept()[0])
                pause_s = PAUSE_S
            except Exception as error:
                if self._stopping.is_set():
                    return
                self.failures += 1
                self._log.warning("accept", f"a process could not be connected, trying on: {error!r}")
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _take(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="kvoffload-store-client", daemon=True
        )
        with self._lock:
            if self._stopping.is_set():
                connection.close()
                return
            self._connections[connection] = thread
            try:
                thread.start()
            except BaseException:
                del self._connections[connection]
                connection.close()
                raise

    def _serve(self, connection: socket.socket) -> None:
        name = ""
        process: Process = (0, None)
        try:
            pid, uid = peer_process(connection)
            if uid != os.geteuid():
                raise ConnectionLost(f"a process of user {uid}")
            process = pid, start_ticks(pid)
            name = self._greet(connection)
            while True:
                request = request_decoder.decode(receive_body(connection, None))
                reply = self._service.call(name, request)
                send_message(connection, reply, time.monotonic() + SEND_S)
        except (StoreError, msgspec.MsgspecError, ValueError) as error:
            logger.debug("local store: connection %s of process %d: %s", name, process[0], error)
        except Exception as error:  # ends this connection only; the client reconnects
            self._log.warning("connection", f"{name} of process {process[0]} ended: {error!r}")
        finally:
            with contextlib.closing(connection):
                with self._lock:
                    self._connections.pop(connection, None)
                self._service.disconnected(name, process)

    def _greet(self, connection: socket.socket) -> str:
        hello = request_decoder.decode(receive_body(connection, time.monotonic() + HELLO_S))
        deadline = time.monotonic() + SEND_S
        if not isinstance(hello, StoreHello) or hello.version != PROTOCOL_VERSION:
            text = f"expected protocol version {PROTOCOL_VERSION} of the local store, got {hello!r:.100}"
            send_message(connection, Reply(error=text), deadline)
            raise ConnectionLost(text)
        name = self._service.connect(hello.client)
        reply = Reply(pool_bytes=len(self._service.memory))
        try:
            send_message(connection, reply, deadline, self._service.memory_fd)
        except ConnectionLost:
            self._service.disconnected(name, (0, None))
            raise
        return name


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
