"""Finds the end of a chunked body. No I/O.

The parser (llhttp) decodes the chunks but does not say where the next request begins. This module only
finds the end, by the same strict grammar; :class:`~vllm_kvoffload.proxy.edge.Edge` closes the connection
if the two disagree.
"""

from __future__ import annotations

import re

SIZE_LINE = re.compile(rb"([0-9A-Fa-f]+)(?:;[^\r\n]*)?\r\n")
LINE_LIMIT = 4096  # bytes of a size line with extensions, or of a trailer field


class ChunkError(ValueError):
    """Not a chunked body, or mostly framing."""


class Chunks:
    """Finds the end of one body. ``slack``: framing bytes allowed in excess of data bytes."""

    __slots__ = ("_data", "_framing", "_left", "_slack", "_trailers")

    def __init__(self, slack: int) -> None:
        self._slack = slack
        self._framing = 0
        self._data = 0
        self._left = 0  # bytes left of the current chunk, including its line end
        self._trailers = False

    def take(self, buffer: bytearray) -> tuple[int, bool]:
        """Returns how many leading bytes of ``buffer`` are complete parts, and whether the body ends
        there.

        The remainder starts a line or the next request. Raises ``ChunkError``.
        """
        at = 0
        while at < len(buffer):
            if self._left:
                taken = min(self._left, len(buffer) - at)
                self._left -= taken
                at += taken
                continue
            end = buffer.find(b"\n", at, at + LINE_LIMIT)
            if end < 0:
                if len(buffer) - at >= LINE_LIMIT:
                    raise ChunkError("a line of a chunked body is too long")
                break
            line, at = bytes(buffer[at : end + 1]), end + 1
            self._framing += len(line) + 2  # plus the line end after the data
            if self._framing > self._slack + self._data:
                raise ChunkError("a chunked body is mostly framing")
            if self._trailers:
                if line == b"\r\n":
                    return at, True
            else:
                self._begin(line)
        return at, False

    def _begin(self, line: bytes) -> None:
        """Starts the chunk whose size ``line`` gives."""
        found = SIZE_LINE.fullmatch(line)
        size = found[1].lstrip(b"0") if found is not None else None
        if size is None or len(size) > 16:
            raise ChunkError("a chunk's size is no hexadecimal number")
        if not size:
            self._trailers = True
            self._framing = self._data = 0  # bounds the trailers separately
            return
        length = int(size, 16)
        self._data += length
        self._left = length + 2
