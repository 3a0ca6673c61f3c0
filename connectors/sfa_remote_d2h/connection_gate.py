"""Tracks which connections of a control port are authenticated, and closes the others early."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

UNAUTHENTICATED_S = 10.0
"""How long a connection may exist before it sends a `Hello` with the secret."""

MAX_UNPROVEN = 256
UNAUTHENTICATED_FRAMES = 64
UNAUTHENTICATED_BYTES = 8 << 20
"""Limits on unauthenticated peers: libzmq keeps all parts of a message until the last has arrived."""

EVENTS_A_ROUND = 2048
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass
class GatedConnection:
    """session: the prefill session that authenticated over it, "" for an unauthenticated peer."""

    since: float
    frames: int = 0
    session: str = ""


class ConnectionGate:
    """Follows a listening socket's connections by file descriptor, which libzmq reports in its events and
    with every frame. libzmq owns the descriptors: the gate shuts connections down, and libzmq closes them.

    Args:
        listener: bound or not. port: of the listener, known once it is bound.

    Attributes:
        closed: unauthenticated connections that were ended. failed: handshakes that failed.
    """

    def __init__(self, listener: zmq.Socket[bytes], port: int) -> None:
        self.closed = self.failed = 0
        self._listener, self._port = listener, port
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED
        self.monitor: zmq.Socket[bytes] = listener.get_monitor_socket(events)
        self._connections: dict[int, GatedConnection] = {}
        self._shut_down: set[int] = set()

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def unproven(self) -> int:
        """Number of connections that have not authenticated."""
        return sum(not connection.session for connection in self._connections.values())

    @property
    def stuck(self) -> int:
        """Number of connections shut down here that libzmq has not closed yet."""
        return len(self._shut_down)

    def watch(self, now: float) -> None:
        """Processes libzmq's events. Call it before handling each frame: the descriptor may have been
        reused."""
        for _ in range(EVENTS_A_ROUND):
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
                self._shut_down.discard(int(event["value"]))
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._connections[int(event["value"])] = GatedConnection(now)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._connections.pop(int(event["value"]), None)
            else:
                self.failed += 1

    def frame(self, now: float, descriptor: int) -> str:
        """Counts a frame. Returns the session of its connection, "" if unauthenticated."""
        connection = self._connections.setdefault(descriptor, GatedConnection(now))
        connection.frames += 1
        return connection.session

    def introduced(self, descriptor: int, session: str) -> None:
        """Marks a connection as authenticated: its peer has presented the secret."""
        if descriptor in self._connections:
            self._connections[descriptor].session = session

    def refuse(self, descriptor: int) -> None:
        """Shuts down a connection if it is unauthenticated."""
        connection = self._connections.get(descriptor)
        if connection is not None and not connection.session:
            self._shut(descriptor)

    def tick(self, now: float) -> None:
        """Shuts down unauthenticated connections that are too old, too many, or have sent too much."""
        unproven = [(fd, c) for fd, c in self._connections.items() if not c.session]
        excess = len(unproven) - MAX_UNPROVEN
        for number, (descriptor, connection) in enumerate(unproven):  # oldest first
            old = now - connection.since >= UNAUTHENTICATED_S or connection.frames > UNAUTHENTICATED_FRAMES
            if number < excess or old or self._received(descriptor) > UNAUTHENTICATED_BYTES:
                self._shut(descriptor)

    def close(self) -> None:
        """Stops following connections. Call it before closing the listener."""
        self._listener.disable_monitor()
        self.monitor.close(linger=0)

    def _shut(self, descriptor: int) -> None:
        self._connections.pop(descriptor, None)
        connection = self._own(descriptor)
        if connection is not None:
            with connection:
                self.closed += 1
                self._shut_down.add(descriptor)
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    return  # already ended

    def _received(self, descriptor: int) -> int:
        connection = self._own(descriptor)
        if connection is None:
            return 0
        with connection:
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
            except OSError:
                return 0
        return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0]) if len(info) >= 136 else 0

    def _own(self, descriptor: int) -> socket.socket | None:
        """Duplicates the descriptor if it is still a connection of this port: libzmq may have closed it,
        and another thread may have reused the number."""
        try:
            copy = os.dup(descriptor)
        except OSError:
            return None
        try:
            connection = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        try:
            connection.getpeername()
            if connection.getsockname()[1] == self._port:
                return connection
        except (OSError, IndexError, TypeError):
            pass
        connection.close()
        return None
