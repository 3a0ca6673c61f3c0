"""JSON from outside. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

SMALL = 64 << 10  # bytes of a text that is small whatever values are in it
DEEPEST = 512  # levels; Python's own limit depends on its version, and on how deep the caller is


def decode_json(raw: bytes, kind: Any = Any) -> Any:
    """The value. Raises ``msgspec.DecodeError``, also for what is nested too deeply to be written again."""
    try:
        value = msgspec.json.decode(raw, type=kind)
    except RecursionError:
        raise _too_deep() from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"JSON is malformed: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > DEEPEST and _deeper_than(value, DEEPEST):
        raise _too_deep()
    return value


def json_bytes(raw: bytes) -> int:
    """About the memory of a JSON text and of its values: a list of empty lists takes 20 times its text."""
    if len(raw) <= SMALL:
        return len(raw)
    return len(raw) + 64 * (raw.count(b"[") + raw.count(b",")) + 200 * raw.count(b"{")


def _too_deep() -> msgspec.DecodeError:
    return msgspec.DecodeError(f"JSON is nested more than {DEEPEST} levels deep")


def _deeper_than(value: object, limit: int) -> bool:
    """Whether lists and objects are nested more than ``limit`` deep. Level by level, without recursion."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(limit):
        if not level:
            return False
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
    return bool(level)
