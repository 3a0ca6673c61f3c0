"""Times contenders alternately."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median


def interleave(
    contenders: Mapping[str, Callable[[int], object]], warm_up: int, rounds: int
) -> dict[str, float]:
    """Median CPU seconds of one call of each contender, which must run on the calling thread alone.

    CPU time, because other load on the core must not count.

    Every round calls each contender once with the round's number, in an order that rotates. The first
    ``warm_up`` rounds are not counted.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warm_up + rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            call = contenders[name]
            begin = time.thread_time()
            call(index)
            elapsed = time.thread_time() - begin
            if index >= warm_up:
                seconds[name].append(elapsed)
    return {name: median(values) for name, values in seconds.items()}
