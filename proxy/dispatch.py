"""One rendezvous: a request on a decode engine, and the prefill that it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.proxy.balance import LAYOUT_SECONDS, Instance, Load, fits, mismatched
from vllm_kvoffload.proxy.budget import Window
from vllm_kvoffload.proxy.calls import Child
from vllm_kvoffload.proxy.core import Core, Trace, logger
from vllm_kvoffload.proxy.errors import HttpFailure, NoInstanceError, ReceiveError, UpstreamError, is_error
from vllm_kvoffload.proxy.http_client import Connection
from vllm_kvoffload.proxy.jsontext import decode_json
from vllm_kvoffload.proxy.rendezvous import (
    REASON_LIMIT,
    Kind,
    Message,
    Notice,
    Outcome,
    decode_params,
    digest_of,
    external_id,
    new_parent,
)
from vllm_kvoffload.proxy.sanitize import prefill_body
from vllm_kvoffload.proxy.settings import Address
from vllm_kvoffload.proxy.usage import cached_tokens

UNAVAILABLE = frozenset({502, 503, 504})  # statuses that speak against the engine, not against the request
NOTICE_SECONDS = 1.0  # decode's "500" and its notice of the reason travel on two connections
WINDOW = 8 << 20  # bytes of a request's children that are on their way to engines at a time
AT_ONCE = contextlib.nullcontext()
FAILURES = frozenset({"aborted", "rendezvous", "prefill", "read", "mismatch", "deadline"})  # known reasons


@dataclass
class Route:
    """What every dispatch of one client request has in common.

    ``avoid``: engines that failed it. ``window``: of the bytes that its children send at a time.
    """

    core: Core
    kind: Kind
    path: str
    stream: bool
    headers: Sequence[tuple[str, str]]
    trace: Trace
    avoid: set[Address] = field(default_factory=set)
    window: Window | None = None
    children: int = 1

    def hold(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Entered while a child's body is sent."""
        if self.children == 1:
            return AT_ONCE
        self.window = self.window or Window(WINDOW)
        return self.window.hold(size)


