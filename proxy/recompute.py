"""Continues an answer after a decode engine gave it up with ``stop_reason`` "recomputed". No I/O.

The engine had to drop the request's KV. Prefill is dispatched again with the prompt and the output so far,
and the client sees one answer, without gaps or repetition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_kvoffload.proxy import sse
from vllm_kvoffload.proxy.calls import Body, output_limit
from vllm_kvoffload.proxy.jsontext import decode_json
from vllm_kvoffload.proxy.rendezvous import Kind
from vllm_kvoffload.proxy.usage import UsageFacts, rewrite_usage

MARK = b"recomputed"
DIGEST_BYTES = 64 << 10
TEXT_LIMIT = 16 << 20  # characters; more than any model's context
GRAMMARS = ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class CannotContinue(Exception):
    """The output so far cannot be passed to an engine as the start of the same answer."""


def choices_of(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an event's choices; tolerates any shape."""
    choices = event.get("choices")
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def is_recomputed(event: Mapping[str, Any]) -> bool:
    """Whether this event or answer is the engine's "recomputed"."""
    return any(choice.get("stop_reason") == "recomputed" for choice in choices_of(event))


def stops_at_mark(body: Mapping[str, Any]) -> bool:
    """Whether the client's own stop strings include the engine's mark.

    vLLM reports a matched stop string as ``stop_reason``, and an engine that gives up writes its mark
    there, both with ``finish_reason`` "stop".
    """
    stop = body.get("stop")
    return stop == "recomputed" or (isinstance(stop, list) and "recomputed" in stop)


def is_opening(event: Mapping[str, Any]) -> bool:
    """Whether a chat event only names the role and has no output yet."""
    choices = choices_of(event)
    for choice in choices:
        delta = choice.get("delta")
        if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason") is not None:
            return False
        if any(value for key, value in delta.items() if key != "role"):
            return False
    return bool(choices)


class _Part(msgspec.Struct):
    """A chat's delta or message: the fields that a continuation depends on."""

    content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    token_ids: Any = None
    delta: _Part | None = None
    message: _Part | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None


_NO_PART = _Part()


def _usual_events(raw: bytes) -> list[_Event] | None:
    """Parses whole events in the form that engines send, all at once; None if any has another form."""
    if not raw.startswith(b"data: ") or not raw.endswith(b"\n\n"):
        return None
    try:
        events: list[_Event] = decode_json(b"[%b]" % raw[6:-2].replace(b"\n\ndata: ", b","), list[_Event])
    except msgspec.DecodeError:
        return None
    return events


