"""Second chance: a hit sets a slot's bit; the hand passes ways whose bit is set, clearing it."""

from vllm_kvoffload.policies.policy import TO_FLOOR, Ages, Policy, round_from


def victim(ages: Ages, hand: int, unneeded: set[int]) -> int:
    """From the hand on, going round, an unneeded way with age 1 is passed and set to 0; the first with age 0
    gives way. When all had age 1, the round leaves them at 0 and the first unneeded way gives way. Needed
    ways are stepped over, age untouched."""
    order = [way for way in round_from(hand, len(ages)) if way in unneeded]
    for way in order:
        if ages[way] == 0:
            return way
        ages[way] = 0
    return order[0]


POLICY = Policy(
    name="clock",
    summary="not hit since the hand passed",
    age_bits=1,
    new_age=0,
    hit_lowers=TO_FLOOR,
    hit_floor=1,
    victim=victim,
)
