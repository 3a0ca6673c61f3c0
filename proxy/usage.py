"""Token usage as a client should see it. No I/O.

Decode reports every token that it pulled as cached, and, after a re-dispatch, the output so far as prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Usage = dict[str, Any]
COUNTERS = ("prompt_tokens", "completion_tokens", "total_tokens")


def _count(usage: Usage, key: str) -> int:
    value = usage.get(key)
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class UsageFacts:
    """What decode can't know. ``cached_tokens``: of prefill's prefix cache; None where it is unknown.

    ``prefilled``: decode asked for a prefill; otherwise its own count is right. ``completed_before``: output
    tokens of earlier dispatches, which this one has in its prompt.
    """

    prefilled: bool = False
    cached_tokens: int | None = None
    completed_before: int = 0


def cached_tokens(usage: object) -> int | None:
    """Of a prefill answer's usage. vLLM leaves the details out when there are none: that is 0."""
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return value if isinstance(value, int) else 0


def rewrite_usage(usage: Usage, facts: UsageFacts) -> None:
    """Corrects ``usage`` in place."""
    before = facts.completed_before
    if before:
        usage["prompt_tokens"] = max(0, _count(usage, "prompt_tokens") - before)
        usage["completion_tokens"] = _count(usage, "completion_tokens") + before
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    details = usage.get("prompt_tokens_details")
    if facts.prefilled and isinstance(details, dict) and details.get("cached_tokens") is not None:
        cached = facts.cached_tokens
        prompt = usage.get("prompt_tokens")
        if cached is not None and isinstance(prompt, int):
            cached = min(cached, prompt)  # a re-dispatch finds the output so far cached as well
        details["cached_tokens"] = cached


def add_usage(parts: Iterable[tuple[Usage, bool]]) -> Usage:
    """The sum over children. The flag of a part says whether its prompt counts: once per prompt."""
    total: Usage = dict.fromkeys(COUNTERS, 0)
    cached: int | None = None
    for usage, counts_prompt in parts:
        total["completion_tokens"] += _count(usage, "completion_tokens")
        if not counts_prompt:
            continue
        total["prompt_tokens"] += _count(usage, "prompt_tokens")
        details = usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        if isinstance(value, int):
            cached = value + (cached or 0)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    if cached is not None:
        total["prompt_tokens_details"] = {"cached_tokens": cached}
    return total
