"""Server-sent events as bytes: whole events out of arbitrary pieces, without parsing their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

# A line ends with CR LF, LF or CR; an empty line ends an event.
_EOL = rb"(?:\r\n|\n|\r(?!\n))"
_BOUNDARY = re.compile(_EOL + _EOL)
_LINE = re.compile(_EOL)
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"


class EventBuffer:
    """Holds back the piece of an event that hasn't ended yet."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def passes(self, data: bytes) -> bool:
        """Whether ``data`` is plainly a number of whole events, and nothing is held back before it."""
        return not self._tail and data.endswith(b"\n\n") and b"\r" not in data

    def feed(self, data: bytes) -> bytes:
        """All events that end in ``data``, byte for byte; what comes after them is kept.

        In the usual case ``data`` is a number of whole events, and comes back as it is.
        """
        if self.passes(data):
            return data
        data = self._tail + data
        if b"\r" not in data:
            end = data.rfind(b"\n\n")
            end = end + 2 if end >= 0 else 0
        else:
            end = 0
            for match in _BOUNDARY.finditer(data):
                end = match.end()
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What the stream ended with: an event without its empty line, or nothing."""
        tail, self._tail = self._tail, b""
        return tail


def split(events: bytes) -> Iterator[bytes]:
    """Each whole event of ``events`` with its empty line, byte for byte."""
    start = 0
    for match in _BOUNDARY.finditer(events):
        yield events[start : match.end()]
        start = match.end()
    if start < len(events):
        yield events[start:]


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each whole event in ``events``; comments and other fields are passed over."""
    for block in _BOUNDARY.split(events) if b"\r" in events else events.split(b"\n\n"):
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
            yield block[6:]  # as engines write them
        elif block:
            lines = []
            for line in _LINE.split(block):
                if line.startswith(b"data:"):
                    lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            if lines:
                yield lines[0] if len(lines) == 1 else b"\n".join(lines)


def parse(payload: bytes) -> dict[str, Any] | None:
    """The JSON object of one event's data; None for ``[DONE]`` and what isn't an object."""
    if payload == DONE:
        return None
    try:
        value = msgspec.json.decode(payload)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def event(value: object) -> bytes:
    """One event with ``value`` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
