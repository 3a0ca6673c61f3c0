"""A lean HTTP/1.1 client for engines: keep-alive, streamed answers, a deadline for every wait.

Each connection is an asyncio protocol over llhttp's parser (httptools). The data of one socket read is
passed on as one piece, however many chunks it has: a relay's cost is per piece. A piece that a reader
awaits is offered to the connection's `taker` first, if any: data it accepts wakes no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, cast

import httptools

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.proxy.errors import UpstreamError
from vllm_kvoffload.proxy.settings import Address

logger = get_logger(__name__)

Headers = list[tuple[bytes, bytes]]
KEEP_IDLE = 3.0  # seconds; less than uvicorn's 5, so that a reused connection is rarely closing
HIGH_WATER = 256 << 10  # bytes buffered for a slow client before reading stops
HEAD_LIMIT = 64 << 10  # bytes of an answer's heads, including 1xx, and of its trailers
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
LARGE = 64 << 10  # request size from which the writer waits for the engine to read


def keep_alive(sock: Any) -> None:
    """Turns on TCP keep-alive, which ends exchanges with a machine that restarted."""
    if sock is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class AnswerPhase(IntEnum):
    """How much of the answer has arrived.

    WAITING: no status yet. BODY: status and headers. WHOLE: all of it; the connection takes no other
    request. REUSABLE: all of it; the connection may take another.
    """

    WAITING = 0
    BODY = 1
    WHOLE = 2
    REUSABLE = 3


WAITING, BODY, WHOLE, REUSABLE = AnswerPhase  # Enum attribute access is slow


class EngineConnection(asyncio.Protocol):
    """One connection and its current exchange. Created and taken back by :class:`Client`."""

    def __init__(self, client: Client, address: Address, loop: asyncio.AbstractEventLoop) -> None:
        self.address = address
        self.reused = False
        self.idle_since = 0.0
        self.deadline = float("inf")
        self.touched = False
        self._client = client
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._idle_timeout = 0.0
        self._drained: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parser: Any = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: Headers = []
        self._phase = WAITING
        self._paused = False
        self._behind = False  # reading was paused at the last tick: buffered data may be old
        self._error: Exception | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._bare = 0  # bytes without body since the last body data: heads, trailers
        self.high_water = HIGH_WATER
        self._waiter: asyncio.Future[None] | None = None
        self.taker: Callable[[bytes], bool] | None = None

    # asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        keep_alive(transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        if self._phase >= WHOLE:
            return
        if self._phase is BODY and not self._has_length():
            self._phase = WHOLE  # such a body ends with its connection
            self._wake()
        else:
            self.fail(
                UpstreamError(f"{self.address} closed the connection: {exc or 'end of file'}", sent=True)
            )

    def pause_writing(self) -> None:
        self._drained = self._drained or self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.touched = True
        if self._phase >= WHOLE:
            self._abort()  # unsolicited data must not become the next request's answer
            return
        before = self._size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._phase < WHOLE:
                self._end(f"{self.address} sent no HTTP: {error}")
                return
            self._phase = WHOLE  # the answer stands, but the connection cannot be reused
        if self._phase is not WAITING and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)  # early answer: the engine may not read the rest of the request
        if self._size != before:
            self._bare = 0
        elif self._phase < WHOLE:
            # The parser buffers a field until its end; no valid answer has more non-body data.
            self._bare += len(data)
            if self._bare > HEAD_LIMIT:
                self._end(f"{self.address} sent more than {HEAD_LIMIT} bytes of header fields")
                return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            try:
                if self.taker is not None and self._taken(self.taker):
                    return
            except Exception as error:
                # The transport would log it and close; this way the request gets the reason.
                logger.exception("proxy: passing on output of %s failed", self.address)
                self._end(f"output of {self.address} could not be passed on: {error!r}")
                return
            waiter.set_result(None)
        if self._size > self.high_water and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _taken(self, taker: Callable[[bytes], bool]) -> bool:
        """Whether the taker accepted all data, so that the reader need not wake."""
        parts = self._parts
        if parts:
            if not taker(parts[0] if len(parts) == 1 else b"".join(parts)):
                return False
            parts.clear()
            self._size = 0
        return self._phase < WHOLE

    # httptools' parser

    def on_message_begin(self) -> None:
        if self._phase >= WHOLE:
            raise ValueError("a second answer")

    def on_status(self, _status: bytes) -> None:
        pass

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is WAITING:  # trailers are ignored
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 1xx responses precede the answer
            self.headers = []
            return
        self.status = status
        self._phase = BODY

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        if self._phase is BODY:
            self._phase = REUSABLE if self._parser.should_keep_alive() else WHOLE

    # the exchange

    def _has_length(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _end(self, reason: str) -> None:
        self._parts.clear()
        self.fail(UpstreamError(reason, sent=True))
        self._abort()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, *, first: float, idle: float) -> None:
        """Writes a whole request. ``first`` and ``idle``: seconds until the answer, and between its parts."""
        if self._phase is not WAITING:
            self._reset()
        if self._transport is None:
            raise UpstreamError(f"{self.address} closed the connection", sent=False)
        self.touched = False
        self.deadline = self._loop.time() + first
        self._idle_timeout = idle
        self._transport.write(request)

    async def flushed(self) -> None:
        """Waits until the engine has read most of the request or begun to answer, or the exchange failed."""
        if self._drained is not None and self._error is None:
            await self._drained

    def tick(self, now: float) -> None:
        """Called by the client's clock: extends the deadline after activity, fails the exchange past it."""
        if self.touched and self._phase is not WAITING:
            self._heard(now)
            self.touched = False
            self.deadline = now + self._idle_timeout
        elif self._paused:
            self.deadline = now + self._idle_timeout  # the reader is keeping the engine waiting
        elif now > self.deadline and self._phase < WHOLE:
            self.fail(UpstreamError(f"{self.address} gave no answer in time", sent=True, deadline=True))
            self._abort()
        self._behind = self._paused

    def _heard(self, now: float) -> None:
        """Counts the engine as alive if data arrived since the last tick that was not delayed by the
        reader."""
        if self.touched and self._phase is not WAITING and not self._behind and not self._paused:
            self._client.heard[self.address] = now

    def expect_output(self, seconds: float) -> None:
        """Allows ``seconds`` until the next part: a stream's first event may come long after its headers."""
        self.touched = False
        self.deadline = self._loop.time() + seconds

    def fail(self, error: Exception) -> None:
        """Ends the exchange: ``start`` and ``read`` raise ``error`` after delivering earlier data."""
        if self._error is None and self._phase < WHOLE:
            self._error = error
            self._wake()
            self.resume_writing()

    async def start(self) -> None:
        """Waits for status and headers. Raises ``UpstreamError``."""
        while self._phase is WAITING:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """Returns the next piece of the body; empty at its end. Raises ``UpstreamError``."""
        parts = self._parts
        while not parts:
            if self._error is not None:
                raise self._error
            if self._phase >= WHOLE:
                return b""
            self._waiter = self._loop.create_future()  # as in _wait, inlined: this runs per token
            try:
                await self._waiter
            finally:
                self._waiter = None
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._size = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def read_all(self, limit: int) -> bytes:
        """Returns the whole body. Raises ``UpstreamError``, also if it is larger than ``limit`` bytes."""
        parts, size = [], 0
        while data := await self.read():
            size += len(data)
            if size > limit:
                self._abort()
                raise UpstreamError(f"{self.address} answered more than {limit} bytes", sent=True, final=True)
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def header(self, name: bytes, default: bytes = b"") -> bytes:
        """Returns the first value of a header; ``name`` in lower case."""
        return next((value for key, value in self.headers if key == name), default)

    def close(self) -> None:
        """Ends the exchange: an engine that is still answering sees a disconnect."""
        self.taker = None
        self._heard(self._loop.time())  # a short answer ends before any tick
        whole = self._phase is REUSABLE and not self._parts and self._drained is None
        self._client.give_back(self, reusable=whole)

    def abort(self) -> None:
        """Closes the connection at once."""
        self._abort()


