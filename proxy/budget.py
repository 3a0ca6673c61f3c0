"""A limit on bytes that are held at a time, whoever holds them. No I/O; for one event loop."""

from __future__ import annotations


class ByteBudget:
    """``take`` what will be held and ``give`` it back. ``limit`` in bytes."""

    __slots__ = ("limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0  # bytes held now
        self.refused = 0  # calls of ``take`` that found no room

    def take(self, size: int) -> bool:
        """Whether ``size`` bytes more may be held; then they count until they are given back."""
        if self.used + size > self.limit:
            self.refused += 1
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """``size`` bytes are held no longer."""
        self.used -= size
