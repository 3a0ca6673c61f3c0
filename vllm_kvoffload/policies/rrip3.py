"""RRIP with three bits, where a hit lowers the age by two only: rows that are hit often stay longest."""

from vllm_kvoffload.policies.policy import Ages, Policy, age_and_take_oldest


def victim(ages: Ages, hand: int, unneeded: set[int]) -> int:
    """The first unneeded way with age 7 from the hand on; all unneeded ways age until there is one."""
    return age_and_take_oldest(ages, hand, unneeded, oldest=7)


POLICY = Policy(
    name="rrip3",
    summary="3 bits of age, lowered by each hit",
    age_bits=3,
    new_age=6,
    hit_lowers=2,
    hit_floor=0,
    victim=victim,
)
