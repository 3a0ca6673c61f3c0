"""Parses JSON from untrusted sources. No I/O."""

from __future__ import annotations

import re
from typing import Any

import msgspec

SMALL = 64 << 10  # size below which a text is small, whatever its values
DEEPEST = 512  # levels; Python's own limit depends on its version and the caller's stack depth
SHORT = 64 << 10  # size below which no number takes long to parse
DIGITS = 100  # of a number in a longer text: parsing and writing time is quadratic
_TWO_DIGITS = re.compile(rb"[0-9]{2}")
_MANY_DIGITS = re.compile(rb"[0-9]{%d,}" % DIGITS)


def _has_long_number(raw: bytes) -> bool:
    """Whether more than ``DIGITS`` digits follow each other outside strings. Linear time for any ``raw``."""
    if len(raw) <= SHORT or not _TWO_DIGITS.search(raw[:: DIGITS // 2]):  # a quick check first
        return False
    plain = raw.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in raw else raw
    quotes = at = 0
    for found in _MANY_DIGITS.finditer(plain):
        quotes += plain.count(b'"', at, found.start())
        at = found.start()
        if quotes % 2 == 0:
            return True
    return False


def decode_json(raw: bytes, kind: Any = Any) -> Any:
    """Parses ``raw``. Raises ``msgspec.DecodeError``, also for nesting too deep to be written again."""
    if _has_long_number(raw):
        raise msgspec.DecodeError(f"JSON has a number of more than {DIGITS} digits")
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
    """Estimates the memory of a JSON text with its values: a list of empty lists takes 20 times its text."""
    if len(raw) <= SMALL:
        return len(raw)
    return len(raw) + 64 * (raw.count(b"[") + raw.count(b",")) + 200 * raw.count(b"{")


def _too_deep() -> msgspec.DecodeError:
    return msgspec.DecodeError(f"JSON is nested more than {DEEPEST} levels deep")


def _deeper_than(value: object, limit: int) -> bool:
    """Whether lists and objects are nested more than ``limit`` deep. Iterative, level by level."""
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
