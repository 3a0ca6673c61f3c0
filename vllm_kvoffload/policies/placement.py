"""Placements: in which sets of a partition a token id may be resident, whatever the replacement policy.

An id has W ways, numbered from 0 as if they were one set's; a policy sees only those. Needs neither torch nor
numpy. ``csrc/policies/placement.h`` means the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

BLOCK_SETS: Final = 64
"""An id's two sets are in one aligned block of this many neighbouring sets, so that blocks are planned
independently of each other."""


@dataclass(frozen=True)
class Placement:
    """name: as the option ``placement`` has it. sets_per_id: in how many sets an id's ways are, 1 or 2."""

    name: str
    sets_per_id: int

    def set_ways(self, ways: int) -> int:
        """Ways of one set, where an id has ``ways``."""
        return ways // self.sets_per_id

    def sets_of(self, token: int, sets: int) -> tuple[int, ...]:
        """The sets that an id (not negative) may be resident in, its own first. sets: a power of two, at
        least ``sets_per_id``."""
        own = token & (sets - 1)
        return (own,) if self.sets_per_id == 1 else (own, other_set(token, sets))

    def sets_beside(self, index: int) -> tuple[int, ...]:
        """The sets tried together when an id is displaced into set ``index``."""
        return (index,) if self.sets_per_id == 1 else (index, index ^ 1)


def other_set(token: int, sets: int) -> int:
    """The second set of an id. Of the two sets one has an even number and one an odd, so they differ."""
    scrambled = (token // sets) * 2654435769 % (1 << 32) >> 16
    return (token & (sets - 1)) ^ (scrambled & (min(BLOCK_SETS, sets) - 1) | 1)


PLACEMENT_TABLE: Final[Mapping[str, Placement]] = MappingProxyType(
    {placement.name: placement for placement in (Placement("one_set", 1), Placement("two_sets", 2))}
)
PLACEMENTS: Final = tuple(PLACEMENT_TABLE)
DEFAULT_PLACEMENT: Final = "one_set"
