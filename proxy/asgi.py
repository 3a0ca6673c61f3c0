"""The thin part between ASGI and the proxy: bodies in, answers out, clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

import msgspec

from vllm_kvoffload.proxy.errors import JSON, HttpFailure

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
SSE = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed its connection before the request was read."""


def transport_of(send: Send) -> asyncio.WriteTransport | None:
    """The client's connection under uvicorn; None under another server."""
    transport: asyncio.WriteTransport | None = getattr(getattr(send, "__self__", None), "transport", None)
    return transport


async def read_body(receive: Receive, limit: int, deadline: float) -> bytes:
    """The whole body of at most ``limit`` bytes. Raises ``HttpFailure`` and ``ClientGone``."""
    parts, size = [], 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), deadline)
        except asyncio.TimeoutError as error:
            raise HttpFailure.of(408, "the request's body didn't come in time") from error
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise HttpFailure.of(413, f"the body is larger than {limit} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """A whole answer."""
    fields = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def respond_json(send: Send, status: int, value: object) -> None:
    """A whole answer in JSON."""
    await respond(send, status, msgspec.json.encode(value))


async def respond_failure(send: Send, failure: HttpFailure, request_id: bytes | None = None) -> None:
    """The failure as a whole answer."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if failure.retry_after is not None:
        headers += ((b"retry-after", failure.retry_after),)
    if request_id is not None:
        headers += ((b"x-request-id", request_id),)
    await respond(send, failure.status, failure.body, failure.content_type, headers)


def header(scope: Scope, name: bytes) -> str | None:
    """A request header's first value."""
    for key, value in scope["headers"]:
        if key == name:
            decoded: str = value.decode("latin-1")
            return decoded
    return None


class Guard:
    """Cancels the task it was made in when the client goes away, or stops reading for too long.

    ``async with Guard(...) as guard`` swallows that cancellation, and no other; ``guard.reason`` says which.
    """

    def __init__(self, receive: Receive, send: Send, stall_seconds: float) -> None:
        self.reason: str | None = None
        self.finished = False  # the answer is out: the disconnect that servers report then is none
        self.sending = False
        self.sent_bytes = 0  # by which the clock sees progress
        self._receive = receive
        self._send = send
        self._stall = stall_seconds
        self._seen = -1
        self._stalled_at = float("inf")

    async def __aenter__(self) -> Guard:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self._watcher.cancel()
        if kind is None or not issubclass(kind, asyncio.CancelledError) or self.reason is None:
            return False
        if hasattr(self._task, "uncancel"):
            self._task.uncancel()
        return True

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._end("client gone")

    def tick(self, now: float) -> None:
        """Looks whether the client reads; ``now`` in seconds."""
        if not self.sending or self.sent_bytes != self._seen:
            self._seen = self.sent_bytes
            self._stalled_at = now + self._stall
        elif now > self._stalled_at:
            self._end("client stalled")
            # ASGI has no word for this, and uvicorn would wait for ever to send the rest.
            transport = transport_of(self._send)
            if transport is not None:
                transport.abort()

    def _end(self, reason: str) -> None:
        if self.reason is None and not self.finished:
            self.reason = reason
            self._task.cancel()
