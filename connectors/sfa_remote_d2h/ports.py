"""Who talks to whom: control ports, tensor-parallel ranks, and which rank moves which blocks. Pure."""

from __future__ import annotations

from vllm_kvoffload.config import ConfigError

MAX_PORT = 65535


def control_port(base: int, dp_rank: int, tp_size: int, tp_rank: int) -> int:
    """Port on which a decode rank listens."""
    return base + dp_rank * tp_size + tp_rank


def check_ports(base: int, dp_size: int, tp_size: int) -> None:
    """Raises ConfigError unless all ports of a decode deployment are ports."""
    last = control_port(base, dp_size - 1, tp_size, tp_size - 1)
    if not 1 <= base <= last <= MAX_PORT:
        rule = (
            f"control ports {base}..{last}, one for each of {dp_size} x {tp_size} ranks, are not in 1..65535"
        )
        raise ConfigError("kv_port", base, rule, f"set it to at most {MAX_PORT - dp_size * tp_size + 1}")


class TPMismatchError(ValueError):
    """Prefill's tensor-parallel size is no multiple of decode's."""


def tp_ratio(prefill_tp: int, decode_tp: int) -> int:
    """Prefill ranks for each decode rank. Raises TPMismatchError."""
    if decode_tp < 1 or prefill_tp < decode_tp or prefill_tp % decode_tp:
        raise TPMismatchError(
            f"prefill has TP {prefill_tp}, decode TP {decode_tp}: prefill's must be a multiple of decode's"
        )
    return prefill_tp // decode_tp


STRIPE_BLOCKS = 4
"""Neighbouring blocks that one rank moves, so that their copies can be merged."""


def owner(block: int, ranks: int) -> int:
    """Which of several ranks moves a block, given by its number in its request.

    It depends on nothing else: two ranks may receive a request in different chunks, from different prefill
    engines even, and together still have every block exactly once.
    """
    return block // STRIPE_BLOCKS % ranks


def chunk_range(
    cached_tokens: int, published_blocks: int, computed_tokens: int, block_size: int, final: bool
) -> tuple[int, int]:
    """Blocks [begin, end) of a request that a step has completed and decode still lacks.

    Args:
        cached_tokens: prefix that decode has. published_blocks: end of what was published before.
        computed_tokens: tokens with KV after the step. final: these are the whole prompt, so its last block
            counts although it may not be full.
    """
    begin = max(cached_tokens // block_size, published_blocks)
    end = -(-computed_tokens // block_size) if final else computed_tokens // block_size
    return begin, max(begin, end)
