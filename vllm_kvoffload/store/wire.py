"""Messages between clients and the index of a local store, and their framing on a Unix socket.

A frame is its length (4 bytes, big endian) and a msgpack message. All waits end at a deadline of
`time.monotonic()`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time

import msgspec

from vllm_kvoffload.store.base import StoreError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")


class StoreHello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a connection. client: unique to each client object, kept on reconnection."""

    version: int
    client: str


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """The client's copies have drained; its open objects may be closed."""


class Lookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    keys: list[str]


class OpenRead(msgspec.Struct, frozen=True, array_like=True, tag="open_read"):
    keys: list[str]
    lease_s: float


class CloseRead(msgspec.Struct, frozen=True, array_like=True, tag="close_read"):
    handles: list[int]


class OpenWrite(msgspec.Struct, frozen=True, array_like=True, tag="open_write"):
    keys: list[str]
    nbytes: int


class FinishWrite(msgspec.Struct, frozen=True, array_like=True, tag="finish_write"):
    handles: list[int]
    ok: list[bool]


Request = StoreHello | Goodbye | Lookup | OpenRead | CloseRead | OpenWrite | FinishWrite


class Granted(msgspec.Struct, frozen=True, array_like=True):
    """Like `index.Grant`; the deadline is on this machine's monotonic clock."""

    handle: int
    offset: int
    nbytes: int
    deadline: float


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a request. error: "" unless rejected. run: of a lookup. grants: of openings; a string is a
    WriteRefusal's value. pool_bytes: of the memory whose descriptor comes with the answer to StoreHello."""

    error: str = ""
    run: int = 0
    grants: list[Granted | str | None] = []
    ok: list[bool] = []
    pool_bytes: int = 0


class ConnectionLost(StoreError):
    """The peer has ended, is too slow, or uses another protocol."""


_encoder = msgspec.msgpack.Encoder()
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)


def socket_address(instance: str) -> str:
    """Abstract address of an instance's index: no file, gone with the process that listens."""
    digest = hashlib.sha256(instance.encode()).hexdigest()[:32]
    return f"\0kvoffload-store-{os.geteuid()}-{digest}"


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """(process id, user id) of the peer, as reported by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def send_message(
    connection: socket.socket, message: Request | Reply, deadline: float | None, fd: int | None = None
) -> None:
    """Sends one frame, with a file descriptor if given. Raises ConnectionLost."""
    body = _encoder.encode(message)
    frame = memoryview(_LENGTH.pack(len(body)) + body)
    try:
        _set_timeout(connection, deadline)
        sent = socket.send_fds(connection, [frame], [fd]) if fd is not None else 0
        while sent < len(frame):
            _set_timeout(connection, deadline)
            sent += connection.send(frame[sent:])
    except OSError as error:
        raise ConnectionLost(f"sending: {error}") from error


def receive_body(connection: socket.socket, deadline: float | None) -> bytes:
    """One frame's body. Raises ConnectionLost."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline))
    return _receive(connection, _checked(length), deadline)


def receive_body_with_fd(connection: socket.socket, deadline: float) -> tuple[bytes, int | None]:
    """One frame's body, and the file descriptor that came with its first bytes. Raises ConnectionLost."""
    try:
        _set_timeout(connection, deadline)
        head, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
    except OSError as error:
        raise ConnectionLost(f"receiving: {error}") from error
    try:
        head += _receive(connection, _LENGTH.size - len(head), deadline) if head else b""
        if len(head) < _LENGTH.size:
            raise ConnectionLost("receiving: closed by the other end")
        body = _receive(connection, _checked(_LENGTH.unpack(head)[0]), deadline)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return body, fds[0] if fds else None


def _checked(length: int) -> int:
    if length > MAX_FRAME_BYTES:
        raise ConnectionLost(f"receiving: a message of {length} bytes, at most {MAX_FRAME_BYTES} expected")
    return length


def _receive(connection: socket.socket, nbytes: int, deadline: float | None) -> bytes:
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        try:
            _set_timeout(connection, deadline)
            count = connection.recv_into(view[got:])
        except OSError as error:
            raise ConnectionLost(f"receiving: {error}") from error
        if not count:
            raise ConnectionLost("receiving: closed by the other end")
        got += count
    return bytes(data)


def _set_timeout(connection: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        connection.settimeout(None)
        return
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline exceeded")
    connection.settimeout(left)
