"""Reads vLLM's scheduler output for connectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def scheduled_requests(output: SchedulerOutput) -> Iterable[tuple[str, list[int], int]]:
    """Yields (request, new blocks, tokens computed before the step); a resumed request yields all its
    blocks."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, list(new.block_ids[0]), new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    for index, req_id in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[index]
        yield req_id, list(blocks[0]) if blocks else [], cached.num_computed_tokens[index]