def request_bytes(
    method: str, path: str, authority: str, headers: Sequence[tuple[str, str]], body: bytes
) -> bytes:
    """Formats a whole request. Raises ``ValueError`` for a header with a line end in it."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {authority}"]
    for name, value in headers:
        lines.append(f"{name}: {value}")
    if method == "POST":
        lines.append(f"content-length: {len(body)}\r\ncontent-type: application/json")
    head = "\r\n".join(lines)
    ends = len(lines) - (method != "POST")
    if head.count("\r") != ends or head.count("\n") != ends:
        raise ValueError("a header has a line end in it")
    return b"%b\r\n\r\n%b" % (head.encode("latin-1"), body)


class Client:
    """Connections to all engines. Belongs to one event loop; call :meth:`open` before use."""

    def __init__(self, connect_timeout: float, tick: float = 0.5, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._tick_seconds = tick
        self._idle: dict[Address, deque[EngineConnection]] = {}
        self._busy: set[EngineConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._each_tick: list[Callable[[float], None]] = []
        self.heard: dict[Address, float] = {}  # when data of a running answer was last seen
        self.tick_errors = 0

    def open(self) -> None:
        """Starts the clock for deadlines."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)

    def on_tick(self, call: Callable[[float], None]) -> None:
        """Registers ``call``, which gets the loop's time at every tick: a clock for other deadlines."""
        self._each_tick.append(call)

    @property
    def connections(self) -> tuple[int, int]:
        """Numbers of busy and idle connections."""
        return len(self._busy), sum(len(queue) for queue in self._idle.values())

    async def request(
        self,
        address: Address,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
        first: float,
        idle: float,
        fresh: bool = False,
    ) -> EngineConnection:
        """Sends a request; read the answer from the connection, and close it in the end.

        ``fresh``: use a new connection. Raises ``UpstreamError``.
        """
        try:
            message = request_bytes(method, path, address.authority, headers, body)
        except UnicodeError as error:  # from a host that was never validated
            raise UpstreamError(f"no connection to {address}: {error}", sent=False) from error
        connection = None if fresh else self._take(address)
        if connection is None:
            connection = await self._connect(address)
        self._busy.add(connection)
        try:
            connection.send(message, first=first, idle=idle)
            if len(message) > LARGE:
                del message, body
                await connection.flushed()
        except BaseException:
            self.give_back(connection, reusable=False)
            raise
        return connection

    async def reach(self, address: Address) -> None:
        """Checks that an engine accepts connections; the next request uses this connection.

        Raises ``UpstreamError``.
        """
        connection = self._take(address)
        if connection is None:
            connection = await self._connect(address)
            connection.idle_since = self._loop.time()
        self._idle.setdefault(address, deque()).append(connection)

    def _take(self, address: Address) -> EngineConnection | None:
        queue = self._idle.get(address)
        oldest = self._loop.time() - KEEP_IDLE
        while queue:
            connection = queue.pop()
            if connection.usable and connection.idle_since >= oldest:
                connection.reused = True
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address) -> EngineConnection:
        def make() -> EngineConnection:
            return EngineConnection(self, address, self._loop)

        try:
            _, connection = await asyncio.wait_for(
                self._loop.create_connection(make, address.host, address.port, ssl=self._tls),
                self._connect_timeout,
            )
        except asyncio.TimeoutError as error:
            raise UpstreamError(f"no connection to {address}: no answer in time", sent=False) from error
        except Exception as error:
            # The resolver may also reject a name with UnicodeError or ValueError.
            raise UpstreamError(f"no connection to {address}: {error or repr(error)}", sent=False) from error
        return connection

    def give_back(self, connection: EngineConnection, *, reusable: bool) -> None:
        """Ends an exchange; closes the connection if it cannot be reused."""
        if connection not in self._busy:
            return
        self._busy.discard(connection)
        if reusable and connection.usable:
            connection.idle_since = self._loop.time()
            self._idle.setdefault(connection.address, deque()).append(connection)
        else:
            connection.abort()

    def forget(self, address: Address) -> None:
        """Closes idle connections to an engine that was removed."""
        for connection in self._idle.pop(address, ()):
            connection.abort()

    def fail(self, address: Address, reason: str) -> int:
        """Fails every exchange with an engine that probes found down; returns their number."""
        ended = [c for c in self._busy if c.address == address]
        for connection in ended:
            connection.fail(UpstreamError(reason, sent=True, down=True))
            connection.abort()
        self.forget(address)
        self.heard.pop(address, None)
        return len(ended)

    def heard_since(self, address: Address, since: float) -> bool:
        """Whether a running answer received data after ``since`` (loop time), as of the last tick."""
        return self.heard.get(address, float("-inf")) - self._tick_seconds > since

    def _tick(self) -> None:
        now = self._loop.time()
        self._timer = self._loop.call_later(self._tick_seconds, self._tick)
        calls = [connection.tick for connection in self._busy]
        for call in (*calls, self._drop_old, *self._each_tick):
            try:
                call(now)
            except Exception:  # one failing callback must not stop the others' clock
                self.tick_errors += 1
                if self.tick_errors.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...
                    logger.exception("proxy: a tick failed, %d so far", self.tick_errors)

    def _drop_old(self, now: float) -> None:
        for address, queue in list(self._idle.items()):
            while queue and (queue[0].idle_since < now - KEEP_IDLE or not queue[0].usable):
                queue.popleft().abort()
            if not queue:
                del self._idle[address]

    def close(self) -> None:
        """Stops the clock and closes every connection."""
        if self._timer is not None:
            self._timer.cancel()
        for connection in [*self._busy, *(c for queue in self._idle.values() for c in queue)]:
            connection.abort()
        self._busy.clear()
        self._idle.clear()
