"""Checks a client's request and splits it into sub-requests of one prompt and one choice each. No I/O.

vLLM assigns request ids for prompt lists and ``n`` choices itself, and a decode engine may be unable to
hold all of them at once. One request per prompt and choice has an id known to both engines, and does not
wait for its siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_kvoffload.proxy.balance import Demand
from vllm_kvoffload.proxy.errors import HttpFailure, RequestRefused
from vllm_kvoffload.proxy.jsontext import decode_json, json_bytes
from vllm_kvoffload.proxy.rendezvous import Kind

BYTES_PER_TOKEN = 4
PREFIX_BYTES = 1024
PREFIX_LIMIT = 1 << 20  # bytes of a prompt used for prefix hashes
TOKENS_OF_A_PART = 512  # assumed size of an image or sound in a chat
EXPECTED_OUTPUT = 256
OUTPUT_LIMIT = 1024  # assumed output: a requested limit says little about the actual length
NO_SEED = -1  # vLLM's second name for "no seed"
DEFAULT_COMPLETION_TOKENS = 16  # default of OpenAI and vLLM for /v1/completions

Body = dict[str, Any]


@dataclass(frozen=True)
class SubRequest:
    """A sub-request: one prompt and one choice, as sent to a decode engine without ``kv_transfer_params``."""

    index: int  # index of its choice in the answer
    body: Body
    prefill: Demand
    decode: Demand
    counts_prompt: bool = True  # true for the first choice of a prompt: usage counts each prompt once
    size: int = 0  # approximate bytes of its body


@dataclass(frozen=True)
class Call:
    """One client request."""

    kind: Kind
    stream: bool
    sub_requests: tuple[SubRequest, ...]
    held: int  # upper estimate of its bytes in memory and, with several sub-requests, sent


def _whole(body: Mapping[str, Any], key: str) -> int | None:
    """Reads an integer as vLLM does: also from ``"2"`` and ``2.0``. Raises ``RequestRefused``."""
    value = body.get(key)
    if value is None or isinstance(value, int):
        return value
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError as error:
        raise RequestRefused(f"{key} must be an integer", key) from error


def _refuse_unservable(body: Mapping[str, Any]) -> None:
    """Raises ``RequestRefused`` for options that cannot work when prefill and decode are separate engines."""
    if body.get("kv_transfer_params") is not None:
        raise RequestRefused("kv_transfer_params are the proxy's own; leave them out", "kv_transfer_params")
    if body.get("use_beam_search"):
        raise RequestRefused(
            "beam search doesn't work with prefill and decode on two engines", "use_beam_search"
        )
    if body.get("prompt_embeds") is not None:
        raise RequestRefused(
            "prompt_embeds don't work with prefill and decode on two engines", "prompt_embeds"
        )
    if body.get("prompt_logprobs") is not None:
        raise RequestRefused(
            "prompt_logprobs are not available: decode doesn't see the prompt", "prompt_logprobs"
        )
    if body.get("echo") and body.get("logprobs") is not None:
        raise RequestRefused("echo with logprobs is not available: decode doesn't see the prompt", "echo")
    if body.get("best_of") not in (None, 1, body.get("n")):
        raise RequestRefused("best_of is not available", "best_of")
    truncate = _whole(body, "truncate_prompt_tokens")
    if truncate is not None and truncate < 0:
        # vLLM subtracts max_tokens here, which differs between the two engines.
        raise RequestRefused("give truncate_prompt_tokens as a number of tokens", "truncate_prompt_tokens")
    if not isinstance(body.get("stream"), (bool, type(None))):
        raise RequestRefused("stream must be true or false", "stream")


def prefix_hashes(text: bytes, size: int = PREFIX_BYTES) -> tuple[int, ...]:
    """Hashes the prefixes of ``size``, 2 ``size``, ... bytes of the first ``PREFIX_LIMIT``."""
    made, previous = [], 0
    for start in range(0, min(len(text), PREFIX_LIMIT) - size + 1, size):
        previous = hash((previous, text[start : start + size]))
        made.append(previous)
    return tuple(made)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _prompt_demand(prompt: object) -> tuple[int, bytes, int]:
    """Returns the token count (exact for ids, estimated for text), the bytes to hash, the prompt's total
    bytes."""
    if isinstance(prompt, str):
        size = _utf8_length(prompt)
        return max(1, size // BYTES_PER_TOKEN), prompt[:PREFIX_LIMIT].encode(errors="surrogatepass"), size
    if not isinstance(prompt, list):
        text = msgspec.json.encode(prompt)
        return 1, text, len(text)
    some = prompt[:PREFIX_LIMIT]
    text = msgspec.json.encode(some)
    return max(1, len(prompt)), text, len(text) * len(prompt) // max(1, len(some))


def _chat_tokens(messages: object) -> int:
    total = 0
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            total += _utf8_length(content) // BYTES_PER_TOKEN + 4
        for part in content if isinstance(content, list) else ():
            text = part.get("text") if isinstance(part, dict) else None
            total += len(text) // BYTES_PER_TOKEN if isinstance(text, str) else TOKENS_OF_A_PART
    return total


def _demand(kind: Kind, body: Mapping[str, Any]) -> Demand:
    if kind == "completion":
        tokens, text, size = _prompt_demand(body.get("prompt"))
    else:
        tools = msgspec.json.encode(body.get("tools"))
        text = tools + msgspec.json.encode(body.get("messages"))
        size = len(text)
        tokens = max(1, _chat_tokens(body.get("messages")) + len(tools) // BYTES_PER_TOKEN)
    hashes = prefix_hashes(text)
    return Demand(tokens, hashes, max(1, tokens * PREFIX_BYTES // max(1, size)))


def output_limit(kind: Kind, body: Mapping[str, Any]) -> int | None:
    """Returns the maximum output tokens, None if only the model's length limits them."""
    limit = body.get("max_completion_tokens") if kind == "chat" else None
    limit = body.get("max_tokens") if limit is None else limit
    if limit is None and kind == "completion" and "max_tokens" not in body:
        return DEFAULT_COMPLETION_TOKENS
    return limit if isinstance(limit, int) else None