class Dispatch:
    """Made, opened once, read through ``connection`` and closed. A prefill failure fails the connection.

    ``fresh``: on a new connection, whose end is always the engine's doing.
    """

    def __init__(self, route: Route, child: Child, *, fresh: bool = False) -> None:
        self.route = route
        self.child = child
        self.parent = new_parent()
        self.request_id = external_id(route.kind, self.parent)
        self.cached_tokens: int | None = None
        self.finished = False  # decode answered all of it
        self._fresh = fresh
        self._secrets = [route.core.settings.metaserver_token.encode()]
        self._core = route.core
        self._connection: Connection | None = None
        self._load: Load | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._prefiller: Instance | None = None  # the last that was asked
        self._failure: Exception | None = None
        self._notice: ReceiveError | None = None
        self._told: asyncio.Event | None = None  # why it failed, where that is waited for
        self._late = False  # prefill's deadline is over
        self._began = time.monotonic()

    @property
    def connection(self) -> Connection:
        """Decode's answer. Only after :meth:`open`."""
        assert self._connection is not None
        return self._connection

    @property
    def decode_address(self) -> Address | None:
        """The engine that decodes."""
        return self._load.instance.address if self._load is not None else None

    async def open(self) -> None:
        """Sends the decode request and waits for its status. Raises ``UpstreamError`` or ``HttpFailure``.

        With a stream that is at once; else it is when everything is done.
        """
        core, deadlines = self._core, self._core.settings.deadlines
        self._load = load = await self._decoder()
        self.route.trace.decode = str(load.instance.address)
        body = dict(self.child.body)
        body["kv_transfer_params"] = decode_params(*core.posts_to)
        core.meetings.expect(self.request_id, self._on_message, self._on_notice)
        first = deadlines.first_output if self.route.stream else deadlines.answer
        async with self.route.hold(self.child.size):
            connection = await core.client.request(
                load.instance.address,
                "POST",
                self.route.path,
                body=msgspec.json.encode(body),
                headers=[*self.route.headers, ("x-request-id", self.parent)],
                first=first,
                idle=deadlines.idle,
                fresh=self._fresh,
            )
        self._connection = connection
        if self.route.children > 1:
            connection.high_water = 0  # what all children hold back together counts
        if self._failure is not None:
            connection.fail(self._failure)
        await connection.start()
        if connection.status in UNAVAILABLE:
            load.instance.health.failed(time.monotonic())
        if connection.status != 200:
            answer = await connection.read_all(core.settings.max_answer_bytes)
            raise await self.cause(_answered_with(connection, self.hidden(answer)))
        connection.expect_output(deadlines.first_output if self.route.stream else deadlines.idle)

    async def _decoder(self) -> Load:
        """A decode engine that fits an available prefill engine: without one it could only time out.

        Raises ``NoInstanceError`` and ``NoFitError``.
        """
        core, now = self._core, time.monotonic()
        prefillers = core.prefillers.available(now)
        if prefillers and not any(p.health.available(now) for p in prefillers):
            # All cool down after failures: decode is asked when one of them accepts connections again.
            reached = await asyncio.gather(*(self._reaches(prefill) for prefill in prefillers))
            prefillers = [p for p, there in zip(prefillers, reached, strict=True) if there]
        if not prefillers:
            raise NoInstanceError("prefill")

        def accept(decode: Instance) -> bool:
            return any(prefill.fits_all or fits(prefill, decode, now) for prefill in prefillers)

        chosen = None if prefillers[0].fits_all else accept
        return core.decoders.acquire(self.child.decode, now, self.route.avoid, chosen)

    async def _reaches(self, instance: Instance) -> bool:
        try:
            await self._core.client.reach(instance.address)
        except UpstreamError:
            instance.health.failed(time.monotonic(), unreachable=True)
            return False
        return True

    async def cause(self, failure: HttpFailure) -> Exception:
        """Why decode answered with ``failure``: prefill's failure, decode's notice, or ``failure`` itself."""
        if failure.status < 500 or not self.prefilled:
            return failure
        if self._failure is None and self._notice is None:
            with contextlib.suppress(asyncio.TimeoutError):
                self._told = self._told or asyncio.Event()
                await asyncio.wait_for(self._told.wait(), NOTICE_SECONDS)
        return self._failure or self._notice or failure

    def hidden(self, text: bytes) -> bytes:
        """An engine's error without the secrets that were in its request, which some vLLM versions quote."""
        for secret in self._secrets:
            if secret:
                text = text.replace(secret, b"...")
        return text

    @property
    def prefilled(self) -> bool:
        """Whether decode asked for a prefill."""
        return self._prefill is not None

    def blame(self, error: UpstreamError) -> bool:
        """Decode's transport failed: the next dispatch goes elsewhere.

        Not where it may have been only an idle connection that closed in the moment it was used. Returns True
        where the request can't have been what made the engine fail.
        """
        if self._load is None or error is self._failure:
            return False  # prefill's failure, which has been blamed on prefill
        if isinstance(error, ReceiveError):
            # A mismatch is remembered of the pair; else it may be either engine's fault.
            if error.failure != "mismatch" and self._prefiller is not None:
                self.route.avoid.add(self._prefiller.address)
            if error.failure == "read":
                self.route.avoid.add(self._load.instance.address)
            return error.failure == "mismatch"
        connection = self._connection
        fresh = connection is None or not connection.reused or connection.status != 0
        if not fresh and not error.deadline and not error.down and not self.prefilled:
            return False
        self.route.avoid.add(self._load.instance.address)
        _failed(self._load.instance, error)
        return False

    def succeeded(self) -> None:
        """Decode answered all of it; a prefill that is still on its way back may end by itself."""
        self.finished = True
        if self._load is None:
            return
        self._load.instance.health.succeeded()
        if self._prefiller is not None and self._failure is None and self._notice is None:
            self._prefiller.proven.add(self._load.instance.address)

    def close(self) -> None:
        """Gives back everything, cancels what is still running. Later calls change nothing."""
        self._core.meetings.forget(self.request_id)
        # Another request may have the connection next: it must not be closed or failed from here again.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._load is not None:
            self._load.release()
        if self._prefill is not None and not self.finished:
            self._prefill.cancel()

    async def prefill_done(self, seconds: float) -> None:
        """Waits until prefill answered, if it was asked: decode may end a moment earlier."""
        if self._prefill is not None and not self._prefill.done():
            await asyncio.wait([self._prefill], timeout=seconds)

    def _on_message(self, message: Message) -> Outcome:
        now = time.monotonic()
        self._core.metrics.rendezvous.observe(now - self._began)
        self._secrets.append(str(message.get("remote_secret") or "").encode(errors="replace"))
        layout = digest_of(message.get("remote_layout"))
        if layout and self._load is not None:
            self._load.instance.learn_layout(layout, now + LAYOUT_SECONDS)
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._prefill = self._core.spawn(self._run_prefill(message))

        def ended(task: asyncio.Task[None]) -> None:
            if not outcome.done():
                outcome.set_result("cancelled" if task.cancelled() else str(self._failure or ""))

        self._prefill.add_done_callback(ended)
        return outcome

    def _on_notice(self, notice: Notice) -> None:
        failure = notice.failure if notice.failure in FAILURES else "other"
        error = printable(self.hidden(notice.error.encode(errors="replace")).decode(), REASON_LIMIT)
        self._core.metrics.receive_failures.labels(failure).inc()
        where = self._prefiller.address if self._prefiller is not None else "prefill"
        logger.warning("proxy: decode didn't get %s from %s: %s", self.request_id, where, error)
        if failure == "mismatch" and self._prefiller is not None and self._load is not None:
            mismatched(self._prefiller, self._load.instance, notice.prefill_layout, time.monotonic())
        self._notice = ReceiveError(f"decode did not get the prompt's KV: {error}", failure)
        self._tell()

    def _tell(self) -> None:
        if self._told is not None:
            self._told.set()

    def _prefill_late(self) -> None:
        assert self._prefill is not None
        self._late = True
        self._prefill.cancel()

    async def _run_prefill(self, message: Message) -> None:
        # A timer of our own: wait_for makes a task, per request.
        seconds = self._core.settings.deadlines.prefill
        timer = asyncio.get_running_loop().call_later(seconds, self._prefill_late)
        try:
            answer = await self._call_prefill(message)
            self.cached_tokens = cached_tokens(answer.get("usage") if isinstance(answer, dict) else None)
            return
        except asyncio.CancelledError:
            if not self._late:
                raise
            self._failure = HttpFailure.of(504, "prefill gave no answer in time", kind="Timeout")
        except (UpstreamError, HttpFailure) as error:
            self._failure = error
        except Exception as error:  # a prefill that failed must never pass for one that didn't
            logger.exception("proxy: prefill of %s", self.request_id)
            self._failure = HttpFailure.of(500, f"the proxy failed at prefill: {error!r}")
        finally:
            timer.cancel()
        self._tell()
        self._core.metrics.prefill_failures.inc()
        logger.warning("proxy: prefill of %s failed: %s", self.request_id, self._failure)
        if self._connection is not None:
            self._connection.fail(self._failure)

    async def _call_prefill(self, message: Message) -> object:
        """The answer of a prefill engine. One that can't be reached is passed over."""
        made = prefill_body(self.child.body, message)
        budget = self._core.settings.max_retries
        while True:
            load = self._prefill_load()
            self.route.trace.prefill = str(load.instance.address)
            try:
                return await self._prefill_on(load, made)
            except UpstreamError as error:
                self.route.avoid.add(load.instance.address)
                _failed(load.instance, error)
                if error.sent or budget <= 0:
                    raise  # prefill may have sent decode some of the KV: only a new request is clean
                budget -= 1
            finally:
                load.release()
            await asyncio.sleep(0.05 if len(self.route.avoid) > 1 else 0)

    def _prefill_load(self) -> Load:
        assert self._load is not None
        now, decode = time.monotonic(), self._load.instance
        load = self._core.prefillers.acquire(
            self.child.prefill, now, self.route.avoid, lambda prefill: fits(prefill, decode, now)
        )
        self._prefiller = load.instance
        return load

    async def _prefill_on(self, load: Load, body: dict[str, Any]) -> object:
        core, deadlines = self._core, self._core.settings.deadlines
        began = time.monotonic()
        connection = await core.exchange(
            load.instance.address,
            "POST",
            self.route.path,
            body=lambda: msgspec.json.encode(body),
            headers=[*self.route.headers, ("x-request-id", self.parent)],
            first=deadlines.prefill,
            idle=deadlines.idle,
            hold=lambda: self.route.hold(self.child.size),
        )
        try:
            answer = await connection.read_all(core.settings.max_answer_bytes)
            if connection.status != 200:
                if connection.status in UNAVAILABLE:
                    load.instance.health.failed(time.monotonic())
                raise _answered_with(connection, self.hidden(answer))
        finally:
            connection.close()
        load.instance.health.succeeded()
        core.metrics.prefill_seconds.observe(time.monotonic() - began)
        try:
            return decode_json(answer)
        except msgspec.DecodeError as error:
            raise HttpFailure.of(502, f"prefill answered something else than JSON: {error}") from error


def _answered_with(connection: Connection, answer: bytes) -> HttpFailure:
    """What the client gets for an answer that isn't 200: an error is the engine's own."""
    if not is_error(connection.status):
        message = f"{connection.address} answered with status {connection.status}"
        return HttpFailure.of(502, message, kind="UpstreamError")
    kind = connection.header(b"content-type", b"application/json")
    return HttpFailure(connection.status, answer, kind, connection.header(b"retry-after") or None)


def _failed(instance: Instance, error: UpstreamError) -> None:
    instance.health.failed(time.monotonic(), unreachable=not error.sent)
    if not error.sent:
        instance.restarted()  # what accepts connections there next is another process
