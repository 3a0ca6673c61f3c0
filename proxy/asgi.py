"""A thin layer between ASGI and the proxy: reads bodies, writes answers, notices clients that disconnect."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

import msgspec

from vllm_kvoffload.proxy.budget import ByteBudget
from vllm_kvoffload.proxy.cork import Cork
from vllm_kvoffload.proxy.errors import JSON, HttpFailure

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
FREE_BYTES = 64 << 10  # of each body, which are not counted while it is read
SLOWEST = 128 << 10  # minimum bytes a second of a long upload, and of a forwarded answer
SSE = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed its connection before the request was read."""


def transport_of(send: Send) -> asyncio.WriteTransport | None:
    """The client's connection under uvicorn; None under another server."""
    transport: Any = getattr(getattr(send, "__self__", None), "transport", None)
    found: asyncio.WriteTransport | None = transport.behind if type(transport) is Cork else transport
    return found


class Hold:
    """A request's share of a byte budget. Return it with :meth:`release`.

    ``free``: uncounted bytes, so that short posts pass while large ones fill the budget.
    """

    def __init__(self, budget: ByteBudget, free: int = 0) -> None:
        self._budget = budget
        self._free = free
        self._held = 0

    def need(self, size: int) -> None:
        """Reserves ``size`` bytes in all. Raises ``HttpFailure``: 413 if they can never fit, 503 if not
        now."""
        more = size - self._free - self._held
        if more <= 0:
            return
        if size - self._free > self._budget.limit:
            raise HttpFailure.of(
                413, f"the request needs more than the {self._budget.limit} bytes for all requests"
            )
        if not self._budget.take(more):
            raise HttpFailure.of(
                503, "too much memory is in use by other requests", kind="ServiceUnavailable"
            )
        self._held += more

    def release(self) -> None:
        """Returns the share to the budget."""
        self._budget.give(self._held)
        self._held = 0


def _has_come(receive: Receive) -> bool:
    """Whether uvicorn already holds the next message, so that no wait (and no deadline task) is needed."""
    event = getattr(getattr(receive, "__self__", None), "message_event", None)
    return event is not None and event.is_set()


async def read_body(receive: Receive, limit: int, deadline: float, hold: Hold | None = None) -> bytes:
    """Reads the whole body of at most ``limit`` bytes. Raises ``HttpFailure`` and ``ClientGone``.

    ``deadline``: seconds per part, and for the whole body beyond its time at ``SLOWEST`` bytes a second.
    """
    parts, size = [], 0
    began = time.monotonic()
    while True:
        left = began + deadline + size / SLOWEST - time.monotonic()
        try:
            if left > 0 and _has_come(receive):
                message = await receive()
            else:
                message = await asyncio.wait_for(receive(), min(deadline, left))
        except asyncio.TimeoutError as error:
            raise HttpFailure.of(408, "the request's body didn't come in time") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise HttpFailure.of(413, f"the body is larger than {limit} bytes")
        if hold is not None:
            hold.need(size)
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def check_length(scope: Scope, limit: int) -> None:
    """Raises ``HttpFailure`` for a body whose declared length is too large, before reading it."""
    length = header(scope, b"content-length")
    if length is not None and length.isdecimal() and (len(length) > 18 or int(length) > limit):
        raise HttpFailure.of(413, f"the body is larger than {limit} bytes")


def check_content_type(scope: Scope) -> None:
    """Raises ``HttpFailure`` for a body that isn't declared as JSON, as vLLM does."""
    given = (header(scope, b"content-type") or "").lower()
    if given.partition(";")[0] != "application/json":
        raise HttpFailure.of(400, "Unsupported Media Type: Only 'application/json' is allowed")


def is_gone(send: Send) -> bool:
    """Whether the client has disconnected, which explains a failed write."""
    transport = transport_of(send)
    return transport is None or transport.is_closing()


