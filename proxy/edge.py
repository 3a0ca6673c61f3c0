"""The HTTP front end of the proxy: enforces limits, framing and deadlines before the application runs.

uvicorn's protocol parses HTTP with llhttp. :class:`Edge` passes it one complete request head at a time,
within the limits, then exactly that request's body. So a head costs memory only for its own bytes,
pipelined requests wait as bytes instead of tasks, and an ignored ``Upgrade`` cannot shift the start of the
next request. All work is per request, none per token.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from enum import Enum
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.log import RateLimitedLog
from vllm_kvoffload.proxy.chunks import ChunkError, Chunks
from vllm_kvoffload.proxy.cork import cork
from vllm_kvoffload.proxy.errors import error_body
from vllm_kvoffload.proxy.settings import ProxySettings

RESERVE = 64  # connections beyond the cap, for these paths only
RESERVED = re.compile(rb"/health(check)?(\?|$)|/metrics(\?|$)|/v1/metaserver|/admin")
AHEAD = 64 << 10  # bytes of pipelined requests read while one is running
LINGER = 2.0  # seconds in which the rest of a refused request is discarded, so that the answer arrives
LINGER_BYTES = 256 << 20
STALL_SLACK = 1.0  # seconds; the application's own check for clients that do not read comes first
LOG_PERIOD = 10.0  # seconds between two log lines of a kind that clients can trigger
REST = 5.0  # seconds for the rest of a body whose request was already answered
REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~\x80-\xff]+) HTTP/(\d)\.(\d)\r\n")
# Bytes forbidden in any head: checked on arrival, since such a head may never end.
BROKEN = re.compile(rb"(?<!\r)\n|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
UPGRADE = re.compile(rb"(?<=\r\n)upgrade(?=:)", re.IGNORECASE)
IGNORED = b"ignored"  # as long as "upgrade"


class MessagePhase(Enum):
    """State of a connection's input: the kind of data that the next byte belongs to."""

    HEAD = 0
    LENGTH = 1  # a body with content-length
    CHUNKED = 2
    OVER = 3  # nothing more is read on this connection


HEAD, LENGTH, CHUNKED, OVER = MessagePhase  # Enum attribute access is slow


class EdgeRefusal(Exception):
    """A request rejected by the front end. The connection ends with it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Door:
    """State shared by the connections of one port: limits, idle connections, log lines."""

    def __init__(self, settings: ProxySettings) -> None:
        self.limits = settings.limits
        self.head_seconds = settings.deadlines.head
        self.stall_seconds = settings.deadlines.client_stall
        self.waiting: dict[Edge, None] = {}  # without a complete request, oldest first
        self._log = RateLimitedLog(__name__, period_s=LOG_PERIOD)

    def refused(self, client: object, refusal: EdgeRefusal) -> None:
        """Logs a refusal."""
        text = printable(str(refusal))
        self._log.warning("refused", f"proxy: {refusal.status} to a request from {client}: {text}")

    def full(self, connections: int) -> None:
        """Logs that the connection limit is reached."""
        text = (
            f"proxy: {connections} connections are open, of --max-connections {self.limits.connections};"
            " those between requests are closed for new ones, and where there are none new requests get 503"
        )
        self._log.warning("full", text)


class _LastAnswer:
    """Transport that uvicorn sees for a connection's last answer: closes once the request was read."""

    def __init__(self, connection: Edge, transport: Any) -> None:
        self._connection = connection
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._connection.last_answered()


