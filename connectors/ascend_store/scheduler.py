"""The scheduler's half: what the store has of a prompt, and what each step computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.connectors.scheduled import scheduled_requests
from vllm_kvoffload.store import KeySpace, Store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """A request that has blocks. begins: since the last step. external: tokens to be loaded then. stored:
    blocks that the store had. hashes: sent so far."""

    request: Request
    external: int
    stored: int
    begins: bool = True
    hashes: int = 0


@dataclass
class HitStats:
    """Totals of look-ups that led to a scheduled request."""

    queried_tokens: int = 0
    hit_tokens: int = 0


@dataclass
class StoreScheduler:
    """Follows requests from the allocation of their blocks to their end.

    mtp: an MTP layer's KV of a block's last token depends on the token after it, so the last block of a hit
    is not taken. keeps_all: the store is where running requests' KV lives, decode's included.
    """

    store: Store
    keys: KeySpace
    block_size: int
    mtp: bool
    keeps_all: bool
    stats: HitStats = field(default_factory=HitStats)
    _tracked: dict[str, Tracked] = field(default_factory=dict)
    _found: dict[str, int] = field(default_factory=dict)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond the computed ones that the store has; at least one token is left to compute."""
        if request.skip_reading_prefix_cache:
            self._found[request.request_id] = 0
            return 0
        blocks = self.store.lookup([self.keys.key(bytes(block_hash)) for block_hash in request.block_hashes])
        self._found[request.request_id] = blocks
        if self.mtp:
            blocks = max(blocks - 1, 0)
        tokens = min(blocks * self.block_size, request.num_tokens - 1)
        return max(tokens - num_computed_tokens, 0)

    def allocated(self, request: Request, external: int) -> None:
        """A request begins, for the first time or after a preemption, with so many tokens to be loaded."""
        stored = self._found.pop(request.request_id, 0)
        self._tracked[request.request_id] = Tracked(request, external, stored)
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += external

    def metadata(self, output: SchedulerOutput) -> StoreMetadata:
        """What a step computes."""
        dropped = list(output.preempted_req_ids or ())
        steps = []
        for req_id, blocks, computed in scheduled_requests(output):
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                tokens = output.num_scheduled_tokens[req_id]
                drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
                steps.append(self._step(tracked, blocks, computed, computed + tokens, drafts))
        return StoreMetadata(steps, dropped)

    def _step(self, tracked: Tracked, blocks: list[int], computed: int, end: int, drafts: int) -> StoreStep:
        request, begins = tracked.request, tracked.begins
        if begins:
            tracked.hashes = 0
        confirmed = end - drafts
        last = confirmed >= request.num_tokens and request.num_output_tokens + 1 >= request.max_tokens
        if not self.keeps_all:
            confirmed = min(confirmed, request.num_prompt_tokens)
        full = min(max(confirmed, computed) // self.block_size, len(request.block_hashes))
        hashes = tuple(bytes(block_hash) for block_hash in request.block_hashes[tracked.hashes : full])
        tracked.begins, tracked.hashes = False, max(full, tracked.hashes)
        return StoreStep(
            req_id=request.request_id,
            begins=begins,
            blocks=tuple(blocks),
            hashes=hashes,
            computed=computed,
            local=computed - tracked.external if begins else 0,
            stored=tracked.stored,
            end=end,
            confirmed=confirmed,
            last=last,
        )

    def finished(self, req_id: str) -> None:
        """The request is over, with or without a result."""
        self._tracked.pop(req_id, None)
        self._found.pop(req_id, None)
