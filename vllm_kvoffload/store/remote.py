"""The client side of a local store's index: in this process, or through another process's socket."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_kvoffload.memory.segment import SegmentError, SharedSegment, start_ticks
from vllm_kvoffload.store.base import StoreError, StoreUnavailableError
from vllm_kvoffload.store.service import DESCRIPTION, IndexService
from vllm_kvoffload.store.wire import (
    PROTOCOL_VERSION,
    ConnectionLost,
    Goodbye,
    Reply,
    Request,
    StoreHello,
    peer_process,
    receive_body,
    receive_body_with_fd,
    reply_decoder,
    send_message,
    socket_address,
)

RETRY_S = 0.2
"""Time for which calls fail immediately after a failed connection."""

Drained = Callable[[], bool]
"""Called before reconnecting: returns whether all copies have drained."""


class IndexClient(Protocol):
    """One client's connection. `session` changes when all open objects are lost."""

    session: int

    def call(self, request: Request) -> tuple[int, Reply]:
        """Returns (session, reply). Raises StoreUnavailableError."""

    def memory(self) -> npt.NDArray[np.uint8]:
        """The pool, uint8 [pool_bytes], mapped into this process. Raises StoreUnavailableError."""

    def close(self, *, drained: bool) -> None:
        """Closes the connection. drained: this client's copies have drained. Idempotent."""


class DirectIndex:
    """The index in this process."""

    def __init__(self, service: IndexService) -> None:
        self._service = service
        self._name = service.connect(secrets.token_hex(16))
        self.session = 1

    def call(self, request: Request) -> tuple[int, Reply]:
        try:
            return self.session, self._service.call(self._name, request)
        except StoreError as error:
            raise StoreUnavailableError(f"local store: {error}") from error

    def memory(self) -> npt.NDArray[np.uint8]:
        try:
            return self._service.memory
        except SegmentError as error:
            raise StoreUnavailableError(f"local store: {error}") from error

    def close(self, *, drained: bool) -> None:
        # A running copy keeps its memory mapped; its unfinished writes lapse while the process lives.
        if drained:
            try:
                self._service.call(self._name, Goodbye())
            except StoreError:
                return
        else:
            self._service.disconnected(self._name, (os.getpid(), start_ticks(os.getpid())))


class RemoteIndex:
    """The index served by another process. Connects at the first call, and again after a loss.

    Args:
        instance: of the store. timeout_s: of a call. maps: whether `memory` is needed.
        drained: whether this client's copies have drained.
    """

    def __init__(self, instance: str, timeout_s: float, drained: Drained, *, maps: bool) -> None:
        self._instance = instance
        self._timeout_s = timeout_s
        self._drained = drained
        self._maps = maps
        self._client = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._segment: SharedSegment | None = None
        self._retry_at = 0.0
        self._reason = ""
        self._closed = False
        self.session = 0

    def call(self, request: Request) -> tuple[int, Reply]:
        deadline = time.monotonic() + self._timeout_s
        with self._locked():
            connection = self._connect(deadline)
            try:
                send_message(connection, request, deadline)
                reply = reply_decoder.decode(receive_body(connection, deadline))
            except (ConnectionLost, msgspec.MsgspecError) as error:
                # A late answer would be taken for the answer to the next request.
                raise self._disconnect(str(error)) from error
            session = self.session
        if reply.error:
            raise StoreUnavailableError(f"local store: {reply.error}")
        return session, reply

    def memory(self) -> npt.NDArray[np.uint8]:
        segment = self._segment
        if segment is None or self._connection is None:  # copies must not wait for another thread's call
            with self._locked():
                self._connect(time.monotonic() + self._timeout_s)
                segment = self._segment
        assert segment is not None, "made without maps"
        return segment.data

    def close(self, *, drained: bool) -> None:
        try:
            with self._locked():
                connection, self._connection, self._closed = self._connection, None, True
        except StoreUnavailableError:
            self._closed = True  # a call is stuck: it ends at its own deadline, and the process continues
            return
        self._segment = None
        if connection is None:
            return
        try:
            if drained:
                deadline = time.monotonic() + min(self._timeout_s, 1.0)
                send_message(connection, Goodbye(), deadline)
                receive_body(connection, deadline)
        except ConnectionLost:
            pass
        finally:
            connection.close()

    def _locked(self) -> _Locked:
        return _Locked(self._lock, self._timeout_s)

    def _connect(self, deadline: float) -> socket.socket:
        if self._connection is not None:
            return self._connection
        if self._closed:
            raise StoreUnavailableError("local store: closed in this process")
        if time.monotonic() < self._retry_at:
            raise StoreUnavailableError(self._reason)
        if not self._drained():
            raise self._disconnect("lost its index, and a copy of before still runs")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._greet(connection, deadline)
        except (OSError, StoreError, SegmentError, msgspec.MsgspecError) as error:
            connection.close()
            raise self._disconnect(str(error)) from error
        self._connection = connection
        return connection

    def _greet(self, connection: socket.socket, deadline: float) -> None:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.connect(socket_address(self._instance))
        _, uid = peer_process(connection)
        if uid != os.geteuid():
            raise StoreUnavailableError(f"the socket belongs to user {uid}")
        send_message(connection, StoreHello(PROTOCOL_VERSION, self._client), deadline)
        body, fd = receive_body_with_fd(connection, deadline)
        try:
            reply = reply_decoder.decode(body)
            if reply.error or fd is None:
                raise StoreUnavailableError(reply.error or "the answer to hello came without memory")
            if self._maps:
                self._segment = SharedSegment.attach_fd(fd, reply.pool_bytes, DESCRIPTION)
        finally:
            if fd is not None:
                os.close(fd)

    def _disconnect(self, reason: str) -> StoreUnavailableError:
        if self._connection is not None:
            self.session += 1
            self._connection.close()
        self._connection = None
        self._retry_at = time.monotonic() + RETRY_S
        self._reason = (
            f"local store {self._instance!r}: {reason}; its index lives in the process of tensor parallel "
            "rank 0: see that it runs"
        )
        return StoreUnavailableError(self._reason)


class _Locked:
    """Takes a lock with a deadline: its holder may be waiting for an answer."""

    def __init__(self, lock: threading.Lock, timeout_s: float) -> None:
        self._lock, self._timeout_s = lock, timeout_s

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StoreUnavailableError("local store: another call takes too long")

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