class Edge(HttpToolsProtocol):
    """One connection. Bind it to a port with :func:`edge`."""

    door: Door

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._buffer = bytearray()
        self._searched = 0  # bytes of the buffer already searched for the end of a head
        self._phase = HEAD
        self._left = 0
        self._chunks: Chunks | None = None
        self._old = False  # HTTP/1.0
        self._complete = False
        self._why: EdgeRefusal | None = None
        self._reserved = False
        self._head_timed = True
        self._lingered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    # asyncio's protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.door.waiting[self] = None
        self._arm(self.door.head_seconds, self._head_late)
        count, cap = len(self.connections), self.door.limits.connections
        if count <= cap:
            return
        self.door.full(count)
        oldest = next(iter(self.door.waiting))
        if oldest is not self:
            oldest._close()
        elif count <= cap + RESERVE:
            self._reserved = True
        else:
            transport.write(
                self._refusal_bytes(EdgeRefusal(503, "the proxy has no room for more connections"))
            )
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = OVER
        self._buffer.clear()
        self.door.waiting.pop(self, None)
        self._disarm()
        if self._stalled is not None:
            self._stalled.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._tell_gone()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        phase = self._phase
        if phase is LENGTH and not self._buffer and len(data) <= self._left:
            self._attempt(self._length, data)
        elif phase is HEAD and not self._buffer and (end := self._whole_head(data)) > 0:
            self._attempt(self._whole, data, end)
        elif phase is OVER:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self.transport.abort()
        else:
            self._buffer += data
            self._consume()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch_writing(self, before: int | None = None) -> None:
        """Closes a connection whose client reads nothing. ``before``: bytes unsent a while ago."""
        waiting = self.transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            self.transport.abort()
            return
        seconds = self.door.stall_seconds + STALL_SLACK
        self._stalled = self.loop.call_later(seconds, self._watch_writing, waiting)

    # deadlines

    def _arm(self, seconds: float, call: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, call)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_late(self) -> None:
        self._timer = None
        if self._buffer.strip(b"\r\n"):
            self._refuse(
                EdgeRefusal(408, f"the request's head didn't come in {self.door.head_seconds:g} seconds")
            )
        else:
            self._close()

    def _close(self) -> None:
        """Closes the connection; written data is still sent, within a deadline."""
        self._phase = OVER
        self.door.waiting.pop(self, None)
        self._unset_keepalive_if_required()
        self.transport.close()
        self._arm(self.door.stall_seconds, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """Called by uvicorn: idle for too long after an answer."""
        if not self.transport.is_closing():
            self._close()

    # from bytes to requests

    @property
    def _busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _attempt(self, work: Callable[..., None], *arguments: Any) -> None:
        """Calls ``work``; refuses the request if it raises."""
        try:
            work(*arguments)
        except (EdgeRefusal, ChunkError) as error:
            self._refuse(error if isinstance(error, EdgeRefusal) else EdgeRefusal(400, str(error)))

    def _consume(self) -> None:
        """Processes as much of the buffer as possible."""
        self._attempt(self._take)

    def _take(self) -> None:
        while self._buffer and self._step():
            pass

    def _whole_head(self, data: bytes) -> int:
        """Returns the end of the head at the start of ``data`` if it can be handled at once, else 0 or
        less."""
        if self._busy or data[0] in b"\r\n":
            return 0
        found = data.find(b"\r\n\r\n", 0, self.door.limits.head_bytes)
        return found + 4 if found >= 0 else 0

    def _whole(self, data: bytes, end: int) -> None:
        """Fast path: one socket read holds a request's head and body."""
        self._request(data[:end])
        rest = data[end:]
        if not rest:
            return
        if self._phase is LENGTH and len(rest) <= self._left:
            self._length(rest)
            return
        self._buffer += rest
        self._take()

    def _step(self) -> bool:
        """Returns whether anything was consumed. Raises ``EdgeRefusal`` and ``ChunkError``."""
        if self._phase is HEAD:
            return self._head()
        if self._phase is LENGTH:
            self._length(self._cut(min(self._left, len(self._buffer))))
            return True
        if self._phase is CHUNKED and self._chunks is not None:
            taken, ends = self._chunks.take(self._buffer)
            if not taken:
                return False
            self._feed(self._cut(taken))
            if ends is not self._complete:
                raise EdgeRefusal(400, "a chunked body ends where it can't")
            self._body_over()
            return True
        self._buffer.clear()
        return False

    def _cut(self, size: int) -> bytes:
        front = bytes(self._buffer[:size])
        del self._buffer[:size]
        return front

    def _length(self, data: bytes) -> None:
        self._left -= len(data)
        self._feed(data)
        self._body_over()

    def _body_over(self) -> None:
        if self._complete and self._phase is not OVER:
            self._phase = HEAD
            if not self._busy:  # answered before its body arrived
                self._between()
                self._arm(self.timeout_keep_alive, self._close)

    def _head(self) -> bool:
        buffer = self._buffer
        if self._busy:
            if len(buffer) > AHEAD:
                self.flow.pause_reading()
            return False
        if not self._head_timed:
            self._head_timed = True
            self._arm(self.door.head_seconds, self._head_late)
        while buffer.startswith(b"\r\n"):  # allowed between requests
            del buffer[:2]
            self._searched = 0
        start = max(0, self._searched - 3)
        end = buffer.find(b"\r\n\r\n", start, self.door.limits.head_bytes)
        if end < 0:
            if BROKEN.search(buffer, self._searched):
                raise EdgeRefusal(400, "no HTTP request: a control character or a bare line end in its head")
            self._searched = len(buffer)
            self._check_beginning()
            return False
        self._searched = 0
        self._request(self._cut(end + 4))
        return True

    def _check_beginning(self) -> None:
        """Raises ``EdgeRefusal`` if an incomplete head already exceeds the limits."""
        limits = self.door.limits
        if b"\r\n" not in self._buffer[: limits.uri_bytes + 64] and len(self._buffer) > limits.uri_bytes + 64:
            raise EdgeRefusal(414, f"the request's target has more than {limits.uri_bytes} bytes")
        if len(self._buffer) >= limits.head_bytes:
            raise EdgeRefusal(431, f"the request's head has more than {limits.head_bytes} bytes")

    def _request(self, head: bytes) -> None:
        """Handles one complete head. Raises ``EdgeRefusal``."""
        limits = self.door.limits
        line = REQUEST_LINE.match(head)
        if line is None:
            raise EdgeRefusal(400, "no HTTP request: its first line is none")
        method, target = line[1], line[2]
        if len(target) > limits.uri_bytes or line.end() > limits.uri_bytes + 64:
            raise EdgeRefusal(414, f"the request's target has more than {limits.uri_bytes} bytes")
        if head.count(b"\n") - 2 > limits.head_fields:
            raise EdgeRefusal(431, f"the request's head has more than {limits.head_fields} fields")
        if line[3] != b"1" or line[4] not in b"01":
            raise EdgeRefusal(505, "only HTTP/1.1 and 1.0 are spoken here")
        if method == b"CONNECT":
            raise EdgeRefusal(405, "no tunnels here")
        if self._reserved and not RESERVED.match(target):
            raise EdgeRefusal(503, "the proxy has no room for more connections")
        if self._timer is not None:
            self._disarm()
        self._head_timed = False
        self.door.waiting.pop(self, None)
        self._old = line[4] == b"0"
        if b"upgrade:" in head.lower():
            head = UPGRADE.sub(IGNORED, head)
        self._feed(head)
        if self._complete:
            self._body_over()

    def _feed(self, data: bytes) -> None:
        """Passes data to llhttp. Raises ``EdgeRefusal``."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserInvalidMethodError as error:
            raise EdgeRefusal(501, "an unknown method; methods are in capitals") from error
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            why, self._why = self._why, None
            raise why or EdgeRefusal(400, f"no HTTP request: {error}") from error

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        """Called at the start of a head."""
        self._complete = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Determines the body's framing before uvicorn starts the application. llhttp rejects
        contradictions."""
        length, coding = 0, None
        for name, value in self.headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                coding = value.strip().lower() if coding is None else coding + b"," + value
        if coding is None:
            self._left, self._phase = length, LENGTH
        else:
            self._begin_chunked(coding)
        if self._old:
            self.expect_100_continue = False
        super().on_headers_complete()
        self.headers = []  # collects trailers, which are not request fields
        cycle: Any = self.cycle
        cycle.gone = None  # callback set by `Guard` for a client disconnect
        if self._reserved:
            cycle.keep_alive = False
        transport: Any = self.transport if cycle.keep_alive else _LastAnswer(self, self.transport)
        cork(cycle, transport)

    def _begin_chunked(self, coding: bytes) -> None:
        if self._old or coding != b"chunked":
            old, other = "HTTP/1.0 has no transfer-encoding", "no transfer-encoding is known but chunked"
            self._why = EdgeRefusal(400, old) if self._old else EdgeRefusal(501, other)
            raise self._why
        self._phase, self._chunks = CHUNKED, Chunks(self.door.limits.head_bytes)

    def on_message_complete(self) -> None:
        """Called when the body is complete."""
        self._complete = True
        super().on_message_complete()

    # answers

    def on_response_complete(self) -> None:
        """Called when an answer is written: continues with the next request."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._phase is HEAD:
            self._between()
            if self._buffer:
                self._consume()
        elif self._phase is not OVER:
            self._arm(REST, self._close)

    def _between(self) -> None:
        """Marks the connection as idle."""
        if self._timer is not None:
            self._disarm()
        self.door.waiting[self] = None

    def _tell_gone(self) -> None:
        gone = getattr(self.cycle, "gone", None)
        if gone is not None:
            gone()

    def _refuse(self, refusal: EdgeRefusal) -> None:
        """Sends the refusal and closes; if an answer has begun, only closes."""
        self.door.refused(self.client[0] if self.client else "-", refusal)
        self._phase = OVER
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started:
                cycle.keep_alive = False
                return
            cycle.disconnected = True  # discard further output of its application
            cycle.waiting_for_100_continue = False  # which uvicorn would still write, after the end of file
            cycle.message_event.set()
            self._tell_gone()
        self.transport.write(self._refusal_bytes(refusal))
        self._linger()

    def last_answered(self) -> None:
        """Called when the connection's last answer is written."""
        if self._phase is LENGTH or self._phase is CHUNKED:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Closes a connection whose client may still be sending: a reset would discard the answer."""
        self._phase = OVER
        self._buffer.clear()
        self.door.waiting.pop(self, None)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._arm(LINGER, self.transport.abort)
        else:
            self._arm(LINGER, self._close)

    def _refusal_bytes(self, refusal: EdgeRefusal) -> bytes:
        body = error_body(refusal.status, printable(str(refusal)))
        fields = [*self.server_state.default_headers, (b"content-type", b"application/json")]
        fields += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        if refusal.status == 503:
            fields.append((b"retry-after", b"1"))
        head = b"".join(b"%b: %b\r\n" % field for field in fields)
        return b"%b%b\r\n%b" % (STATUS_LINE[refusal.status], head, body)


def edge(settings: ProxySettings) -> type[Edge]:
    """Returns the protocol class for one port."""

    class Bound(Edge):
        door = Door(settings)

    return Bound
