"""Corrects token usage for clients. No I/O.

Decode reports every received token as cached and, after a re-dispatch, the output so far as prompt.
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
    """Facts unknown to decode. ``cached_tokens``: in prefill's prefix cache; None if unknown.

    ``prefilled``: decode asked for a prefill; otherwise its own count is right. ``completed_before``:
    output tokens of earlier dispatches, which are part of this one's prompt.
    """

    prefilled: bool = False
    cached_tokens: int | None = None
    completed_before: int = 0


def cached_tokens(usage: object) -> int | None:
    """Reads cached tokens from a prefill answer. vLLM omits the details when there are none: that is 0."""
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
            cached = min(cached, prompt)  # a re-dispatch also finds the output so far cached
        details["cached_tokens"] = cached


def add_usage(parts: Iterable[tuple[Usage, bool]]) -> Usage:
    """Sums usage over sub-requests. A part's flag says whether its prompt counts: once per prompt."""
    total: Usage = dict.fromkeys(COUNTERS, 0)
    details: dict[str, dict[str, int]] = {}
    for usage, counts_prompt in parts:
        for side in ("prompt", "completion") if counts_prompt else ("completion",):
            total[f"{side}_tokens"] += _count(usage, f"{side}_tokens")
            _add_details(details, usage, f"{side}_tokens_details")
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    return {**total, **details}


def _add_details(total: dict[str, dict[str, int]], usage: Usage, key: str) -> None:
    """Adds the counts in ``usage[key]`` (cached tokens, reasoning tokens and others) to ``total[key]``."""
    given = usage.get(key)
    for name, value in given.items() if isinstance(given, dict) else ():
        if isinstance(value, int):
            counts = total.setdefault(key, {})
            counts[name] = counts.get(name, 0) + value