def sub_request_of(
    kind: Kind,
    body: Body,
    index: int = 0,
    demand: Demand | None = None,
    *,
    counts_prompt: bool = True,
    size: int = 0,
) -> SubRequest:
    """Builds a sub-request with its weights. ``demand``: of its prompt, if already known."""
    demand = demand or _demand(kind, body)
    limit = output_limit(kind, body)
    output = EXPECTED_OUTPUT if limit is None else max(0, min(limit, OUTPUT_LIMIT))
    decode = Demand(demand.tokens + output, demand.prefixes, demand.tokens_per_prefix)
    return SubRequest(index, body, demand, decode, counts_prompt, size)


def _prompts(kind: Kind, body: Mapping[str, Any]) -> list[Any] | None:
    """Returns the prompts of a list, None for a single prompt of any kind, which vLLM validates."""
    prompt = body.get("prompt")
    if kind == "chat" or not isinstance(prompt, list) or not prompt:
        return None
    if all(isinstance(entry, int) for entry in prompt):
        return None
    if not any(all(isinstance(entry, kind) for entry in prompt) for kind in (str, list)):
        raise RequestRefused(
            "prompt must be a string, token ids, a list of strings, or a list of token ids", "prompt"
        )
    return prompt


def parse_call(kind: Kind, raw: bytes, max_sub_requests: int = 1024, max_bytes: int = 256 << 20) -> Call:
    """Parses a request. Raises ``RequestRefused`` if it is not a JSON object or cannot be served.

    ``max_bytes``: limit for the body's values and for the sub-requests' bodies; more is 413.
    """
    held = json_bytes(raw)
    if held > max_bytes:
        raise HttpFailure.of(413, f"the body has more values than fit in {max_bytes} bytes")
    try:
        body = decode_json(raw)
    except msgspec.DecodeError as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    _refuse_unservable(body)
    n = _whole(body, "n")
    n = 1 if n is None else n
    if n < 1:
        raise RequestRefused("n must be at least 1", "n")
    prompts = _prompts(kind, body)
    count = n * (len(prompts) if prompts is not None else 1)
    if count > max_sub_requests:
        raise RequestRefused(f"{count} choices in one request; at most {max_sub_requests} are served", "n")
    common_size, sizes = _sizes(prompts, len(raw))
    total = n * (len(sizes) * common_size + sum(sizes))
    if total > max_bytes and count > 1:
        raise HttpFailure.of(
            413, f"{count} choices of this request are {total} bytes; at most {max_bytes} are sent to engines"
        )
    if count > 1:
        held += total
    sizes = [common_size + size for size in sizes]
    return Call(kind, bool(body.get("stream")), _sub_requests(kind, body, prompts, n, sizes), held)


def _sizes(prompts: list[Any] | None, raw_size: int) -> tuple[int, list[int]]:
    """Returns the bytes shared by all sub-requests, and those of each prompt."""
    if prompts is None:
        return raw_size, [0]
    if raw_size * len(prompts) <= 1 << 20:
        return raw_size, [0] * len(prompts)  # an overestimate, and an underestimate
    own = [len(msgspec.json.encode(prompt)) for prompt in prompts]
    return max(0, raw_size - sum(own)), own


def _sub_requests(
    kind: Kind, body: Body, prompts: list[Any] | None, n: int, sizes: list[int]
) -> tuple[SubRequest, ...]:
    common = {key: value for key, value in body.items() if key not in ("n", "best_of", "request_id")}
    if prompts is None and n == 1:
        return (sub_request_of(kind, common, size=sizes[0]),)
    seed = _whole(body, "seed")
    if seed == NO_SEED:
        seed = None
    made: list[SubRequest] = []
    for prompt, size in zip([None] if prompts is None else prompts, sizes, strict=True):
        one = dict(common) if prompts is None else {**common, "prompt": prompt}
        demand = _demand(kind, one)
        for choice in range(n):
            # vLLM gives choice i of a seeded request the seed plus i.
            seeded = {**one, "seed": seed + choice} if seed is not None and choice else one
            counts = choice == 0
            made.append(sub_request_of(kind, seeded, len(made), demand, counts_prompt=counts, size=size))
    return tuple(made)
