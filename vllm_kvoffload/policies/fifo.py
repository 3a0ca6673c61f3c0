"""First in, first out: hits change nothing."""

from vllm_kvoffload.policies.policy import Ages, Policy, round_from


def victim(ages: Ages, hand: int, unneeded: set[int]) -> int:
    """The first unneeded way at or after the hand, going round. Ages stay 0."""
    return next(way for way in round_from(hand, len(ages)) if way in unneeded)


POLICY = Policy(
    name="fifo", summary="oldest", age_bits=0, new_age=0, hit_lowers=0, hit_floor=0, victim=victim
)
