"""Text and values from outside (requests, peers, engines) as log lines and messages may quote them. Pure."""

from __future__ import annotations

import re

LINE_LENGTH = 512
VALUE_LENGTH = 80

_NOT_IN_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def is_line(text: str) -> bool:
    """Whether the text has no line end, no other control character, and can be encoded."""
    return _NOT_IN_LINE.search(text) is None


def printable(text: str, length: int = LINE_LENGTH) -> str:
    """The text as one line of at most `length` characters, with control characters escaped."""
    if len(text) > length:
        text = f"{text[: length - 3]}..."
    if not is_line(text):
        text = _NOT_IN_LINE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
        text = text if len(text) <= length else f"{text[: length - 3]}..."
    return text


def shown(value: object) -> str:
    """A value as a short piece of ASCII on one line; containers and long integers are only described."""
    if isinstance(value, str):
        text = ascii(value[:VALUE_LENGTH])
        return text if len(value) <= VALUE_LENGTH else f"{text}... ({len(value)} characters)"
    if value is None or isinstance(value, (bool, float)):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else f"a {type(value).__name__}"
