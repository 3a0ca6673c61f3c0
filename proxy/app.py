"""The proxy as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import time
from collections.abc import Awaitable, Callable

import msgspec

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.proxy import fanout
from vllm_kvoffload.proxy.admin import Admin
from vllm_kvoffload.proxy.asgi import (
    FREE_BYTES,
    SLOWEST,
    SSE,
    ClientGone,
    Guard,
    Hold,
    Keys,
    Receive,
    Scope,
    Send,
    check_content_type,
    check_length,
    flushed,
    header,
    is_gone,
    read_body,
    respond,
    respond_failure,
    respond_json,
    transport_of,
)
from vllm_kvoffload.proxy.balance import Instance, fits
from vllm_kvoffload.proxy.calls import Call, parse_call
from vllm_kvoffload.proxy.core import Core, Trace, logger
from vllm_kvoffload.proxy.dispatch import Route
from vllm_kvoffload.proxy.errors import HttpFailure, NoInstanceError, UpstreamError, is_error
from vllm_kvoffload.proxy.generation import Generation
from vllm_kvoffload.proxy.health import Prober
from vllm_kvoffload.proxy.jsontext import decode_json, json_bytes
from vllm_kvoffload.proxy.metrics import CONTENT_TYPE
from vllm_kvoffload.proxy.rendezvous import Kind, new_parent
from vllm_kvoffload.proxy.settings import METASERVER, ProxySettings

access = get_logger("vllm_kvoffload.proxy.access")
CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
PASSED_ON = frozenset({b"authorization", b"traceparent", b"tracestate", b"x-session-id", b"x-vllm-priority"})
STREAM_FIELDS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]  # relays must not hold tokens
FORWARDED = (  # answered by one decode engine alone: no KV is made
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/chat/completions/render"),
    ("GET", "/v1/models"),
    ("GET", "/tokenizer_info"),
    ("GET", "/version"),
)
KINDS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
MESSAGE_LIMIT = 64 << 10  # bytes of a rendezvous post
FORWARD_LIMIT = 4 << 20  # bytes of a text to tokenize
FORWARD_TRIES = 2  # engines that may see a request without KV: it may be what keeps them from answering
DIGEST_SHOWN = 12  # digits of a layout's digest in /health

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class ProxyApp:
    """One proxy. Handles ASGI's lifespan and http scopes."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.core = Core(settings)
        self.running: set[Guard] = set()
        self.admin = Admin(self.core)
        self._keys = Keys(settings.api_keys)
        self._prober = Prober(self.core)
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/health"): self._health,
            ("GET", "/healthcheck"): self._health,  # as in vLLM-Ascend's example
            ("GET", "/metrics"): self._metrics,
            **dict.fromkeys(FORWARDED, self._forward),
            **{("POST", path): self._generate for path in KINDS},
        }
        self._paths = {path for _, path in self._routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the proxy has no {scope['type']} endpoints")
        await self.guarded(self._request, scope, receive, send)

    async def guarded(self, endpoint: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs ``endpoint``; turns its exceptions into an answer, or ends the connection."""
        try:
            try:
                await endpoint(scope, receive, send)
            except HttpFailure as failure:
                await respond_failure(send, failure)
        except ClientGone:
            return
        except (RuntimeError, OSError):
            if not is_gone(send):
                raise
        except asyncio.CancelledError:
            # The server cancels requests left after the drain; uvicorn would log that as an application
            # crash.
            with contextlib.suppress(RuntimeError, OSError):  # an answer that has begun is cut off
                await respond_failure(send, HttpFailure.of(503, "the proxy is shutting down"))

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        handler = self._routes.get((scope["method"], path))
        if handler == self._forward or (path.startswith("/v1") and not path.startswith(METASERVER)):
            self._keys.check(scope)
        if handler is not None:
            await handler(scope, receive, send)
        elif self.settings.metaserver_port is None and path.startswith(METASERVER):
            await self.metaserver(scope, receive, send)
        elif self.settings.admin_port is None and path.startswith("/admin"):
            await self.admin(scope, receive, send)
        else:
            status = 405 if path in self._paths else 404
            raise HttpFailure.of(status, f"no {scope['method']} {path[:200]} here", kind="NotFoundError")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    def start(self) -> None:
        """Starts the connections' clock and the probes. Call it on the running event loop."""
        self.core.client.open()
        self.core.client.on_tick(self._tick)
        self._prober.start()

    async def stop(self) -> None:
        """Stops the probes, background tasks and connections."""
        await self.core.close()

    def drain(self) -> None:
        """Refuses new requests; running ones continue, including their rendezvous."""
        self.core.draining = True

    @property
    def idle(self) -> bool:
        """Whether no client request is running."""
        return not self.running

    def _tick(self, now: float) -> None:
        for guard in list(self.running):
            try:
                guard.tick(now)
            except Exception:  # the other clients' clock goes on
                self.core.metrics.loop_errors.inc()
                logger.exception("proxy: a client's tick failed")

    # small endpoints

    async def _health(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        now = time.monotonic()
        prefillers, decoders = (pool.instances.values() for pool in self.core.pools)
        state = {
            "draining": self.core.draining,
            **{
                f"{pool.role}_instances": {
                    str(i.address): i.health.available(now) and not i.draining
                    for i in pool.instances.values()
                }
                for pool in self.core.pools
            },
            "layouts": {
                str(i.address): layout[:DIGEST_SHOWN]
                for i in (*prefillers, *decoders)
                if (layout := i.layout(now))
            },
            "unfit_pairs": [
                {"prefill": str(p.address), "decode": str(d.address)}
                for p in prefillers
                for d in decoders
                if not fits(p, d, now)
            ],
        }
        some_p, some_d = (pool.available(now) for pool in self.core.pools)
        ok = not self.core.draining and any(fits(p, d, now) for p in some_p for d in some_d)
        await respond_json(send, 200 if ok else 503, {"status": "ok" if ok else "unavailable", **state})

    async def _metrics(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await respond(send, 200, self.core.metrics.page(), CONTENT_TYPE)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request without KV on to a decode engine, and its answer back."""
        body = await self._read_forwarded(scope, receive) if scope["method"] == "POST" else b""
        query = scope["query_string"].decode("ascii", "replace")
        path = f"{scope['path']}?{query}" if query else scope["path"]
        now = time.monotonic()
        failure: HttpFailure = NoInstanceError("decode")
        suspects: list[Instance] = []  # saw the request and did not answer
        for instance in self.core.decoders.available(now):
            try:
                status, answer, kind = await self.core.control(
                    instance.address, scope["method"], path, body, _passed_on(scope)
                )
            except UpstreamError as error:
                failure = HttpFailure.of(502, str(error), kind="UpstreamError")
                if not error.sent:
                    instance.health.failed(now, unreachable=True)
                    continue
                suspects.append(instance)
                if error.final or len(suspects) == FORWARD_TRIES:
                    break
                continue
            for suspect in suspects:  # not the request's fault, since another engine answered it
                suspect.health.failed(now)
            if status != 200 and not is_error(status):
                message = f"{instance.address} answered with status {status}"
                failure = HttpFailure.of(502, message, kind="UpstreamError")
                continue
            await self._pass_on(send, status, answer, kind)
            return
        raise failure

    async def _pass_on(self, send: Send, status: int, answer: bytes, kind: bytes) -> None:
        """Sends a forwarded request's answer, which counts as held until the client has read it."""
        hold = Hold(self.core.answers, FREE_BYTES)
        try:
            hold.need(len(answer))
            await respond(send, status, answer, kind)
            await flushed(send, self.settings.deadlines.client_stall + len(answer) / SLOWEST)
        finally:
            hold.release()

    async def _read_forwarded(self, scope: Scope, receive: Receive) -> bytes:
        check_content_type(scope)
        check_length(scope, FORWARD_LIMIT)
        hold = Hold(self.core.held, FREE_BYTES)
        try:
            return await read_body(receive, FORWARD_LIMIT, self.settings.deadlines.request_body, hold)
        finally:
            hold.release()

    async def metaserver(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles decode's posts, on a path known only to decode engines. Raises ``HttpFailure``."""
        given = scope["path"].removeprefix(f"{METASERVER}/")
        token, _, rest = given.partition("/")
        known = hmac.compare_digest(token.encode(errors="replace"), self.settings.metaserver_token.encode())
        if not known or scope["method"] != "POST" or rest not in ("", "failed") or given.endswith("/"):
            raise HttpFailure.of(404, f"no {scope['method']} {scope['path']} here", kind="NotFoundError")
        check_length(scope, MESSAGE_LIMIT)
        raw = await read_body(receive, MESSAGE_LIMIT, self.settings.deadlines.request_body)
        try:
            message = decode_json(raw)
        except msgspec.DecodeError as error:
            raise HttpFailure.of(400, f"the body is no JSON: {error}") from error
        await (self._failed if rest else self._rendezvous)(message, send)

    async def _rendezvous(self, message: object, send: Send) -> None:
        """Answers when the prefill has ended: 200 on success, 502 if it failed or was cancelled."""
        try:
            result, outcome = self.core.rendezvous.post(message)
        except HttpFailure:
            self.core.metrics.posts["refused"].inc()
            raise
        self.core.metrics.posts[result].inc()
        if outcome is None:
            raise HttpFailure.of(404, "no request of that id waits for a prefill", kind="NotFoundError")
        if failed := await asyncio.shield(outcome):  # ends by prefill's deadline
            raise HttpFailure.of(502, f"prefill failed: {failed}", kind="UpstreamError")
        await respond_json(send, 200, {"status": "ok"})

    async def _failed(self, message: object, send: Send) -> None:
        """Handles decode's notice of a request whose KV it did not receive."""
        if self.core.rendezvous.failed(message) is None:
            raise HttpFailure.of(404, "no request of that id is under way", kind="NotFoundError")
        await respond_json(send, 200, {"status": "ok"})

    # completions and chats

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"x-request-id")
        request_id = given if given is not None and CLIENT_ID.fullmatch(given) else new_parent()
        client = scope.get("client")
        trace = Trace(scope["method"], scope["path"], request_id, client[0] if client else "-")
        self.core.metrics.running += 1
        try:
            await self._serve(scope, receive, send, trace)
        except ClientGone:
            trace.end = "client gone"
        except HttpFailure as failure:
            trace.status, trace.end = failure.status, "error"
            await respond_failure(send, failure, request_id.encode())
        except BaseException as error:
            gone = is_gone(send) and isinstance(error, (RuntimeError, OSError, asyncio.CancelledError))
            trace.end = "client gone" if gone else "crash"
            raise
        finally:
            self._ended(trace)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, trace: Trace) -> None:
        deadlines = self.settings.deadlines
        kind = KINDS[scope["path"]]
        call = await self._read_call(kind, scope, receive)
        trace.sub_requests = len(call.sub_requests)
        route = Route(self.core, kind, scope["path"], call.stream, _passed_on(scope), trace)
        async with Guard(receive, send, deadlines.client_stall) as guard:
            answer = Answer(send, trace, guard)
            self.running.add(guard)
            try:
                await self._answer(call, route, answer)
            except HttpFailure as failure:
                await answer.fail(failure)
            finally:
                trace.sent_bytes = guard.sent_bytes
                self.running.discard(guard)
        if guard.reason is not None:
            trace.end = guard.reason

    async def _read_call(self, kind: Kind, scope: Scope, receive: Receive) -> Call:
        limit = self.settings.max_body_bytes
        check_content_type(scope)
        check_length(scope, limit)
        hold = Hold(self.core.held, FREE_BYTES)
        try:
            raw = await read_body(receive, limit, self.settings.deadlines.request_body, hold)
            if self.core.draining:
                raise HttpFailure.of(503, "the proxy is shutting down", kind="ServiceUnavailable")
            hold.need(json_bytes(raw))
            return parse_call(kind, raw, self.settings.max_sub_requests, self.settings.max_request_bytes)
        finally:
            hold.release()

    async def _answer(self, call: Call, route: Route, answer: Answer) -> None:
        hold = Hold(self.core.held)
        try:
            hold.need(call.held)
            await self._answered(call, route, answer)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            # An engine's answer of unexpected shape fails the request, not the connection.
            logger.exception("proxy: %s", route.trace.request_id)
            failure = f"the engine's answer could not be understood: {error!r}"
            raise HttpFailure.of(502, failure, kind="UpstreamError") from error
        finally:
            hold.release()

    async def _answered(self, call: Call, route: Route, answer: Answer) -> None:
        route.sub_requests = len(call.sub_requests)
        if route.sub_requests > 1:
            sub_requests = [
                (sub_request, Generation(route, sub_request)) for sub_request in call.sub_requests
            ]
            if call.stream:
                await fanout.stream(sub_requests, answer.write)
                await answer.finish()
            else:
                await answer.whole(await fanout.whole(sub_requests, self.settings.max_answer_bytes))
            return
        generation = Generation(route, call.sub_requests[0])
        try:
            await generation.start()
            if not call.stream:
                await answer.whole(await generation.answer())
                return
            generation.push_to(answer.push)
            write, read = answer.write, generation.read
            while data := await read():
                await write(data)
            await answer.finish()
        finally:
            generation.close()

    def _ended(self, trace: Trace) -> None:
        metrics = self.core.metrics
        metrics.running -= 1
        now = time.monotonic()
        metrics.seconds.observe(now - trace.began)
        if trace.first_output is not None:
            metrics.first_output.observe(trace.first_output - trace.began)
        metrics.bytes_out.inc(trace.sent_bytes)
        metrics.ended(trace.path, trace.status, trace.end)
        access.info("%s", trace.line())


class Answer:
    """The client's answer. Its head is sent with the first output, so that earlier failures get a status."""

    def __init__(self, send: Send, trace: Trace, guard: Guard) -> None:
        self.guard = guard
        self._send = send
        self._trace = trace
        self._transport = transport_of(send)
        self._started = False

    async def _start(self, content_type: bytes, length: int | None = None) -> None:
        self._started = True
        self._trace.status = 200
        self._trace.first_output = time.monotonic()
        fields = [(b"content-type", content_type), (b"x-request-id", self._trace.request_id.encode())]
        if length is not None:
            fields.append((b"content-length", b"%d" % length))
        else:
            fields += STREAM_FIELDS
        await self._send({"type": "http.response.start", "status": 200, "headers": fields})

    async def write(self, data: bytes) -> None:
        """Writes one piece of a stream."""
        if not self._started:
            await self._start(SSE)
        guard = self.guard
        guard.sending = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        guard.sending = False
        guard.sent_bytes += len(data)

    def push(self, data: bytes) -> bool:
        """Writes a later piece without waiting; returns False if an earlier one is still waiting."""
        transport = self._transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
        try:  # a coroutine that need not wait ends at its first step
            sending.send(None)
        except StopIteration:
            self.guard.sent_bytes += len(data)
            return True
        except (RuntimeError, OSError):
            return False  # the connection is closed: the next reader notices
        sending.close()  # it would have to wait, and has written nothing
        return False

    async def finish(self) -> None:
        """Ends the stream."""
        if not self._started:
            await self._start(SSE)
        await self._end(b"")

    async def _end(self, body: bytes) -> None:
        self.guard.finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def whole(self, body: bytes) -> None:
        """Sends a complete, unstreamed answer."""
        await self._start(b"application/json", len(body))
        self.guard.sent_bytes += len(body)
        await self._end(body)

    async def fail(self, failure: HttpFailure) -> None:
        """Ends the answer: with a status or, in a stream that has begun, with an error event and no
        [DONE]."""
        if not self._started:
            raise failure
        self._trace.end = "error"
        logger.warning("proxy: %s ended after its first output: %s", self._trace.request_id, failure)
        await self.write(failure.event())
        await self.finish()


def _passed_on(scope: Scope) -> list[tuple[str, str]]:
    """Returns the client's headers that engines need."""
    return [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"] if name in PASSED_ON]
