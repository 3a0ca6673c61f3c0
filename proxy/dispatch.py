"""One rendezvous: a request on a decode engine, and the prefill that it asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from vllm_kvoffload.proxy.balance import Load
from vllm_kvoffload.proxy.calls import Child
from vllm_kvoffload.proxy.core import Core, Trace, logger
from vllm_kvoffload.proxy.errors import HttpFailure, UpstreamError
from vllm_kvoffload.proxy.http_client import Connection
from vllm_kvoffload.proxy.rendezvous import Kind, Message, Outcome, decode_params, external_id, new_parent
from vllm_kvoffload.proxy.sanitize import prefill_body
from vllm_kvoffload.proxy.settings import Address
from vllm_kvoffload.proxy.usage import cached_tokens

UNAVAILABLE = frozenset({502, 503, 504})  # statuses that speak against the engine, not against the request


@dataclass
class Route:
    """What every dispatch of one client request has in common. ``avoid``: engines that failed it."""

    core: Core
    kind: Kind
    path: str
    stream: bool
    headers: Sequence[tuple[str, str]]
    trace: Trace
    avoid: set[Address] = field(default_factory=set)


class Dispatch:
    """Made, opened once, read through ``connection`` and closed. A prefill failure fails the connection."""

    def __init__(self, route: Route, child: Child) -> None:
        self.route = route
        self.child = child
        self.parent = new_parent()
        self.request_id = external_id(route.kind, self.parent)
        self.cached_tokens: int | None = None
        self.finished = False  # decode answered all of it
        self._core = route.core
        self._connection: Connection | None = None
        self._load: Load | None = None
        self._prefill: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
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
        self._load = load = core.decoders.acquire(self.child.decode, time.monotonic(), self.route.avoid)
        self.route.trace.decode = str(load.instance.address)
        body = dict(self.child.body)
        body["kv_transfer_params"] = decode_params(core.settings.metaserver)
        core.meetings.expect(self.request_id, self._on_message)
        first = deadlines.first_output if self.route.stream else deadlines.answer
        connection = await core.client.request(
            load.instance.address,
            "POST",
            self.route.path,
            body=msgspec.json.encode(body),
            headers=[*self.route.headers, ("x-request-id", self.parent)],
            first=first,
            idle=deadlines.idle,
        )
        self._connection = connection
        if self._failure is not None:
            connection.fail(self._failure)
        await connection.start()
        if connection.status in UNAVAILABLE:
            load.instance.health.failed(time.monotonic())
        if connection.status >= 400:
            answer = await connection.read_all()
            kind = connection.header(b"content-type", b"application/json")
            raise HttpFailure(connection.status, answer, kind, connection.header(b"retry-after") or None)
        connection.expect_output(deadlines.first_output if self.route.stream else deadlines.idle)

    @property
    def prefilled(self) -> bool:
        """Whether decode asked for a prefill."""
        return self._prefill is not None

    def blame(self, error: UpstreamError) -> bool:
        """Decode's transport failed: the next dispatch goes elsewhere.

        Returns True where it was only an idle connection that closed in the moment it was used.
        """
        if self._load is None or error is self._failure:
            return False  # prefill's failure, which has been blamed on prefill
        connection = self._connection
        fresh = connection is None or not connection.reused or connection.status != 0
        if not fresh and not error.deadline and not self.prefilled:
            return True
        self.route.avoid.add(self._load.instance.address)
        self._load.instance.health.failed(time.monotonic(), unreachable=not error.sent)
        return False

    def succeeded(self) -> None:
        """Decode answered all of it; a prefill that is still on its way back may end by itself."""
        self.finished = True
        if self._load is not None:
            self._load.instance.health.succeeded()

    def close(self) -> None:
        """Gives back everything, cancels what is still running. Later calls change nothing."""
        self._core.meetings.forget(self.request_id)
        if self._connection is not None:
            self._connection.close()
        if self._load is not None:
            self._load.release()
        if self._prefill is not None and not self.finished:
            self._prefill.cancel()

    async def prefill_done(self, seconds: float) -> None:
        """Waits until prefill answered, if it was asked: decode may end a moment earlier."""
        if self._prefill is not None and not self._prefill.done():
            await asyncio.wait([self._prefill], timeout=seconds)

    def _on_message(self, message: Message) -> Outcome:
        self._core.metrics.rendezvous.observe(time.monotonic() - self._began)
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._prefill = self._core.spawn(self._run_prefill(message))
        self._prefill.add_done_callback(
            lambda task: outcome.set_result("cancelled" if task.cancelled() else str(self._failure or ""))
        )
        return outcome

    async def _run_prefill(self, message: Message) -> None:
        try:
            seconds = self._core.settings.deadlines.prefill
            answer = await asyncio.wait_for(self._call_prefill(message), seconds)
            self.cached_tokens = cached_tokens(answer.get("usage") if isinstance(answer, dict) else None)
            return
        except asyncio.TimeoutError:
            self._failure = HttpFailure.of(504, "prefill gave no answer in time", kind="Timeout")
        except (UpstreamError, HttpFailure) as error:
            self._failure = error
        self._core.metrics.prefill_failures.inc()
        logger.warning("proxy: prefill of %s failed: %s", self.request_id, self._failure)
        if self._connection is not None:
            self._connection.fail(self._failure)

    async def _call_prefill(self, message: Message) -> object:
        """The answer of a prefill engine. One that can't be reached is passed over."""
        body = msgspec.json.encode(prefill_body(self.child.body, message))
        budget = self._core.settings.max_retries
        while True:
            load = self._core.prefillers.acquire(self.child.prefill, time.monotonic(), self.route.avoid)
            self.route.trace.prefill = str(load.instance.address)
            try:
                return await self._prefill_on(load, body)
            except UpstreamError as error:
                self.route.avoid.add(load.instance.address)
                load.instance.health.failed(time.monotonic(), unreachable=not error.sent)
                if error.sent or budget <= 0:
                    raise  # prefill may have sent decode some of the KV: only a new request is clean
                budget -= 1
            finally:
                load.release()
            await asyncio.sleep(0.05 if len(self.route.avoid) > 1 else 0)

    async def _prefill_on(self, load: Load, body: bytes) -> object:
        deadlines = self._core.settings.deadlines
        began = time.monotonic()
        connection = await self._core.exchange(
            load.instance.address,
            "POST",
            self.route.path,
            body=body,
            headers=[*self.route.headers, ("x-request-id", self.parent)],
            first=deadlines.prefill,
            idle=deadlines.idle,
        )
        try:
            answer = await connection.read_all()
            kind = connection.header(b"content-type", b"application/json")
            if connection.status >= 400:
                if connection.status in UNAVAILABLE:
                    load.instance.health.failed(time.monotonic())
                raise HttpFailure(connection.status, answer, kind, connection.header(b"retry-after") or None)
        finally:
            connection.close()
        load.instance.health.succeeded()
        self._core.metrics.prefill_seconds.observe(time.monotonic() - began)
        try:
            return msgspec.json.decode(answer)
        except msgspec.DecodeError as error:
            raise HttpFailure.of(502, "prefill answered something else than JSON") from error
