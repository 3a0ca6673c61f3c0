"""Synthetic top-k streams: an indexer's top-k indices, step after step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.trace.generator import scored_stream

__all__ = ["scored_stream", "turnover_stream"]

Ids = npt.NDArray[np.int32]


def turnover_stream(
    rng: np.random.Generator, steps: int, context: int, topk: int, replaced: float = 0.15
) -> Ids:
    """int32 [steps, topk]: the previous step's top-k with a fraction replaced by ids never selected
    before.

    Misses then do not depend on the pool's size: sizes differ only in the plan's cost.
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
