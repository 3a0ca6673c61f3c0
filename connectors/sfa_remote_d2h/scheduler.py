"""The scheduler halves: select the requests to hand over, and the blocks that each step adds."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.connectors.guard import RequestGuard
from vllm_kvoffload.connectors.scheduled import scheduled_requests
from vllm_kvoffload.connectors.sfa_remote_d2h.halves import ConnectorScheduler
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import (
    Decline,
    DecodeMetadata,
    PrefillMetadata,
    PrefillStep,
    ReceiveReport,
    Target,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.params import (
    HandOverParams,
    ReceiveParams,
    Refusal,
    request_name,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure, Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import chunk_range
from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import Rendezvous
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.metrics.fields import ReceiveFailure
from vllm_kvoffload.settings.hosts import HostList
from vllm_kvoffload.settings.remote_d2h import RemoteD2HConfig, external_id

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

MAX_RECEIVING = 1 << 16
"""Maximum number of receives followed; more than an engine has blocks for."""


MAX_ERROR = 1000
"""Maximum length of a failure's reason in a notice."""


@dataclass
class Asked:
    """A request to be received. allocated: its blocks are allocated, so it is never posted again."""

    params: ReceiveParams
    allocated: bool = False


class DecodeScheduler(ConnectorScheduler):
    """Decode: requests the KV of the whole prompt except the cached prefix, and notifies the proxy.

    A request with invalid parameters is *refused*: it ends like one whose KV did not arrive, so that its
    blocks are never attended to and vLLM's `kv_load_failure_policy` applies.

    Args:
        address: fields of the rendezvous that describe this engine.
    """

    def __init__(self, config: RemoteD2HConfig, block_size: int, address: dict[str, Any]) -> None:
        self.secret = secrets.token_hex(16)
        self._config, self._block_size = config, block_size
        self._address = {**address, "remote_secret": self.secret}
        self._rendezvous = Rendezvous(config.limits.request_s)
        self._guard, self._log = RequestGuard(), RateLimitedLog(__name__)
        self._asked: dict[str, Asked | None] = {}  # by request id, until the engine has finished with it
        self._receives: list[Receive] = []
        self._refused: list[tuple[str, str]] = []
        # Not yet reported by the workers: (external id, URL for failure notices). A failed request may end
        # in the engine before its report arrives.
        self._receiving: OrderedDict[str, tuple[str, str]] = OrderedDict()

    def use_layout(self, digest: str) -> None:
        """Sets the workers' layout digest, a field of every later rendezvous."""
        self._address["remote_layout"] = digest

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens will be transferred, and whether there are any."""
        asked = self._asked_of(request)
        if asked is None or asked.allocated:
            return 0, False
        count = max(request.num_prompt_tokens - num_computed_tokens, 0)
        return count, count > 0

    def _asked_of(self, request: Request) -> Asked | None:
        req_id = request.request_id
        if req_id not in self._asked:
            params = self._guard.run(
                req_id,
                "reading kv_transfer_params",
                lambda: ReceiveParams.of(request.kv_transfer_params, self._config.metaserver_hosts),
                lambda reason: ReceiveParams(refusal=reason),
            )
            self._asked[req_id] = None if params is None else Asked(params)
        return self._asked[req_id]

    def allocated(
        self, request: Request, blocks: KVCacheBlocks | None = None, num_external_tokens: int = 0
    ) -> None:
        """Blocks are allocated: prefill may now be asked, and may publish."""
        asked = self._asked_of(request)
        if asked is None or asked.allocated or blocks is None or num_external_tokens <= 0:
            return
        # At most once: a request that is preempted, or whose load failed, is recomputed here.
        asked.allocated = True
        req_id = request.request_id
        cached = max(request.num_prompt_tokens - num_external_tokens, 0)
        reason = self._guard.run(
            req_id,
            "update_state_after_alloc",
            lambda: self._begin(request, asked.params, blocks, cached),
            lambda reason: self._begin_refused(request, blocks, cached, reason),
        )
        self._receiving[req_id] = (external_id(req_id), asked.params.failures)
        if len(self._receiving) > MAX_RECEIVING:
            self._receiving.popitem(last=False)
        if reason:
            self._log.error(reason, f"request {shown(req_id)} can't be received: {reason}")
            self._refused.append((req_id, reason))
            self.failed({req_id: Failure(reason, ReceiveFailure.RENDEZVOUS.value)})

    def _begin(self, request: Request, params: ReceiveParams, blocks: KVCacheBlocks, cached: int) -> str:
        """Posts the rendezvous. Returns why the request is refused, or ""."""
        try:
            name, prompt = request_name(request.request_id), request.prompt_token_ids
        except Refusal as refusal:
            return self._begin_refused(request, blocks, cached, str(refusal))
        reason = params.refusal
        if prompt is None or getattr(request, "prompt_embeds", None) is not None:
            reason = (
                reason or "its prompt is not made of token ids alone, by which prefill's KV is recognised"
            )
        if reason or prompt is None:
            return self._begin_refused(request, blocks, cached, reason)
        receive = self._receive(request, blocks, cached, prompt_digest(prompt))
        self._keep_from_others(request)
        if params.metaserver:
            body = {
                "request_id": name,
                "do_remote_prefill": False,
                "do_remote_decode": True,
                **self._address,
                "remote_cached_tokens": cached,
            }
            self._rendezvous.post(request.request_id, params.metaserver, body)
        self._receives.append(receive)
        return ""

    def _begin_refused(self, request: Request, blocks: KVCacheBlocks, cached: int, reason: str) -> str:
        """Makes the workers report the request as failed at once with all its blocks; vLLM waits for that."""
        self._rendezvous.cancel(request.request_id)
        self._receives.append(self._receive(request, blocks, cached, bytes(16)))
        return reason

    def _receive(self, request: Request, blocks: KVCacheBlocks, cached: int, prompt: bytes) -> Receive:
        num_blocks = -(-request.num_prompt_tokens // self._block_size)
        return Receive(
            req_id=request.request_id,
            request=external_id(request.request_id),
            prompt=prompt,
            blocks=tuple(blocks.get_block_ids()[0][:num_blocks]),
            first=cached // self._block_size,
        )

    @staticmethod
    def _keep_from_others(request: Request) -> None:
        """Marks the parameters as handled for other readers. Several requests may share one dict."""
        params = request.kv_transfer_params
        if isinstance(params, dict):
            request.kv_transfer_params = {**params, "do_remote_prefill": False}

    def metadata(self, output: SchedulerOutput | None = None) -> DecodeMetadata:  # noqa: ARG002
        """Returns the changes since the last step."""
        answered = self._refused + self._rendezvous.take_answers()
        made = DecodeMetadata(self._receives, answered, self.secret)
        self._receives, self._refused = [], []
        return made

    def reported(self, output: KVConnectorOutput) -> None:
        """Takes the workers' report: failed receives first, then all that have ended."""
        report = output.kv_connector_worker_meta
        if isinstance(report, ReceiveReport):
            self.failed(report.failures)
        self.received(output.finished_recving or ())

    def failed(self, failures: Mapping[str, Failure]) -> None:
        """Sends the proxy one notice per failed receive, if it gave a URL for notices."""
        for req_id, failure in failures.items():
            if req_id not in self._receiving:
                continue
            name, url = self._receiving[req_id]
            self._receiving[req_id] = (name, "")
            if not url or failure.failure == ReceiveFailure.ABORTED:
                continue
            body = {"request_id": name, "error": failure.reason[:MAX_ERROR], "failure": failure.failure}
            if failure.prefill_layout:
                body["prefill_layout"] = failure.prefill_layout
            post = partial(self._rendezvous.notify, url, body)
            notified = self._guard.run(req_id, "failure notice", post, lambda _: False)
            if not notified:
                logger.debug("the proxy is not told that %s failed", shown(req_id))

    def received(self, received: Iterable[str]) -> None:
        """The workers have finished with these requests, successfully or not."""
        for req_id in received:
            self._receiving.pop(req_id, None)

    def finished(self, req_id: str) -> bool:
        """The request has ended in the scheduler; the worker may still be receiving it."""
        self._asked.pop(req_id, None)
        self._rendezvous.cancel(req_id)
        return False

    def reset(self) -> bool:
        """Whether no KV computed earlier by prefill is in transit; transfers cannot be recalled."""
        if self._receiving:
            logger.warning("Reset: KV of %d requests is being received", len(self._receiving))
        return not self._receiving

    def close(self) -> None:
        """Cancels all posts."""
        self._rendezvous.close()


