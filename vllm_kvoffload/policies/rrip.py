"""Static RRIP with two bits: a hit makes a row young, a new row starts nearly old."""

from vllm_kvoffload.policies.policy import TO_FLOOR, Ages, Policy, age_and_take_oldest


def victim(ages: Ages, hand: int, unneeded: set[int]) -> int:
    """The first unneeded way with age 3 from the hand on; all unneeded ways age until there is one."""
    return age_and_take_oldest(ages, hand, unneeded, oldest=3)


POLICY = Policy(
    name="rrip",
    summary="2 bits of age",
    age_bits=2,
    new_age=2,
    hit_lowers=TO_FLOOR,
    hit_floor=0,
    victim=victim,
)
