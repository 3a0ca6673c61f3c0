"""The scheduler's halves: which requests are handed over, and which blocks a step adds to that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.connectors.scheduled import scheduled_requests
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    PrefillStep,
    Target,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import TPMismatchError, chunk_range, tp_ratio
from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import Rendezvous, RendezvousError, check_url
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.settings.remote_d2h import MAX_PORT, RemoteD2HConfig, external_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class DecodeScheduler:
    """Decode: asks for the whole prompt but for what is cached, and tells the proxy.

    Args:
        address: what prefill is told about this engine: fields of the rendezvous.
    """

    def __init__(self, config: RemoteD2HConfig, block_size: int, address: dict[str, Any]) -> None:
        self._config, self._block_size, self._address = config, block_size, address
        self._rendezvous = Rendezvous(config.limits.request_s)
        self._receives: list[Receive] = []
        self._refused: list[tuple[str, str]] = []

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that will come by transfer, and whether there are any."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        count = max(request.num_prompt_tokens - num_computed_tokens, 0)
        return count, count > 0

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks are there: from here on prefill may be found, and may publish."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or not num_external_tokens:
            return
        # Never twice: a request that is preempted, or whose load failed, is computed here.
        params["do_remote_prefill"] = False
        prompt = request.prompt_token_ids
        assert prompt is not None
        num_blocks = -(-len(prompt) // self._block_size)
        cached = len(prompt) - num_external_tokens
        receive = Receive(
            req_id=request.request_id,
            request=external_id(request.request_id),
            prompt=prompt_digest(prompt),
            blocks=tuple(blocks.get_block_ids()[0][:num_blocks]),
            first=cached // self._block_size,
        )
        self._receives.append(receive)
        if params.get("do_virtual") or params.get("metaserver") is None:
            return
        try:
            url = check_url(params["metaserver"], self._config.metaserver_hosts)
        except RendezvousError as error:
            self._refused.append((request.request_id, str(error)))
            return
        body = {
            "request_id": receive.request,
            "do_remote_prefill": False,
            "do_remote_decode": True,
            **self._address,
            "remote_cached_tokens": cached,
        }
        self._rendezvous.post(request.request_id, url, body)

    def metadata(self) -> DecodeMetadata:
        """What is new since the last step."""
        answered = self._refused + self._rendezvous.take_answers()
        made = DecodeMetadata(self._receives, answered)
        self._receives, self._refused = [], []
        return made

    def finished(self, req_id: str) -> None:
        """The request is over here; whether it is still received is the worker's affair."""
        self._rendezvous.cancel(req_id)

    def close(self) -> None:
        """Ends all posts."""
        self._rendezvous.close()


@dataclass
class Tracked:
    """A request that decode waits for. published: blocks up to here were given to the worker."""

    target: Target
    prompt: bytes
    num_prompt_tokens: int
    cached_tokens: int
    blocks: list[int]
    published: int = 0
    opened: bool = False
    complete: bool = False


class PrefillScheduler:
    """Prefill: follows the requests that decode waits for, step by step."""

    def __init__(self, block_size: int, tp_size: int) -> None:
        self._block_size, self._tp_size = block_size, tp_size
        self._tracked: dict[str, Tracked] = {}
        self._dropped: list[tuple[str, bool]] = []
        self._held: list[str] = []

    def allocated(self, request: Request) -> None:
        """A request begins, for the first time or after a preemption."""
        params = own_params(request)
        if not params or not params.get("do_remote_decode"):
            return
        target = self._target(params)
        cached = params.get("remote_cached_tokens")
        prompt = request.prompt_token_ids
        if isinstance(target, str) or not isinstance(cached, int) or cached < 0 or prompt is None:
            reason = target if isinstance(target, str) else f"remote_cached_tokens={cached!r}"
            logger.error("request %s can't be handed over: %s", request.request_id, reason)
            return
        self._forget_blocks(request.request_id)  # preempted, and scheduled again in the same step
        self._tracked[request.request_id] = Tracked(target, prompt_digest(prompt), len(prompt), cached, [])

    def _target(self, params: dict[str, Any]) -> Target | str:
        host, port, tp_size = (params.get(f"remote_{key}") for key in ("host", "port", "tp_size"))
        if not isinstance(host, str) or not host or not isinstance(port, int) or not isinstance(tp_size, int):
            return f"remote_host={host!r}, remote_port={port!r}, remote_tp_size={tp_size!r}"
        for key in ("remote_pcp_size", "remote_dcp_size"):
            if params.get(key, 1) != 1:
                return f"{key}={params[key]!r}: context parallelism is not supported"
        try:
            tp_ratio(self._tp_size, tp_size)
        except TPMismatchError as error:
            return str(error)
        if not 1 <= port <= MAX_PORT - tp_size + 1:
            return f"remote_port={port} with TP {tp_size}"
        return Target(host, port, tp_size)

    def metadata(self, output: SchedulerOutput) -> PrefillMetadata:
        """What a step adds."""
        for req_id in output.preempted_req_ids or ():
            self._forget_blocks(req_id)
        steps = []
        for req_id, block_ids, computed in scheduled_requests(output):
            tracked = self._tracked.get(req_id)
            if tracked is None or tracked.complete:
                continue
            tracked.blocks += block_ids
            scheduled = output.num_scheduled_tokens[req_id]
            drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
            steps.append(self._step(req_id, tracked, computed + scheduled - drafts))
        made = PrefillMetadata(steps, self._dropped, self._held)
        self._dropped, self._held = [], []
        return made

    def lost(self, block_ids: Collection[int]) -> None:
        """Blocks lost their KV: their requests' transfers end, also where the request only wasn't stored, and
        begin anew if it goes on."""
        for req_id, tracked in self._tracked.items():
            if tracked.opened and not set(block_ids).isdisjoint(tracked.blocks):
                tracked.opened = tracked.complete = False
                tracked.published = 0
                self._dropped.append((req_id, True))

    def _forget_blocks(self, req_id: str) -> None:
        """The request was preempted, unless it has only just been given its blocks."""
        tracked = self._tracked.get(req_id)
        if tracked is not None and tracked.opened:
            del self._tracked[req_id]
            self._dropped.append((req_id, True))

    def _step(self, req_id: str, tracked: Tracked, computed: int) -> PrefillStep:
        final = computed >= tracked.num_prompt_tokens
        computed = min(computed, tracked.num_prompt_tokens)
        begin, end = chunk_range(tracked.cached_tokens, tracked.published, computed, self._block_size, final)
        opens, tracked.opened = not tracked.opened, True
        tracked.published, tracked.complete = end, final
        return PrefillStep(
            req_id,
            external_id(req_id),
            tracked.target,
            tracked.prompt,
            -(-tracked.num_prompt_tokens // self._block_size),
            opens,
            begin,
            tuple(tracked.blocks[begin:end]),
            final,
        )

    def finished(self, req_id: str) -> bool:
        """Whether the request's blocks must stay until the worker names it."""
        tracked = self._tracked.pop(req_id, None)
        if tracked is None:
            return False
        if tracked.complete:
            self._held.append(req_id)
        else:
            self._dropped.append((req_id, False))
        return tracked.complete


def own_params(request: Request) -> dict[str, Any] | None:
    """The request's own part of the rendezvous: one call may carry several prompts."""
    params = request.kv_transfer_params
    batch = params.get("batch_kv_transfer_params") if params else None
    if not isinstance(batch, dict):
        return params
    own = batch.get(external_id(request.request_id))
    if not isinstance(own, dict):
        logger.error("request %s is not among those of its rendezvous", request.request_id)
        return None
    return own
