"""Synthetic top-k streams: what an indexer chooses, step after step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
RECENT = 128  # tokens that every choice includes


def scored_stream(
    rng: np.random.Generator, steps: int, context: int, topk: int, *, rho: float = 0.85, noise: float = 0.43
) -> Ids:
    """int32 [steps, topk]: the ``topk`` best tokens of a context that grows by one token a step.

    A token's score is a constant Gumbel variate plus an AR(1) process (scale 1, coefficient ``rho``)
    plus white noise; the last 128 tokens are always chosen. The defaults fit hit rates published for a DSA
    model on long documents.
    """
    longest = context + steps
    constant = rng.gumbel(size=longest).astype(np.float32)
    drift = rng.standard_normal(longest, dtype=np.float32)
    innovation = np.float32(np.sqrt(1 - rho * rho))
    chosen = np.empty((steps, topk), dtype=np.int32)
    for step in range(steps):
        length = context + step + 1
        score = constant + drift + np.float32(noise) * rng.standard_normal(longest, dtype=np.float32)
        score[length - RECENT : length] = np.inf
        chosen[step] = np.argpartition(score[:length], length - topk)[length - topk :]
        drift = np.float32(rho) * drift + innovation * rng.standard_normal(longest, dtype=np.float32)
    return chosen


def turnover_stream(
    rng: np.random.Generator, steps: int, context: int, topk: int, replaced: float = 0.15
) -> Ids:
    """int32 [steps, topk]: the previous step's choice with a fraction replaced by ids never chosen before.

    Misses then don't depend on the pool's size: what differs between sizes is the plan's cost alone.
    """
    fresh = rng.permutation(context).astype(np.int32)
    count = int(topk * replaced)
    if topk + steps * count > context:
        raise ValueError(f"a context of {context} has too few ids for {steps} steps of {count} new ones")
    chosen = np.empty((steps, topk), dtype=np.int32)
    current, used = fresh[:topk].copy(), topk
    for step in range(steps):
        chosen[step] = current
        current[rng.permutation(topk)[:count]] = fresh[used : used + count]
        used += count
    return chosen