class Transcript:
    """A sub-request's output so far, from the events or answers of all its dispatches.

    Events are kept as bytes and parsed in batches: only a re-dispatch needs their text.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.first = b""  # the first events, which contain the answer's id
        self._raw: list[bytes] = []
        self._raw_bytes = 0
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._has_ids = True  # every piece of text came with its ids
        self._pieces = 0
        self._held = 0  # characters of the text
        self.too_long = False  # to be kept: the answer cannot be continued elsewhere
        self.plain = True  # text only: no tool calls, no reasoning

    def add(self, events: bytes) -> None:
        """Adds whole events as received."""
        self.first = self.first or events
        self._raw.append(events)
        self._raw_bytes += len(events)
        if self._raw_bytes > DIGEST_BYTES:
            self._digest()

    def _digest(self) -> None:
        raw, self._raw, self._raw_bytes = b"".join(self._raw), [], 0
        if self.too_long:
            return
        events = _usual_events(raw)
        if events is not None:
            for usual in events:
                for choice in usual.choices or ():
                    part = choice.delta or choice.message or _NO_PART
                    self._add(choice.text, choice.token_ids, part)
        else:
            for payload in sse.payloads(raw):
                for other in choices_of(sse.parse(payload) or {}):
                    self.add_choice(other)
        if self._held > TEXT_LIMIT:
            self.too_long = True
            self._text, self._token_ids, self._has_ids = [], [], False

    def add_choice(self, choice: Mapping[str, Any]) -> None:
        """Adds one choice of an event or of a complete answer; tolerates any shape."""
        part = choice.get("delta") or choice.get("message")
        fields = {key: part.get(key) for key in _Part.__struct_fields__} if isinstance(part, dict) else {}
        self._add(choice.get("text"), choice.get("token_ids"), _Part(**fields))

    def _add(self, text: object, ids: object, part: _Part) -> None:
        if self.kind == "chat":
            text = part.content
            if part.tool_calls or part.function_call or part.reasoning or part.reasoning_content:
                self.plain = False
        if isinstance(ids, list):
            self._token_ids += ids
        elif text:
            self._has_ids = False
        if text and isinstance(text, str):
            self._held += len(text)
            self._text.append(text)
            self._pieces += 1

    @property
    def text(self) -> str:
        """Returns all text so far."""
        self._digest()
        return "".join(self._text)

    @property
    def token_ids(self) -> list[int] | None:
        """Returns the ids of all tokens so far, if the engine sent them."""
        self._digest()
        return list(self._token_ids) if self._has_ids else None

    @property
    def pieces(self) -> int:
        """Number of events with text: a lower bound of the tokens."""
        self._digest()
        return self._pieces

    def check_continues(self, body: Mapping[str, Any]) -> None:
        """Raises ``CannotContinue`` if the answer cannot be continued."""
        self._digest()
        if self.too_long:
            raise CannotContinue(f"the answer so far has more than {TEXT_LIMIT} characters")
        if not self.text:
            if self.plain:
                return
            raise CannotContinue("the answer so far is no plain text")
        if not self.plain:
            raise CannotContinue("the answer so far has tool calls or reasoning")
        if body.get("echo"):
            raise CannotContinue("the answer so far has the prompt in it")
        form = body.get("response_format")
        grammar = isinstance(form, dict) and form.get("type") not in (None, "text")
        if grammar or any(body.get(key) is not None for key in GRAMMARS):
            raise CannotContinue("a grammar can't be entered in the middle")
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise CannotContinue("a forced tool call can't be entered in the middle")


def _continued_messages(messages: object, body: Mapping[str, Any], text: str) -> list[Any]:
    """Returns the conversation with ``text`` appended to the last assistant turn, added if missing."""
    if not isinstance(messages, list) or not messages:
        raise CannotContinue("the request has no messages")
    last = messages[-1]
    if not (
        isinstance(last, dict) and last.get("role") == "assistant" and body.get("continue_final_message")
    ):
        return [*messages, {"role": "assistant", "content": text}]
    content = last.get("content")
    if isinstance(content, list):
        return [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": text}]}]
    return [*messages[:-1], {**last, "content": (content or "") + text}]


def continued_body(
    kind: Kind, body: Body, text: str, tokens: int, token_ids: list[int] | None = None
) -> Body:
    """Builds the request for the rest of the answer. ``body``: of the first dispatch; ``tokens``:
    generated so far.

    ``token_ids`` of ``text`` are required if the prompt is token ids. Raises ``CannotContinue``.
    """
    made = dict(body)
    if not text and not token_ids:
        return made
    if kind == "chat":
        made["messages"] = _continued_messages(body.get("messages"), body, text)
        made["continue_final_message"] = True
        made["add_generation_prompt"] = False
    else:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            made["prompt"] = prompt + text
        elif isinstance(prompt, list) and token_ids is not None:
            made["prompt"] = [*prompt, *token_ids]
        else:
            raise CannotContinue("the token ids of the answer so far are unknown")
    limit = output_limit(kind, body)
    if limit is not None:
        key = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        made[key] = max(1, limit - tokens)
    if isinstance(body.get("min_tokens"), int):
        made["min_tokens"] = max(0, body["min_tokens"] - tokens)
    return made


class Identity:
    """``id`` and ``created`` of the first dispatch, used for the whole answer."""

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}

    def learn(self, event: Mapping[str, Any]) -> None:
        """Takes them from the first event that has them."""
        if not self.fields and "id" in event:
            self.fields = {key: event[key] for key in ("id", "created") if key in event}


def continuation_event(
    event: dict[str, Any], identity: Identity, facts: UsageFacts, offset: int
) -> dict[str, Any] | None:
    """Rewrites an event of a later dispatch for the first one's stream; None if nothing is left of it.

    ``offset``: characters generated before, for the text offsets of log probabilities.
    """
    event.update(identity.fields)
    for choice in choices_of(event):
        delta = choice.get("delta")
        if isinstance(delta, dict) and delta.pop("role", None) and not delta.get("content"):
            delta.pop("content", None)
            if not any(delta.values()) and choice.get("finish_reason") is None:
                return None
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict) and isinstance(logprobs.get("text_offset"), list):
            logprobs["text_offset"] = [value + offset for value in logprobs["text_offset"]]
    if isinstance(event.get("usage"), dict):
        rewrite_usage(event["usage"], facts)
    return event


def last_words(event: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the text in the "recomputed" event as an ordinary event; None if it has none."""
    kept = False
    for choice in choices_of(event):
        delta = choice.get("delta")
        kept = kept or bool(choice.get("text")) or (isinstance(delta, dict) and any(delta.values()))
        choice["finish_reason"] = choice["stop_reason"] = None
    event.pop("usage", None)
    return event if kept else None


def _joined_logprobs(first: object, second: object, offset: int) -> object:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second if first is None else first
    joined = dict(second)
    for key, value in first.items():
        later = second.get(key)
        if isinstance(value, list) and isinstance(later, list):
            joined[key] = value + ([v + offset for v in later] if key == "text_offset" else later)
    return joined


def joined_answer(kind: Kind, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Joins two parts of an unstreamed answer. Usage is ``second``'s, already corrected."""
    joined = dict(second)
    joined.update({key: first[key] for key in ("id", "created") if key in first})
    if not first.get("choices") or not second.get("choices"):
        return joined
    one, other = first["choices"][0], dict(second["choices"][0])
    if kind == "chat":
        earlier = (one.get("message") or {}).get("content") or ""
        message = dict(other.get("message") or {})
        message["content"] = earlier + (message.get("content") or "")
        other["message"] = message
    else:
        earlier = one.get("text") or ""
        other["text"] = earlier + (other.get("text") or "")
    if "logprobs" in one or "logprobs" in other:
        other["logprobs"] = _joined_logprobs(one.get("logprobs"), other.get("logprobs"), len(earlier))
    if isinstance(one.get("token_ids"), list) and isinstance(other.get("token_ids"), list):
        other["token_ids"] = one["token_ids"] + other["token_ids"]
    joined["choices"] = [other]
    return joined
