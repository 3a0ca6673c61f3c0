"""Assigns control ports, tensor-parallel ranks, and the blocks that each rank moves. Pure."""

from __future__ import annotations


class TPMismatchError(ValueError):
    """Prefill's tensor-parallel size is not a multiple of decode's."""


def tp_ratio(prefill_tp: int, decode_tp: int) -> int:
    """Returns the number of prefill ranks per decode rank. Raises TPMismatchError."""
    if decode_tp < 1 or prefill_tp < decode_tp or prefill_tp % decode_tp:
        raise TPMismatchError(
            f"prefill has TP {prefill_tp}, decode TP {decode_tp}: prefill's must be a multiple of decode's"
        )
    return prefill_tp // decode_tp


STRIPE_BLOCKS = 4
"""Neighbouring blocks moved by one rank, so that their copies can be merged."""


def owner(block: int, ranks: int) -> int:
    """Returns which of `ranks` ranks moves a block, given by its number in its request.

    It depends on nothing else: two ranks may receive a request in different chunks, even from different
    prefill engines, and together still get every block exactly once.
    """
    return block // STRIPE_BLOCKS % ranks


def chunk_range(
    cached_tokens: int, published_blocks: int, computed_tokens: int, block_size: int, final: bool
) -> tuple[int, int]:
    """Returns the blocks [begin, end) of a request that a step has completed and decode still lacks.

    Args:
        cached_tokens: prefix that decode has. published_blocks: end of what was published before.
        computed_tokens: tokens with KV after the step. final: these are the whole prompt, so its last block
            counts although it may not be full.
    """
    begin = max(cached_tokens // block_size, published_blocks)
    end = -(-computed_tokens // block_size) if final else computed_tokens // block_size
    return begin, max(begin, end)
