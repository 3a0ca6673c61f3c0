"""Writes a response's head and the first piece of its body together: each write is a system call and
packet."""

from __future__ import annotations

import asyncio
from typing import Any


class Cork:
    """Replaces uvicorn's transport for one response until the head is sent. Installed by :func:`cork`.

    Not for HEAD: uvicorn writes no body there, so the head would wait forever.
    """

    __slots__ = ("_cycle", "_head", "behind")

    def __init__(self, cycle: Any, transport: asyncio.Transport) -> None:
        self.behind = transport
        self._cycle = cycle
        self._head = b""

    def write(self, data: bytes) -> None:
        """Holds the head back; sends it with the next piece, after which writes bypass this object."""
        if not self._cycle.response_started:  # "100 Continue"
            self.behind.write(data)
        elif not self._head:
            self._head = data
        else:
            head, self._head = self._head, b""
            self._cycle.transport = self.behind
            self.behind.writelines([head, data])

    def close(self) -> None:
        """Sends the head, then closes the transport."""
        if self._head:
            self.write(b"")
        self.behind.close()

    def is_closing(self) -> bool:
        """Delegates to the transport."""
        return self.behind.is_closing()


def cork(cycle: Any, transport: asyncio.Transport) -> None:
    """Installs the cork before uvicorn's ``cycle`` answers."""
    if cycle.scope["method"] != "HEAD":
        cycle.transport = Cork(cycle, transport)
