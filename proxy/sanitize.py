"""Derives the prefill request from a client's request, by one table.

A prefill engine generates one token, which is never read: sampling is greedy, and parameters that shape
output are dropped. Parameters that shape the prompt stay, since both engines must see the same tokens:
messages, tools, tool_choice, response_format, chat template arguments, truncation, cache_salt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final


class _Drop:
    """Marks a key that prefill must not receive."""


DROP: Final = _Drop()

# Key -> value for prefill. Other keys are passed on.
PREFILL_TABLE: Final[Mapping[str, object]] = {
    "stream": False,
    "stream_options": DROP,  # rejected by vLLM without stream
    "n": 1,
    "best_of": DROP,
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 1,  # rejected above max_tokens
    "echo": False,
    "logprobs": DROP,
    "top_logprobs": DROP,  # rejected without logprobs
    "prompt_logprobs": DROP,
    "logprob_token_ids": DROP,  # rejected without logprobs
    "return_token_ids": DROP,
    "return_tokens_as_token_ids": DROP,
    "thinking_token_budget": DROP,
    "temperature": 0,
    **dict.fromkeys(("top_p", "top_k", "min_p", "seed"), DROP),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), DROP),
    **dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "watermarking"), DROP),
    **dict.fromkeys(("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"), DROP),
    **dict.fromkeys(("structured_outputs", "repetition_detection"), DROP),
    **dict.fromkeys(("use_beam_search", "length_penalty"), DROP),
    "kv_transfer_params": DROP,
    "request_id": DROP,
}
# Set on every prefill request; the others above only replace existing values.
ALWAYS: Final = frozenset({"stream", "max_tokens", "min_tokens", "temperature"})


def prefill_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the body of the prefill request. ``body`` is not changed."""
    made: dict[str, Any] = {}
    for key, value in body.items():
        replacement = PREFILL_TABLE.get(key, value)
        if replacement is not DROP:
            made[key] = replacement
    for key in ALWAYS:
        made[key] = PREFILL_TABLE[key]
    made["kv_transfer_params"] = dict(kv_transfer_params)
    return made