class Keys:
    """The accepted API keys, checked as in vLLM's server. Without keys every client is accepted."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, scope: Scope) -> None:
        """Raises ``HttpFailure`` with 401 for a missing or wrong key."""
        if not self._digests:
            return
        scheme, _, given = (header(scope, b"authorization") or "").partition(" ")
        digest = hashlib.sha256(given.encode("latin-1")).digest()
        # No early exit: the time taken must not reveal which key matches.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or True not in found:
            raise HttpFailure.of(401, "wrong or missing API key", kind="AuthenticationError")


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """Sends a complete answer."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def flushed(send: Send, seconds: float) -> None:
    """Waits until the client has read nearly all of an answer, or is gone; cuts it off after ``seconds``."""
    flow = getattr(getattr(send, "__self__", None), "flow", None)
    if flow is None or not flow.write_paused:
        return
    try:
        await asyncio.wait_for(flow.drain(), seconds)
    except asyncio.TimeoutError:
        transport = transport_of(send)
        if transport is not None:
            transport.abort()


async def respond_json(send: Send, status: int, value: object) -> None:
    """Sends a complete JSON answer."""
    await respond(send, status, msgspec.json.encode(value))


async def respond_failure(send: Send, failure: HttpFailure, request_id: bytes | None = None) -> None:
    """Sends a failure as a complete answer."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if failure.retry_after is not None:
        headers += ((b"retry-after", failure.retry_after),)
    if request_id is not None:
        headers += ((b"x-request-id", request_id),)
    await respond(send, failure.status, failure.body, failure.content_type, headers)


def header(scope: Scope, name: bytes) -> str | None:
    """Returns the first value of a request header."""
    for key, value in scope["headers"]:
        if key == name:
            decoded: str = value.decode("latin-1")
            return decoded
    return None


class Guard:
    """Cancels the task that created it when the client disconnects or stops reading for too long.

    ``async with Guard(...) as guard`` swallows that cancellation only; ``guard.reason`` gives the cause.
    """

    def __init__(self, receive: Receive, send: Send, stall_seconds: float) -> None:
        self.reason: str | None = None
        self.finished = False  # the answer is sent: the disconnect that servers then report is not one
        self.sending = False
        self.sent_bytes = 0  # lets the clock see progress
        self._receive = receive
        self._send = send
        # Under our own server the connection calls back; other servers are polled by a task.
        cycle: Any = getattr(send, "__self__", None)
        self._cycle = cycle if hasattr(cycle, "gone") else None
        self._watcher: asyncio.Task[None] | None = None
        self._stall = stall_seconds
        self._seen = -1
        self._stalled_at = float("inf")
        self._cancels = 0

    async def __aenter__(self) -> Guard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        cycle = self._cycle
        if cycle is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())
            return self
        cycle.gone = self._client_gone
        cycle.flow.resume_reading()  # a disconnect is noticed only by reading
        if cycle.disconnected:
            self._client_gone()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        if self._watcher is not None:
            self._watcher.cancel()
        if self._cycle is not None:
            self._cycle.gone = None
        if kind is None or not issubclass(kind, asyncio.CancelledError) or self.reason is None:
            return False
        for _ in range(self._cancels if hasattr(self._task, "uncancel") else 0):
            self._task.uncancel()
        return True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone()

    def _client_gone(self) -> None:
        self._end("client gone")

    def tick(self, now: float) -> None:
        """Checks whether the client is reading; ``now`` in seconds."""
        if self.reason is not None:
            self._cancel()  # asyncio.wait_for may swallow the first cancellation
        elif not self.sending or self.sent_bytes != self._seen:
            self._seen = self.sent_bytes
            self._stalled_at = now + self._stall
        elif now > self._stalled_at:
            self._end("client stalled")
            # ASGI has no message for this, and uvicorn would wait forever to send the rest.
            transport = transport_of(self._send)
            if transport is not None:
                transport.abort()

    def _end(self, reason: str) -> None:
        if self.reason is None and not self.finished:
            self.reason = reason
            self._cancel()

    def _cancel(self) -> None:
        self._cancels += 1
        self._task.cancel()
