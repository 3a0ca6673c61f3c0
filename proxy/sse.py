"""Splits server-sent events as bytes: whole events from arbitrary pieces, without parsing their JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from vllm_kvoffload.proxy.jsontext import decode_json

# A line ends with CR LF, LF or CR; an empty line ends an event.
_EOL = rb"(?:\r\n|\n|\r(?!\n))"
_BOUNDARY = re.compile(_EOL + _EOL)
_LINE = re.compile(_EOL)
DONE = b"[DONE]"
EVENT_LIMIT = 8 << 20  # bytes; a token with 20 log probabilities takes two thousand
DONE_EVENT = b"data: [DONE]\n\n"


class EventTooLarge(ValueError):
    """An event without an end."""


class EventBuffer:
    """Holds back incomplete events."""

    __slots__ = ("_parts", "_size", "_tail")

    def __init__(self) -> None:
        self._tail = b""  # the last piece held back
        self._parts: list[bytes] = []  # earlier pieces, in which no event ends
        self._size = 0  # bytes of the parts

    def passes(self, data: bytes) -> bool:
        """Whether ``data`` clearly consists of whole events and nothing is held back before it."""
        return not self._tail and data.endswith(b"\n\n") and b"\r" not in data

    def feed(self, data: bytes) -> bytes:
        """Returns all events that end in ``data``, byte for byte; keeps the remainder.

        Usually ``data`` consists of whole events and is returned as it is. Raises
        ``EventTooLarge`` for an event of more than ``EVENT_LIMIT`` bytes.
        """
        if self.passes(data):
            return data
        data = self._tail + data
        if not self._ends_in(data):
            # Only its last bytes can start a terminator: long events are searched once.
            keep = max(0, len(data) - 4)
            if keep:
                self._parts.append(data[:keep])
                self._size += keep
            self._tail = data[keep:]
            if self._size > EVENT_LIMIT:
                raise EventTooLarge(f"an event has more than {EVENT_LIMIT} bytes")
            return b""
        if self._parts:
            data, self._parts, self._size = b"".join([*self._parts, data]), [], 0
        if b"\r" not in data:
            end = data.rfind(b"\n\n")
            end = end + 2 if end >= 0 else 0
        else:
            end = 0
            for match in _BOUNDARY.finditer(data):
                end = match.end()
        self._tail = data[end:]
        return data[:end]

    @staticmethod
    def _ends_in(data: bytes) -> bool:
        if b"\r" not in data:
            return b"\n\n" in data
        return _BOUNDARY.search(data) is not None

    def rest(self) -> bytes:
        """Returns the stream's unterminated rest: an event without its empty line, or nothing."""
        tail = b"".join([*self._parts, self._tail])
        self._parts, self._size, self._tail = [], 0, b""
        return tail


def split(events: bytes) -> Iterator[bytes]:
    """Yields each whole event of ``events`` with its empty line, byte for byte."""
    start = 0
    for match in _BOUNDARY.finditer(events):
        yield events[start : match.end()]
        start = match.end()
    if start < len(events):
        yield events[start:]


def payloads(events: bytes) -> Iterator[bytes]:
    """Yields the data of each whole event in ``events``; comments and other fields are skipped."""
    for block in _BOUNDARY.split(events) if b"\r" in events else events.split(b"\n\n"):
        if block.startswith(b"data: ") and b"\n" not in block and b"\r" not in block:
            yield block[6:]  # the form that engines send
        elif block:
            lines = []
            for line in _LINE.split(block):
                if line.startswith(b"data:"):
                    lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            if lines:
                yield lines[0] if len(lines) == 1 else b"\n".join(lines)


def parse(payload: bytes) -> dict[str, Any] | None:
    """Parses one event's data as a JSON object; None for ``[DONE]`` and anything else."""
    if payload == DONE:
        return None
    try:
        value = decode_json(payload)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, dict) else None


def event(value: object) -> bytes:
    """Formats one event with ``value`` as JSON."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
