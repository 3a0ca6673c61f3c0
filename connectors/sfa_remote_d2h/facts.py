"""Named facts that prefill and decode must agree on, their digest, and the differences of two engines.
Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from vllm_kvoffload.foreign_text import printable

FACT_LENGTH = 200


def digest_of(facts: Mapping[str, str]) -> str:
    """Hex digest of facts."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()


def differences(prefill: Mapping[str, str], decode: Mapping[str, str]) -> str:
    """Lists the facts that differ, with both values: "dtype (prefill a, decode b), ..."."""
    keys = [key for key in {**decode, **prefill} if prefill.get(key) != decode.get(key)]
    return ", ".join(
        f"{key} (prefill {prefill.get(key, 'unknown')}, decode {decode.get(key, 'unknown')})" for key in keys
    )


def clipped(text: str) -> str:
    """Shortens a long text to its beginning and a digest, so that different values stay different."""
    text = printable(text, 1 << 20)
    if len(text) <= FACT_LENGTH:
        return text
    return f"{text[: FACT_LENGTH - 20]}... {hashlib.sha256(text.encode()).hexdigest()[:16]}"
