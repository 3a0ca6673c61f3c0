"""A response's head and the first piece of its body in one write: each is a system call and a packet."""

from __future__ import annotations

import asyncio
from typing import Any


class Cork:
    """uvicorn's transport of one response until the head is out. Put in by :func:`cork`.

    Not for HEAD: uvicorn writes no body there, for which the head would wait.
    """

    __slots__ = ("_cycle", "_head", "behind")

    def __init__(self, cycle: Any, transport: asyncio.Transport) -> None:
        self.behind = transport
        self._cycle = cycle
        self._head = b""

    def write(self, data: bytes) -> None:
        """Keeps the head; what comes next goes out with it, and all that follows past this object."""
        if not self._cycle.response_started:  # "100 Continue"
            self.behind.write(data)
        elif not self._head:
            self._head = data
        else:
            head, self._head = self._head, b""
            self._cycle.transport = self.behind
            self.behind.writelines([head, data])

    def close(self) -> None:
        """The transport's, after the head."""
        if self._head:
            self.write(b"")
        self.behind.close()

    def is_closing(self) -> bool:
        """The transport's."""
        return self.behind.is_closing()


def cork(cycle: Any, transport: asyncio.Transport) -> None:
    """Puts the cork in before uvicorn's ``cycle`` answers."""
    if cycle.scope["method"] != "HEAD":
        cycle.transport = Cork(cycle, transport)
