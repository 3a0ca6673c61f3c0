"""One dispatch: a request on a decode engine, and the prefill that it requests."""

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
from vllm_kvoffload.proxy.calls import SubRequest
from vllm_kvoffload.proxy.core import Core, Trace, logger
from vllm_kvoffload.proxy.errors import HttpFailure, NoInstanceError, ReceiveError, UpstreamError, is_error
from vllm_kvoffload.proxy.http_client import EngineConnection
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

UNAVAILABLE = frozenset({502, 503, 504})  # statuses caused by the engine, not by the request
NOTICE_SECONDS = 1.0  # decode's 500 and its failure notice travel on two connections
WINDOW = 8 << 20  # bytes of a request's sub-requests in transit to engines at a time
AT_ONCE = contextlib.nullcontext()
FAILURES = frozenset({"aborted", "rendezvous", "prefill", "read", "mismatch", "deadline"})  # known values


@dataclass
class Route:
    """State shared by all dispatches of one client request.

    ``avoid``: engines that failed it. ``window``: limits the bytes its sub-requests send at a time.
    """

    core: Core
    kind: Kind
    path: str
    stream: bool
    headers: Sequence[tuple[str, str]]
    trace: Trace
    avoid: set[Address] = field(default_factory=set)
    window: Window | None = None
    sub_requests: int = 1

    def hold(self, size: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Entered while a sub-request's body is sent."""
        if self.sub_requests == 1:
            return AT_ONCE
        self.window = self.window or Window(WINDOW)
        return self.window.hold(size)


class Dispatch:
    """Opened once, read through ``connection``, then closed. A failed prefill fails the connection.

    ``fresh``: uses a new connection, so that its closing is always the engine's fault.
    """

    def __init__(self, route: Route, sub_request: SubRequest, *, fresh: bool = False) -> None:
        self.route = route
        self.sub_request = sub_request
        self.parent = new_parent()
        self.request_id = external_id(route.kind, self.parent)
        self.cached_tokens: int | None = None
        self.finished = False  # decode sent its complete answer
        self._fresh = fresh
        self._secrets = [route.core.settings.metaserver_token.encode()]
        self._core = route.core
        self._connection: EngineConnection | None = None
        self._load: Load | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._prefiller: Instance | None = None  # the last one asked
        self._failure: Exception | None = None
        self._notice: ReceiveError | None = None
        self._told: asyncio.Event | None = None  # set when decode's failure notice arrives, if one is awaited
        self._late = False  # prefill's deadline has passed
        self._began = time.monotonic()

    @property
    def connection(self) -> EngineConnection:
        """Decode's answer. Valid after :meth:`open`."""
        assert self._connection is not None
        return self._connection

    @property
    def decode_address(self) -> Address | None:
        """Address of the decode engine."""
        return self._load.instance.address if self._load is not None else None

    async def open(self) -> None:
        """Sends the decode request and waits for its status. Raises ``UpstreamError`` or ``HttpFailure``.

        For a stream the status arrives at once; otherwise after the complete answer was generated.
        """
        core, deadlines = self._core, self._core.settings.deadlines
        self._load = load = await self._decoder()
        self.route.trace.decode = str(load.instance.address)
        body = dict(self.sub_request.body)
        body["kv_transfer_params"] = decode_params(*core.posts_to)
        core.rendezvous.expect(self.request_id, self._on_message, self._on_notice)
        first = deadlines.first_output if self.route.stream else deadlines.answer
        async with self.route.hold(self.sub_request.size):
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
        if self.route.sub_requests > 1:
            connection.high_water = 0  # all sub-requests share one limit
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
        """Chooses a decode engine that fits an available prefill engine: without one the request would
        time out.

        Raises ``NoInstanceError`` and ``NoFitError``.
        """
        core, now = self._core, time.monotonic()
        prefillers = core.prefillers.available(now)
        if prefillers and not any(p.health.available(now) for p in prefillers):
            # All are cooling down: ask decode again once one of them accepts connections.
            reached = await asyncio.gather(*(self._reaches(prefill) for prefill in prefillers))
            prefillers = [p for p, there in zip(prefillers, reached, strict=True) if there]
        if not prefillers:
            raise NoInstanceError("prefill")

        def accept(decode: Instance) -> bool:
            return any(prefill.fits_all or fits(prefill, decode, now) for prefill in prefillers)

        chosen = None if prefillers[0].fits_all else accept
        return core.decoders.acquire(self.sub_request.decode, now, self.route.avoid, chosen)

    async def _reaches(self, instance: Instance) -> bool:
        try:
            await self._core.client.reach(instance.address)
        except UpstreamError:
            instance.health.failed(time.monotonic(), unreachable=True)
            return False
        return True

    async def cause(self, failure: HttpFailure) -> Exception:
        """Returns the cause of decode's ``failure``: prefill's failure, decode's notice, or ``failure``
        itself."""
        if failure.status < 500 or not self.prefilled:
            return failure
        if self._failure is None and self._notice is None:
            with contextlib.suppress(asyncio.TimeoutError):
                self._told = self._told or asyncio.Event()
                await asyncio.wait_for(self._told.wait(), NOTICE_SECONDS)
        return self._failure or self._notice or failure

    def hidden(self, text: bytes) -> bytes:
        """Removes the request's secrets from an engine's error, which some vLLM versions quote."""
        for secret in self._secrets:
            if secret:
                text = text.replace(secret, b"...")
        return text

    @property
    def prefilled(self) -> bool:
        """Whether decode asked for a prefill."""
        return self._prefill is not None

    def blame(self, error: UpstreamError) -> bool:
        """Records decode's transport failure against the engine, so that the next dispatch avoids it.

        Skipped if an idle connection may merely have closed as it was used. Returns True if the request
        cannot have caused the engine's failure.
        """
        if self._load is None or error is self._failure:
            return False  # prefill's failure, already recorded against prefill
        if isinstance(error, ReceiveError):
            # A mismatch is recorded for the pair; otherwise either engine may be at fault.
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
        """Records decode's complete answer; a prefill answer still in transit may end by itself."""
        self.finished = True
        if self._load is None:
            return
        self._load.instance.health.succeeded()
        if self._prefiller is not None and self._failure is None and self._notice is None:
            self._prefiller.proven.add(self._load.instance.address)

    def close(self) -> None:
        """Releases all resources and cancels running work. Further calls have no effect."""
        self._core.rendezvous.forget(self.request_id)
        # Another request may use the connection next: it must not be closed or failed from here.
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if self._load is not None:
            self._load.release()
        if self._prefill is not None and not self.finished:
            self._prefill.cancel()

    async def prefill_done(self, seconds: float) -> None:
        """Waits for prefill's answer if it was asked: decode may finish slightly earlier."""
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
        # A timer of our own: wait_for creates a task per request.
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
        except Exception as error:  # a failed prefill must never count as successful
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
        """Returns a prefill engine's answer, skipping engines that cannot be reached."""
        made = prefill_body(self.sub_request.body, message)
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
            self.sub_request.prefill, now, self.route.avoid, lambda prefill: fits(prefill, decode, now)
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
            hold=lambda: self.route.hold(self.sub_request.size),
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


def _answered_with(connection: EngineConnection, answer: bytes) -> HttpFailure:
    """Returns the client's failure for an answer other than 200: an error is passed on as the engine sent
    it."""
    if not is_error(connection.status):
        message = f"{connection.address} answered with status {connection.status}"
        return HttpFailure.of(502, message, kind="UpstreamError")
    kind = connection.header(b"content-type", b"application/json")
    return HttpFailure(connection.status, answer, kind, connection.header(b"retry-after") or None)


def _failed(instance: Instance, error: UpstreamError) -> None:
    if error.final:
        return  # the request's fault: an answer too large
    instance.health.failed(time.monotonic(), unreachable=not error.sent)
    if not error.sent:
        instance.restarted()  # the next process to accept connections there is a new one
