"""The scheduler half: looks prompts up in the store and describes what each step computes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.connectors.scheduled import scheduled_requests
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.log import RateLimitedLog
from vllm_kvoffload.store import KeySpace, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class StoredRequest:
    """A request that holds blocks. run, generation, refused: see `StoreStep`. begins: allocated since the
    last step. external: tokens to load then. stored: blocks the store had. hashes: number already sent."""

    request: Request
    run: str
    generation: str
    external: int
    stored: int
    begins: bool = True
    hashes: int = 0
    refused: str = ""


@dataclass
class HitStats:
    """Totals of lookups whose request was scheduled."""

    queried_tokens: int = 0
    hit_tokens: int = 0


@dataclass
class StoreScheduler:
    """Follows requests from block allocation to their end.

    mtp: an MTP layer's KV for a block's last token depends on the next token, so the last block of a hit
    is not used. keeps_all: running requests' KV lives in the store, including what decode appends.

    Malformed data in a request never raises: the request is looked up as a miss and not stored.
    """

    store: Store
    keys: KeySpace
    block_size: int
    mtp: bool
    keeps_all: bool
    stats: HitStats = field(default_factory=HitStats)
    _tracked: dict[str, StoredRequest] = field(default_factory=dict)
    _found: dict[str, int] = field(default_factory=dict)
    _generation: str = ""
    _runs: Iterator[str] = field(default_factory=lambda: _run_names(secrets.token_hex(8)))
    _log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(__name__, subject="store"))

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Returns how many more tokens the store holds beyond the computed ones; leaves at least one to
        compute."""
        self._found[request.request_id] = 0
        try:
            if request.skip_reading_prefix_cache:
                return 0
            hashes = request.block_hashes
            found = self.store.lookup([self.keys.key(bytes(one), self._generation) for one in hashes])
            blocks = max(found - 1, 0) if self.mtp else found
            tokens = max(min(blocks * self.block_size, request.num_tokens - 1) - num_computed_tokens, 0)
        except Exception as error:
            self._log.warning("request", f"{shown(request.request_id)} is not looked up: {error!r}")
            return 0
        self._found[request.request_id] = found
        return tokens

    def allocated(self, request: Request, external: int) -> None:
        """Registers a request, new or resumed after preemption, with `external` tokens to load."""
        stored = self._found.pop(request.request_id, 0)
        self._tracked[request.request_id] = StoredRequest(
            request, next(self._runs), self._generation, external, stored
        )
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += external

    def reset(self) -> None:
        """Starts a new generation: requests that begin later find nothing that was stored before.

        Running requests keep their KV, but later requests do not find what they store. The new
        generation's name is random, because another engine that shares the store may have other weights by
        now.
        """
        self._generation = secrets.token_hex(8)
        self._found.clear()

    def metadata(self, output: SchedulerOutput) -> StoreMetadata:
        """Describes the requests of a step to the workers."""
        dropped = list(output.preempted_req_ids or ())
        steps = []
        for req_id, blocks, computed in scheduled_requests(output):
            tracked = self._tracked.get(req_id)
            if tracked is not None:
                tokens = output.num_scheduled_tokens[req_id]
                drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
                steps.append(self._guarded_step(tracked, req_id, blocks, computed, tokens, drafts))
        return StoreMetadata(steps, dropped)

    def _guarded_step(
        self, tracked: StoredRequest, req_id: str, blocks: list[int], computed: int, tokens: int, drafts: int
    ) -> StoreStep:
        begins, end = tracked.begins, computed + tokens
        if not tracked.refused:
            try:
                return self._step(tracked, blocks, computed, end, drafts)
            except Exception as error:
                tracked.refused = f"it can't be stored: {error!r}"
                self._log.warning("request", f"{shown(req_id)}: {tracked.refused}")
        tracked.begins = False
        return StoreStep(
            req_id=req_id,
            run=tracked.run,
            begins=begins,
            blocks=tuple(blocks),
            hashes=(),
            computed=computed,
            local=computed - tracked.external if begins else 0,
            stored=0,
            end=end,
            confirmed=computed,
            last=False,
            refused=tracked.refused,
        )

    def _step(
        self, tracked: StoredRequest, blocks: list[int], computed: int, end: int, drafts: int
    ) -> StoreStep:
        request, begins = tracked.request, tracked.begins
        if begins:
            tracked.hashes = 0
        confirmed = end - drafts
        limit = request.max_tokens  # vLLM fills it in; None means the request may continue
        last = (
            limit is not None and confirmed >= request.num_tokens and request.num_output_tokens + 1 >= limit
        )
        if not self.keeps_all:
            confirmed = min(confirmed, request.num_prompt_tokens)
        full = min(max(confirmed, computed) // self.block_size, len(request.block_hashes))
        hashes = tuple(bytes(block_hash) for block_hash in request.block_hashes[tracked.hashes : full])
        tracked.begins, tracked.hashes = False, max(full, tracked.hashes)
        return StoreStep(
            req_id=request.request_id,
            run=tracked.run,
            begins=begins,
            blocks=tuple(blocks),
            hashes=hashes,
            computed=computed,
            local=computed - tracked.external if begins else 0,
            stored=tracked.stored,
            end=end,
            confirmed=confirmed,
            last=last,
            generation=tracked.generation,
        )

    def finished(self, req_id: str) -> None:
        """Forgets a request that has ended, with or without a result."""
        self._tracked.pop(req_id, None)
        self._found.pop(req_id, None)


def _run_names(engine: str) -> Iterator[str]:
    return (f"{engine}-{number}" for number in count())
