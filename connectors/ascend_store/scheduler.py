"""The scheduler's half: what the store has of a prompt, and what each step computes."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.connectors.scheduled import scheduled_requests
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.log import QuietLog
from vllm_kvoffload.store import KeySpace, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class Tracked:
    """A request that has blocks. run, generation, refused: see `StoreStep`. begins: since the last step.
    external: tokens to be loaded then. stored: blocks that the store had. hashes: sent so far."""

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
    """Totals of look-ups that led to a scheduled request."""

    queried_tokens: int = 0
    hit_tokens: int = 0


@dataclass
class StoreScheduler:
    """Follows requests from the allocation of their blocks to their end.

    mtp: an MTP layer's KV of a block's last token depends on the token after it, so the last block of a hit
    is not taken. keeps_all: the store is where running requests' KV lives, decode's included.

    Bad data of a request never raises: such a request is looked up as a miss, and not stored.
    """

    store: Store
    keys: KeySpace
    block_size: int
    mtp: bool
    keeps_all: bool
    stats: HitStats = field(default_factory=HitStats)
    _tracked: dict[str, Tracked] = field(default_factory=dict)
    _found: dict[str, int] = field(default_factory=dict)
    _generation: str = ""
    _runs: Iterator[str] = field(default_factory=lambda: _run_names(secrets.token_hex(8)))
    _log: QuietLog = field(default_factory=lambda: QuietLog(__name__, subject="store"))

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens beyond the computed ones that the store has; at least one token is left to compute."""
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
        """A request begins, for the first time or after a preemption, with so many tokens to be loaded."""
        stored = self._found.pop(request.request_id, 0)
        self._tracked[request.request_id] = Tracked(
            request, next(self._runs), self._generation, external, stored
        )
        self.stats.queried_tokens += request.num_tokens
        self.stats.hit_tokens += external

    def reset(self) -> None:
        """Nothing that was stored before is found by requests that begin from now on.

        Those that run go on with what they have, and what they store is found by none that begins later. The
        name of the new generation is random: an engine that shares the store may have other weights by now.
        """
        self._generation = secrets.token_hex(8)
        self._found.clear()

    def metadata(self, output: SchedulerOutput) -> StoreMetadata:
        """What a step computes."""
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
        self, tracked: Tracked, req_id: str, blocks: list[int], computed: int, tokens: int, drafts: int
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

    def _step(self, tracked: Tracked, blocks: list[int], computed: int, end: int, drafts: int) -> StoreStep:
        request, begins = tracked.request, tracked.begins
        if begins:
            tracked.hashes = 0
        confirmed = end - drafts
        limit = request.max_tokens  # vLLM fills it in; none means that the request may go on
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
        """The request is over, with or without a result."""
        self._tracked.pop(req_id, None)
        self._found.pop(req_id, None)


def _run_names(engine: str) -> Iterator[str]:
    return (f"{engine}-{number}" for number in count())
