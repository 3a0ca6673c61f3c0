"""Parameters of a replacement policy of the hot pool's sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

TO_FLOOR: Final = 255
"""As ``hit_lowers``: the age before the hit does not matter."""


class Ages(Protocol):
    """The ages of one set's ways."""

    def __len__(self) -> int: ...

    def __getitem__(self, way: int, /) -> Any: ...

    def __setitem__(self, way: int, age: int, /) -> None: ...


@dataclass(frozen=True)
class Policy:
    """A policy as the oracle plans by it. The header of the same name in ``csrc/policies`` means the same.

    Attributes:
        name: as the option ``policy`` has it.
        summary: the rule for eviction, in a few words.
        age_bits: bits of state of each slot, its age; from 0 to 5.
        new_age: age of a row that was just placed.
        hit_lowers, hit_floor: a hit lowers a row's age by ``hit_lowers``, but not below ``hit_floor``; once
            per step, however many query tokens chose the row.
        victim: which way is replaced, from the set's ages, its hand, and the ways that the step does not need
            (at least one). The hand stands behind the last victim and moves behind this one. May change the
            ages of unneeded ways.
    """

    name: str
    summary: str
    age_bits: int
    new_age: int
    hit_lowers: int
    hit_floor: int
    victim: Callable[[Ages, int, set[int]], int]

    def age_after_hit(self, age: int) -> int:
        """The age of a row that had ``age`` and was hit."""
        return max(age - self.hit_lowers, self.hit_floor)


def round_from(hand: int, ways: int) -> Iterator[int]:
    """All ways of a set, from the hand on and going round."""
    return ((hand + step) % ways for step in range(ways))


def age_and_take_oldest(ages: Ages, hand: int, unneeded: set[int], oldest: int) -> int:
    """The first unneeded way at or after the hand, going round, with age ``oldest``; while there is none, all
    unneeded ways of the set age by one."""
    while not any(ages[way] == oldest for way in unneeded):
        for way in unneeded:
            ages[way] += 1
    return next(way for way in round_from(hand, len(ages)) if way in unneeded and ages[way] == oldest)
