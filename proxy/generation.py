"""Produces one sub-request's answer: dispatches, retries, and continuations after a "recomputed"."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from vllm_kvoffload.proxy import sse
from vllm_kvoffload.proxy.calls import SubRequest, sub_request_of
from vllm_kvoffload.proxy.core import logger
from vllm_kvoffload.proxy.dispatch import Dispatch, Route
from vllm_kvoffload.proxy.errors import (
    HttpFailure,
    NoFitError,
    NoInstanceError,
    ReceiveError,
    UpstreamError,
    is_error,
)
from vllm_kvoffload.proxy.jsontext import decode_json
from vllm_kvoffload.proxy.recompute import (
    MARK,
    CannotContinue,
    Identity,
    Transcript,
    continuation_event,
    continued_body,
    is_opening,
    is_recomputed,
    joined_answer,
    last_words,
    stops_at_mark,
)
from vllm_kvoffload.proxy.usage import UsageFacts, rewrite_usage

CACHED = b'"cached_tokens"'
PARAMS = re.compile(rb'"kv_transfer_params"\s*:\s*[^n\s]')  # any value but null
OPENING_LIMIT = 64 << 10  # bytes of a stream's opening that wait for its first output
RETRIED_FAILURES = frozenset({"rendezvous", "prefill", "read", "deadline"})  # retried at most once
TOKENIZERS = 2  # number of engines asked to tokenize a text
RETRIES_WHERE_DOWN = 2  # dispatches after an engine froze: the request may be the cause


class Generation:
    """Call ``start``, then ``read`` until empty for a stream, or ``answer``; finally ``close``.

    A failure before the client saw output starts a new dispatch of the whole request with a new id. After
    that nothing is sent twice: a failure ends the answer.
    """

    def __init__(self, route: Route, sub_request: SubRequest) -> None:
        self._route = route
        self._core = route.core
        self._first = sub_request  # as the client asked
        self._sub_request = sub_request  # as currently dispatched
        self._dispatch: Dispatch | None = None
        self._buffer = sse.EventBuffer()
        self._transcript = Transcript(route.kind)
        self._identity = Identity()
        self._seen = False  # the client has received output
        self._delivered = False  # the client has received output of the current dispatch
        self._opening: list[bytes] = []  # a chat's events before its output
        # If the client's own stop string equals the engine's mark, the two cannot be told apart.
        self._own_stop = stops_at_mark(sub_request.body)
        self._push: Callable[[bytes], bool] | None = None
        self._made_tokens = 0  # in earlier dispatches
        self._offset = 0  # characters produced in earlier dispatches
        self._recomputes = 0
        self._retries = route.core.settings.max_retries
        # Retries of a request that an engine may have started: the request may be what crashes engines.
        self._after_send = 1
        self._after_down = RETRIES_WHERE_DOWN
        self._last_error: UpstreamError | None = None

    def close(self) -> None:
        """Cancels running work."""
        if self._dispatch is not None:
            self._dispatch.close()

    async def start(self) -> None:
        """Returns when decode has accepted the request. Raises ``HttpFailure``."""
        while True:
            self.close()
            self._dispatch = Dispatch(self._route, self._sub_request, fresh=self._last_error is not None)
            self._buffer = sse.EventBuffer()
            self._delivered = False
            self._opening = []
            try:
                await self._dispatch.open()
                return
            except UpstreamError as error:
                await self._may_retry(error)
            except (NoInstanceError, NoFitError) as error:
                if isinstance(self._last_error, ReceiveError):  # it explains why no other engine is left
                    raise self._failure(self._last_error) from error
                raise

    async def _may_retry(self, error: UpstreamError) -> None:
        """Returns if another dispatch may be tried. Raises ``HttpFailure`` otherwise."""
        assert self._dispatch is not None
        worked_on = error.sent and not self._dispatch.blame(error)
        self._dispatch.close()
        self._last_error = error
        self._retries -= 1
        if error.down:
            self._after_down -= 1
        else:
            self._after_send -= worked_on
        ends = self._delivered or error.deadline or error.final
        if isinstance(error, ReceiveError):
            ends = ends or error.failure not in {*RETRIED_FAILURES, "mismatch"}
        if ends or min(self._retries, self._after_send, self._after_down) < 0:
            raise self._failure(error) from error
        self._route.trace.retries += 1
        self._core.metrics.retries.inc()
        logger.warning("proxy: dispatching %s again: %s", self._dispatch.request_id, error)
        await asyncio.sleep(0.02 * 2 ** (self._core.settings.max_retries - self._retries))

    @staticmethod
    def _failure(error: UpstreamError) -> HttpFailure:
        return HttpFailure.of(504 if error.deadline else error.status, str(error), kind=error.type)

    # streams

    def push_to(self, push: Callable[[bytes], bool]) -> None:
        """After the first piece, ``push`` receives, outside any task, the data that :meth:`read` would
        return.

        ``push`` returns False for data it cannot take now; :meth:`read` then delivers it first.
        """
        self._push = push

    def _take(self, data: bytes) -> bool:
        """Passes on data that needs no inspection; called by the connection, per token."""
        assert self._push is not None
        if MARK in data or CACHED in data or not self._buffer.passes(data) or not self._push(data):
            return False
        self._transcript.add(data)
        return True

    async def read(self) -> bytes:
        """Returns one or more whole events; empty at the end. Raises ``HttpFailure``."""
        while data := await self._piece():
            if MARK in data and (split := self._split_at_recomputed(data)) is not None:
                if data := await self._go_on(*split):  # from the dispatch before the current one
                    self._seen = True
                    return data
                continue
            self._transcript.add(data)
            if self._recomputes or CACHED in data:
                data = await self._rewritten(data)
            if data:
                self._seen = self._delivered = True
                return data
        return b""

    async def _piece(self) -> bytes:
        """Returns whole events of an engine's answer, the first with its output; empty at the end.

        If a dispatch fails before output, they are from the next one.
        """
        while True:
            assert self._dispatch is not None
            connection = self._dispatch.connection
            if self._push is not None and self._seen and not self._recomputes:
                connection.taker = self._take
            try:
                data = await connection.read()
                if data:
                    data = self._fed(data)
                    if not data:
                        continue
                else:
                    self._dispatch.succeeded()
                    data = self._buffer.rest()
                if self._delivered:
                    return data
                if data and await self._opens(data):
                    continue
            except UpstreamError as error:
                await self._may_retry(error)
                await self.start()
                continue
            data = b"".join([*self._opening, data])
            self._opening = []
            return data

    def _fed(self, data: bytes) -> bytes:
        try:
            return self._buffer.feed(data)
        except sse.EventTooLarge as error:
            assert self._dispatch is not None
            self._dispatch.close()
            raise HttpFailure.of(502, f"decode sent no events: {error}", kind="UpstreamError") from error

    async def _opens(self, data: bytes) -> bool:
        """Whether the stream continues with its first output; events that only name the role are held
        back.

        vLLM sends the role in an event of its own before it checks whether the request failed. Raises that
        failure, which is then the first or second event.
        """
        assert self._dispatch is not None
        for payload in sse.payloads(data):
            event = sse.parse(payload)
            if event is not None and event.get("error"):
                raise await self._dispatch.cause(self._error_in(event, self._dispatch))
            if event is None or not is_opening(event):
                return False
        if sum(map(len, self._opening)) + len(data) > OPENING_LIMIT:
            return False
        self._opening.append(data)
        return True

    @staticmethod
    def _error_in(event: dict[str, Any], dispatch: Dispatch) -> HttpFailure:
        error = event["error"]
        code = error.get("code") if isinstance(error, dict) else None
        status = code if isinstance(code, int) and is_error(code) else 500
        return HttpFailure(status, dispatch.hidden(msgspec.json.encode(event)))

    def _split_at_recomputed(self, data: bytes) -> tuple[bytes, dict[str, Any], bytes] | None:
        """Splits around a "recomputed" event: before, event, after. None if only the text contains the
        word."""
        if self._own_stop:
            return None
        events = list(sse.split(data))
        for index, raw in enumerate(events):
            if MARK in raw:  # ordinary text may contain the word too
                event = sse.parse(next(sse.payloads(raw), b""))
                if event is not None and is_recomputed(event):
                    return b"".join(events[:index]), event, b"".join(events[index + 1 :])
        return None

    async def _go_on(self, before: bytes, event: dict[str, Any], after: bytes) -> bytes:
        """Starts the dispatch of the remainder. Returns unsent output of the old one."""
        usage = await self._rest_of_usage(event, after)
        self._transcript.add(before)
        words = last_words(event)
        if words is not None:
            words_event = sse.event(words)
            self._transcript.add(words_event)
            before += words_event
        if self._recomputes or CACHED in before:
            before = await self._rewritten(before)
        self._identity.learn(sse.parse(next(sse.payloads(self._transcript.first), b"")) or {})
        return before if await self._continue(usage) else b""

    async def _rest_of_usage(self, event: dict[str, Any], after: bytes) -> dict[str, Any] | None:
        """Usage of the dispatch that gave up, from its final events."""
        assert self._dispatch is not None
        parts, size = [after], 0
        try:
            while (data := await self._dispatch.connection.read()) and size < sse.EVENT_LIMIT:
                parts.append(data)
                size += len(data)
            self._dispatch.succeeded()
        except UpstreamError:
            pass
        usage = event.get("usage")
        for payload in sse.payloads(b"".join(parts)):
            usage = (sse.parse(payload) or {}).get("usage") or usage
        return usage if isinstance(usage, dict) else None

    async def _rewritten(self, data: bytes) -> bytes:
        facts = await self._facts()
        made = []
        for payload in sse.payloads(data):
            event = sse.parse(payload)
            if event is None:
                made.append(b"data: " + payload + b"\n\n")
            elif self._recomputes:
                kept = continuation_event(event, self._identity, facts, self._offset)
                made.append(sse.event(kept) if kept is not None else b"")
            else:
                if isinstance(event.get("usage"), dict):
                    rewrite_usage(event["usage"], facts)
                made.append(sse.event(event))
        return b"".join(made)

    async def _facts(self) -> UsageFacts:
        assert self._dispatch is not None
        await self._dispatch.prefill_done(self._core.settings.deadlines.control)
        return UsageFacts(self._dispatch.prefilled, self._dispatch.cached_tokens, self._made_tokens)

    # re-dispatch

    async def _continue(self, usage: dict[str, Any] | None) -> bool:
        """Starts the next dispatch: a continuation, or the whole request if no output was sent and it
        cannot be continued.

        Returns whether it is a continuation, so that earlier output counts.
        """
        self._recomputes += 1
        self._route.trace.recomputes += 1
        self._core.metrics.recomputes.inc()
        if self._recomputes > self._core.settings.max_recomputes:
            raise HttpFailure.of(503, "decode engines gave the request up too often", kind="Overloaded")
        continues = True
        try:
            self._transcript.check_continues(self._first.body)
            tokens, ids = await self._count_tokens(usage)
            body = continued_body(self._route.kind, self._first.body, self._transcript.text, tokens, ids)
        except CannotContinue as error:
            if self._seen:
                message = f"decode gave the request up, and {error}"
                raise HttpFailure.of(502, message, kind="UpstreamError") from error
            self._transcript = Transcript(self._route.kind)
            self._identity = Identity()
            continues, tokens, body = False, 0, self._first.body
        self._made_tokens = tokens
        self._offset = len(self._transcript.text)
        self._sub_request = replace(
            sub_request_of(self._route.kind, body, size=self._first.size), index=self._first.index
        )
        await self.start()
        return continues

    async def _count_tokens(self, usage: dict[str, Any] | None) -> tuple[int, list[int] | None]:
        """Returns the tokens generated in all dispatches, with their ids if the prompt needs them."""
        if not self._transcript.text:
            return 0, None
        ids = self._transcript.token_ids
        reported = usage.get("completion_tokens") if usage is not None else None
        counted = self._made_tokens + reported if isinstance(reported, int) else None
        need_ids = isinstance(self._first.body.get("prompt"), list)
        if ids is None and (need_ids or counted is None):
            ids = await self._tokenized(self._transcript.text)
        if counted is None:
            counted = len(ids) if ids is not None else self._transcript.pieces
        return counted, ids if need_ids else None

    async def _tokenized(self, text: str) -> list[int] | None:
        """Returns the ids of ``text`` from a decode engine's /tokenize, None if unavailable."""
        own = self._dispatch.decode_address if self._dispatch is not None else None
        others = [i.address for i in self._core.decoders.available(time.monotonic()) if i.address != own]
        asked = {"prompt": text, "add_special_tokens": False}
        if "model" in self._first.body:
            asked["model"] = self._first.body["model"]
        for address in [own, *others][:TOKENIZERS] if own is not None else others[:TOKENIZERS]:
            try:
                status, answer, _ = await self._core.control(
                    address, "POST", "/tokenize", msgspec.json.encode(asked), self._route.headers
                )
                found = decode_json(answer) if status == 200 else None
            except (UpstreamError, msgspec.DecodeError):
                continue
            ids = found.get("tokens") if isinstance(found, dict) else None
            if isinstance(ids, list):
                return ids
        return None

    # whole answers

    async def answer(self) -> bytes:
        """Returns the complete answer's body. Raises ``HttpFailure``."""
        earlier: dict[str, Any] | None = None
        while True:
            raw = await self._whole()
            plain = (
                earlier is None
                and (self._own_stop or MARK not in raw)
                and CACHED not in raw
                and not PARAMS.search(raw)
            )
            if plain:
                return raw
            answer = decoded_answer(raw)
            if isinstance(answer.get("usage"), dict):
                rewrite_usage(answer["usage"], await self._facts())
            answer.pop("kv_transfer_params", None)
            if self._own_stop or not is_recomputed(answer):
                if earlier is not None:
                    answer = joined_answer(self._route.kind, earlier, answer)
                return msgspec.json.encode(answer)
            self._transcript.add_choice(answer["choices"][0])
            usage = answer.get("usage")
            if isinstance(usage, dict):  # counts all tokens, but this dispatch's are wanted
                reported = usage.get("completion_tokens")
                reported = reported if isinstance(reported, int) else 0
                usage = {**usage, "completion_tokens": reported - self._made_tokens}
            joined = answer if earlier is None else joined_answer(self._route.kind, earlier, answer)
            earlier = joined if await self._continue(usage) else None

    async def _whole(self) -> bytes:
        while True:
            assert self._dispatch is not None
            try:
                raw = await self._dispatch.connection.read_all(self._core.settings.max_answer_bytes)
            except UpstreamError as error:
                await self._may_retry(error)
                await self.start()
                continue
            self._dispatch.succeeded()
            return raw


def decoded_answer(raw: bytes) -> dict[str, Any]:
    """Parses decode's unstreamed answer. Raises ``HttpFailure`` if it is not a JSON object."""
    try:
        answer = decode_json(raw)
    except msgspec.DecodeError as error:
        message = f"decode answered something else than JSON: {error}"
        raise HttpFailure.of(502, message, kind="UpstreamError") from error
    if not isinstance(answer, dict):
        raise HttpFailure.of(502, "decode answered no JSON object", kind="UpstreamError")
    return answer