@dataclass
class HandOver:
    """A request that decode waits for. published: number of blocks already passed to the worker."""

    request: Request
    target: Target
    prompt: bytes
    num_prompt_tokens: int
    cached_tokens: int
    blocks: list[int]
    published: int = 0
    opened: bool = False
    complete: bool = False


class PrefillScheduler(ConnectorScheduler):
    """Prefill: follows the requests that decode waits for, step by step.

    A request with invalid parameters is computed normally but not handed over.

    Args:
        hosts: decode engines that may receive requests.
    """

    def __init__(self, block_size: int, tp_size: int, hosts: HostList) -> None:
        self._block_size, self._tp_size, self._hosts = block_size, tp_size, hosts
        self._guard, self._log = RequestGuard(), RateLimitedLog(__name__)
        self._tracked: dict[str, HandOver] = {}
        self._dropped: list[tuple[str, bool]] = []
        self._held: list[str] = []
        self._kept: set[str] = set()
        self._declined: list[Decline] = []
        self._refused: set[str] = set()  # while alive, so that a preemption does not log it again

    def allocated(
        self,
        request: Request,
        blocks: KVCacheBlocks | None = None,  # noqa: ARG002  # known from the step's output
        num_external_tokens: int = 0,  # noqa: ARG002
    ) -> None:
        """A request starts, new or after a preemption."""
        req_id = request.request_id
        self._guard.run(req_id, "update_state_after_alloc", lambda: self._track(request), lambda _: None)

    def _track(self, request: Request) -> None:
        req_id = request.request_id
        if req_id in self._refused:
            return
        self._forget_blocks(req_id)  # preempted and rescheduled in the same step
        digest = bytes(16)
        try:
            params = HandOverParams.of(request.kv_transfer_params, req_id, self._tp_size, self._hosts)
            if params is None:
                return
            prompt = request.prompt_token_ids
            if prompt is None or getattr(request, "prompt_embeds", None) is not None:
                reason = "its prompt is not made of token ids alone, by which decode recognises its KV"
                raise Refusal(reason, params.target)
            digest = prompt_digest(prompt)
            if params.cached_tokens > len(prompt):
                reason = f"remote_cached_tokens={params.cached_tokens} of a prompt of {len(prompt)} tokens"
                raise Refusal(reason, params.target)
        except Refusal as refusal:
            self._refuse(req_id, digest, str(refusal), refusal.target)
            return
        self._tracked[req_id] = HandOver(
            request, params.target, digest, len(prompt), params.cached_tokens, []
        )

    def _refuse(self, req_id: str, prompt: bytes, reason: str, target: Target | None) -> None:
        """Does not hand the request over, and tells decode if its address is known."""
        self._refused.add(req_id)
        self._tracked.pop(req_id, None)
        self._log.error(reason, f"request {shown(req_id)} can't be handed over: {reason}")
        if target is not None:
            self._declined.append(Decline(request_name(req_id), target, prompt, reason))

    def metadata(self, output: SchedulerOutput | None = None) -> PrefillMetadata:
        """Returns the changes of a step."""
        assert output is not None
        for req_id in output.preempted_req_ids or ():
            self._forget_blocks(req_id)
        steps = []
        for req_id, block_ids, computed in scheduled_requests(output):
            tracked = self._tracked.get(req_id)
            if tracked is None or tracked.complete:
                continue
            step = self._guard.run(
                req_id,
                "build_connector_meta",
                partial(self._scheduled, output, req_id, tracked, block_ids, computed),
                partial(self._give_up, req_id),
            )
            if step is not None:
                steps.append(step)
        made = PrefillMetadata(steps, self._dropped, self._held, self._declined)
        self._dropped, self._held, self._declined = [], [], []
        return made

    def _scheduled(
        self, output: SchedulerOutput, req_id: str, tracked: HandOver, block_ids: list[int], computed: int
    ) -> PrefillStep | None:
        tracked.blocks += block_ids
        scheduled = output.num_scheduled_tokens[req_id]
        drafts = len(output.scheduled_spec_decode_tokens.get(req_id, ()))
        return self._step(req_id, tracked, computed + scheduled - drafts)

    def _give_up(self, req_id: str, reason: str) -> None:
        tracked = self._tracked[req_id]
        if tracked.opened:
            self._dropped.append((req_id, False))
        self._refuse(req_id, tracked.prompt, reason, None if tracked.opened else tracked.target)

    def reported(self, output: KVConnectorOutput) -> None:
        """Takes the workers' report: requests that decode has read, and blocks that lost their KV."""
        self.sent(output.finished_sending or ())
        if output.invalid_block_ids:
            self.blocks_invalid(output.invalid_block_ids)

    def blocks_invalid(self, block_ids: Collection[int]) -> None:
        """Ends the transfers of requests whose blocks lost their KV, even if they merely could not be
        stored; they start again if the request continues."""
        for req_id, tracked in self._tracked.items():
            if tracked.opened and not set(block_ids).isdisjoint(tracked.blocks):
                self._begin_anew(req_id, tracked)

    def _begin_anew(self, req_id: str, tracked: HandOver) -> None:
        tracked.opened = tracked.complete = False
        tracked.published = 0
        self._dropped.append((req_id, True))

    def _forget_blocks(self, req_id: str) -> None:
        """Handles a preemption, unless the request's blocks were only just allocated."""
        tracked = self._tracked.get(req_id)
        if tracked is not None and tracked.opened:
            del self._tracked[req_id]
            self._dropped.append((req_id, True))

    def _step(self, req_id: str, tracked: HandOver, computed: int) -> PrefillStep:
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
        """Returns whether the request's blocks must be kept until the worker reports it."""
        self._refused.discard(req_id)
        tracked = self._tracked.pop(req_id, None)
        if tracked is None:
            return False
        if tracked.complete:
            self._held.append(req_id)
            self._kept.add(req_id)
        else:
            self._dropped.append((req_id, False))
        return tracked.complete

    def sent(self, sent: Iterable[str]) -> None:
        """The workers no longer need the blocks of these requests."""
        self._kept.difference_update(sent)

    def reset(self) -> bool:
        """Ends the transfers of requests that lost their blocks to the reset; they restart with the
        request.

        Returns False while decode may read KV computed earlier, of running requests or of blocks kept for
        it; the local reset fails then as well. Both succeed once all of it was read or its lease has
        ended.
        """
        opened = {req_id: tracked for req_id, tracked in self._tracked.items() if tracked.opened}
        computed = [req_id for req_id, tracked in opened.items() if tracked.request.num_computed_tokens > 0]
        if computed or self._kept:
            count = len(computed) + len(self._kept)
            logger.warning("Reset: decode may still read KV of %d requests", count)
            return False
        for req_id, tracked in opened.items():
            self._begin_anew(req_id, tracked)
        return True
