"""Decode's side of the protocol for one rank: assigns reads to blocks and decides how requests end. Pure.

A request is *known* from the step that allocates its blocks. It *waits* until every prefill rank of its
contributor group has published a transfer for it, and *reads* what these publish, one read of a transfer at a
time. When all is read it asks each of them to *finish*: only the answer proves that prefill still held the
blocks when the last byte was read, so only then is the request complete. What is read under a transfer that
ends otherwise counts for nothing.

No block of a request is given back, and no other transfer may be read into it, before every read into it is
over: `take_outcomes` names a request only then. As in `producer`, nothing here waits, sends or knows a clock.

A prefill session becomes a *peer* in three steps: `receive` accepts its `Hello` if the secret and the
facts match, the caller makes its memory readable, and `admit` registers it. Only then is it answered.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from vllm_kvoffload.connectors.sfa_remote_d2h.counts import ReceiveCounts
from vllm_kvoffload.connectors.sfa_remote_d2h.introductions import MAX_PEERS, Admission, Declines, same_rank
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import (
    Outcome,
    Peer,
    Pending,
    Pull,
    ReadOrder,
    Receive,
    ReceivePhase,
    describe,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Beat,
    BeatAck,
    Cancel,
    Closed,
    Declined,
    Finish,
    Finished,
    Hello,
    HelloAck,
    NeedHello,
    Progress,
    Publish,
    Refused,
    ToDecode,
    ToPrefill,
    parts,
    wire_name,
)
from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.metrics.fields import ReceiveFailure
from vllm_kvoffload.settings.remote_d2h import RemoteD2HLimits

GONE_KEPT = 4096
"""Transfers remembered after they were given up, so that a late `Publish` doesn't bring them back."""

EARLY_KEPT = 1024
"""Transfers of a session kept for unknown requests; the oldest are dropped beyond this number."""

EARLY_BLOCKS = 1 << 20
"""The same limit counted in blocks over all such transfers."""

PEER_IDLE_LEASES = 20
"""Leases of silence after which a prefill session is forgotten; it can introduce itself again."""


class Consumer:
    """Requests that one decode rank receives.

    Args:
        session: of this rank. facts: of model and layout. num_layers: layers of a chunk.
        tp_size, tp_rank: of decode.
        limits: deadlines and budgets.
    """

    def __init__(
        self,
        session: str,
        facts: Mapping[str, str],
        num_layers: int,
        tp_size: int,
        tp_rank: int,
        limits: RemoteD2HLimits,
    ) -> None:
        self.session = session
        self.outbox: list[tuple[str, ToPrefill]] = []
        self.orders: list[ReadOrder] = []
        self.to_cancel: list[int] = []
        self.to_meet: list[Hello] = []
        self.failed_peers: list[str] = []
        self.counts = ReceiveCounts()
        self._num_layers = num_layers
        self._admission = Admission(facts, tp_size, tp_rank)
        self._declines = Declines(limits.early_s)
        self._tp_size, self._tp_rank = tp_size, tp_rank
        self._limits = limits
        self._peers: dict[str, Peer] = {}
        self._requests: dict[str, Pending] = {}  # by request id of this engine
        self._named: dict[str, str] = {}  # external id -> request id
        self._early: dict[tuple[str, int], Pull] = {}  # transfers not yet claimed by a request
        self._held: dict[tuple[str, int], str] = {}  # transfers claimed by requests
        self._gone: OrderedDict[tuple[str, int], str] = OrderedDict()  # abandoned transfers, with the reason
        self._reads: dict[int, tuple[str, Pull]] = {}
        self._outcomes: list[Outcome] = []
        self._next_read = 1
        self._beat_at = float("-inf")

    @property
    def live(self) -> dict[str, ReceivePhase]:
        """Requests that have not ended, with their phases."""
        return {req_id: pending.phase for req_id, pending in self._requests.items()}

    @property
    def peers(self) -> dict[str, Peer]:
        """Known prefill sessions."""
        return self._peers

    # ---------------------------------------------------------------------------------- calls from the engine

    def use_secret(self, secret: str) -> None:
        """Sets the secret that prefill must present. Until then `Hello` is not answered, and prefill
        repeats it."""
        self._admission.secret = secret or self._admission.secret

    @property
    def ready(self) -> bool:
        """Whether the secret is set."""
        return bool(self._admission.secret)

    def proved(self, secret: str) -> bool:
        """Whether the given secret is the current one."""
        return self._admission.has_secret(secret)

    def expect(self, now: float, order: Receive) -> None:
        """Registers a request whose blocks are allocated. Its external id may have been used before."""
        name = wire_name(order.request)
        older = self._named.get(name)
        if older is not None:
            self.cancel(older, "replaced by another request of the same id")
        limits = self._limits
        pending = Pending(order, now, now + limits.offer_s, now + limits.request_s)
        self.counts.started += 1
        self._requests[order.req_id] = pending
        self._named[name] = order.req_id
        declined = self._declines.take(now, name, order.prompt)
        if declined is not None:
            self._decline(pending, declined)
        else:
            self._advance(now, pending)

    def prefill_returned(self, now: float, req_id: str, error: str = "") -> None:
        """Records the proxy's answer to the rendezvous: prefill finished, or failed with `error`."""
        pending = self._requests.get(req_id)
        if pending is None or pending.phase is not ReceivePhase.WAITING:
            return
        if error:
            self._fail(pending, ReceiveFailure.RENDEZVOUS, error)
        else:
            pending.deadline = min(pending.deadline, now + self._limits.retry_s)

    def cancel(self, req_id: str, reason: str = "aborted") -> None:
        """Ends a request that the engine gave up. It is reported once no read can write its blocks."""
        pending = self._requests.get(req_id)
        if pending is not None:
            self._fail(pending, ReceiveFailure.ABORTED, reason)

    def abandon(self, order: Receive, reason: str) -> None:
        """Registers a request that cannot be received; it ends now, or when reads into its blocks have
        ended."""
        pending = self._requests.get(order.req_id)
        if pending is None:
            failure = ReceiveFailure.MISMATCH
            self.counts.failed[failure] += 1
            self._outcomes.append(Outcome(order.req_id, reason, order.wanted, failure))
        else:
            self._fail(pending, ReceiveFailure.MISMATCH, reason)

    @property
    def has_outcomes(self) -> bool:
        """Whether `take_outcomes` would return something."""
        return bool(self._outcomes)

    def take_outcomes(self) -> list[Outcome]:
        """Returns the requests that ended since the last call, each once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def metrics(self) -> dict[str, int]:
        """Counters by key of `metrics.DECODE`, except bytes."""
        phases = Counter(self.live.values())
        gauges = {f"receives.{phase.value}": phases[phase] for phase in ReceivePhase}
        return {**gauges, "peer_ranks": len(self._peers), **self.counts.values()}

    # ---------------------------------------------------------------------------------- messages from prefill

    def receive(self, now: float, message: ToDecode) -> str:
        """Handles a message of a prefill rank. Returns the reason if it was rejected, or ""."""
        if isinstance(message, Hello):
            return self._hello(now, message)
        if isinstance(message, Declined):
            return self._declined(now, message)
        if message.session not in self._peers:
            if self.ready:
                self._send(message.session, NeedHello(self.session, message.session))
            return ""
        self._peers[message.session].heard_at = now
        if isinstance(message, Publish):
            self._published(now, message)
        elif isinstance(message, BeatAck):
            for transfer in message.transfers:
                pull = self._find(message.session, transfer)
                if pull is not None:
                    pull.heard_at = now
        elif isinstance(message, Closed):
            self._closed(now, message)
        elif isinstance(message, Finished):
            self._finished(now, message)
        return ""

    def _hello(self, now: float, hello: Hello) -> str:
        if not self._admission.has_secret(hello.secret):
            return (
                "its Hello has another secret: it doesn't belong to this deployment, or got the address from "
                "an earlier start of decode"
            )
        known = self._peers.get(hello.session)
        if known is not None and not same_rank(known.hello, hello):
            reason = "this session introduced itself with other memory before"
        else:
            reason = self._admission.refusal(hello)
        if reason:
            return self.refuse(hello, reason)
        if known is None:
            self.to_meet.append(hello)
        else:
            known.heard_at = now
            self._send(hello.session, HelloAck(self.session, hello.session))
        return ""

    def refuse(self, hello: Hello, reason: str) -> str:
        """Refuses an authenticated session as a peer. Returns the reason."""
        self._send(hello.session, Refused(self.session, hello.session, printable(reason)))
        return reason

    def admit(self, now: float, hello: Hello) -> str:
        """Registers a session as a peer, now that its memory can be read. Returns why not, or ""."""
        if hello.session not in self._peers:
            for session, peer in list(self._peers.items()):
                if (peer.hello.engine_id, peer.hello.tp_rank) == (hello.engine_id, hello.tp_rank):
                    self._forget(now, session)
            if len(self._peers) >= MAX_PEERS and not self._forget_one(now):
                return self.refuse(hello, f"decode has {MAX_PEERS} prefill ranks already")
            ratio = hello.tp_size // self._tp_size
            self._peers[hello.session] = Peer(hello, hello.tp_rank % ratio, ratio, now)
        self._send(hello.session, HelloAck(self.session, hello.session))
        return ""

    def _declined(self, now: float, message: Declined) -> str:
        if not self._admission.has_secret(message.secret):
            return "its Declined has another secret"
        pending = self._requests.get(self._named.get(message.request, ""))
        if pending is None:
            self._declines.keep(now, message)
        elif pending.order.prompt == message.prompt:
            self._decline(pending, message)
        return ""

    def _decline(self, pending: Pending, message: Declined) -> None:
        """Records that a prefill rank will not transfer; has no effect if other ranks already serve the
        request."""
        if pending.phase is ReceivePhase.WAITING:
            pending.prefill_layout = message.digest
            self._fail(pending, ReceiveFailure.MISMATCH, message.reason or "prefill can't serve this engine")

    def _forget(self, now: float, session: str) -> None:
        """Drops a prefill session that is gone for good, and its transfers."""
        for pull in [p for p in self._early.values() if p.session == session]:
            self._give_up(pull, "prefill restarted")
        for pending in list(self._requests.values()):
            if any(pull.session == session for pull in pending.pulls.values()):
                self._lose(now, pending, ReceiveFailure.PREFILL, "prefill restarted", self._limits.retry_s)
        del self._peers[session]
        self.failed_peers.append(session)

    def _published(self, now: float, message: Publish) -> None:
        key = (message.session, message.transfer)
        if key in self._gone:
            cancel = Cancel(self.session, message.session, message.transfer, printable(self._gone[key]))
            self._send(message.session, cancel)
            return
        pull = self._find(*key)
        if pull is None:
            pull = self._early[key] = Pull(message.session, message, now, now)
            self._bound_early(message.session)
        pull.heard_at = now
        reason = pull.take(message, self._peers[message.session].hello.num_blocks, self._num_layers)
        holder = self._holder(pull) or self._waiting_for(message)
        if reason and holder is not None:
            self._lose(
                now, holder, ReceiveFailure.MISMATCH, f"prefill published what can't be: {reason}", 0.0
            )
        if reason and key not in self._gone:
            self._give_up(pull, reason)
        if not reason:
            req_id = self._named.get(message.request)
            if req_id is not None:
                self._advance(now, self._requests[req_id])

    def _waiting_for(self, message: Publish) -> Pending | None:
        pending = self._requests.get(self._named.get(message.request, ""))
        waits = pending is not None and pending.phase is ReceivePhase.WAITING
        return pending if waits and pending is not None and pending.order.prompt == message.prompt else None

    def _bound_early(self, session: str) -> None:
        early = [pull for pull in self._early.values() if pull.session == session]
        blocks = sum(pull.publish.num_blocks for pull in early)
        while len(early) > 1 and (len(early) > EARLY_KEPT or blocks > EARLY_BLOCKS):
            oldest = early.pop(0)
            blocks -= oldest.publish.num_blocks
            self._give_up(oldest, "too many transfers of unknown requests")

    def _closed(self, now: float, message: Closed) -> None:
        pull = self._find(message.session, message.transfer)
        if pull is None or pull.finished:
            return
        pending = self._holder(pull)
        if pending is None:
            self._give_up(pull, message.reason)
        else:
            # A request that prefill preempted comes again, after others: only the request's deadline counts.
            wait_s = self._limits.offer_s if message.retry else 0.0
            self._lose(now, pending, ReceiveFailure.PREFILL, f"prefill gave up: {message.reason}", wait_s)

    def _finished(self, now: float, message: Finished) -> None:
        pull = self._find(message.session, message.transfer)
        if pull is not None and pull.finish_at is not None:
            pull.finished, pull.heard_at = True, now
            pending = self._holder(pull)
            if pending is not None:
                self._advance(now, pending)

    # --------------------------------------------------------------------------------------- reads and states

    def read_done(self, now: float, number: int, error: str = "") -> None:
        """Records that a read ended and no longer writes memory. Must be called exactly once per order."""
        req_id, pull = self._reads.pop(number)
        pull.reading = None
        pending = self._requests[req_id]
        if pending.phase is ReceivePhase.READING and pull in pending.pulls.values():
            if error:
                pull.errors += 1
                if pull.errors > self._limits.read_retries:
                    self._lose(now, pending, ReceiveFailure.READ, f"reading failed: {error}", 0.0)
            else:
                pull.read_chunks, pull.read_layers = pull.reading_to
        self._advance(now, pending)

    def _adopt(self, pending: Pending) -> None:
        """Assigns matching transfers to a waiting request, unless reads of older ones are still running."""
        if pending.phase is not ReceivePhase.WAITING or self._busy(pending):
            return
        for pull in list(self._early.values()):
            peer = self._peers[pull.session]
            if pull.publish.request != wire_name(pending.order.request):
                continue
            others = [self._peers[other.session].hello.engine_id for other in pending.pulls.values()]
            if any(engine != peer.hello.engine_id for engine in others) or peer.member in pending.pulls:
                continue  # belongs to another attempt: used when this one fails
            reason = pull.unfit(pending.order)
            if reason:
                self._give_up(pull, reason)
                continue
            self._held[pull.key] = pending.order.req_id
            del self._early[pull.key]
            pending.pulls[peer.member] = pull
        ratios = {self._peers[pull.session].ratio for pull in pending.pulls.values()}
        if ratios == {len(pending.pulls)}:
            pending.phase, pending.reason = ReceivePhase.READING, ""
            pending.attempts += 1

    def _busy(self, pending: Pending) -> bool:
        return any(req_id == pending.order.req_id for req_id, _ in self._reads.values())

    def _advance(self, now: float, pending: Pending) -> None:
        """Starts the next reads of a request, or ends it."""
        if pending.phase is ReceivePhase.ENDING:
            if not self._busy(pending):
                self._end(pending)
            return
        if pending.phase is ReceivePhase.WAITING:
            self._adopt(pending)
        if pending.phase is not ReceivePhase.READING:
            return
        for pull in pending.pulls.values():
            if pull.reading is None and not pull.finished:
                self._next_order(now, pending, pull)
                self._tell_progress(pull)
            if pending.phase is not ReceivePhase.READING:
                return
        if all(pull.finished for pull in pending.pulls.values()):
            pending.phase = ReceivePhase.ENDING
            self.counts.received(now - pending.since)
            self._end(pending)

    def _next_order(self, now: float, pending: Pending, pull: Pull) -> None:
        """Orders the next unread layers of one chunk, or sends `Finish`."""
        while pull.read_chunks < len(pull.chunks):
            chunk = pull.chunks[pull.read_chunks]
            if pull.read_layers >= min(chunk.layers, self._num_layers):
                break
            pairs = pull.pairs(pending.order, chunk)
            layers = range(pull.read_layers, min(chunk.layers, self._num_layers))
            if self._order(pending, pull, layers, pairs):
                return
        if pull.complete and pull.read_chunks == len(pull.chunks) and pull.finish_at is None:
            if not pull.covers(pending.order):
                self._lose(now, pending, ReceiveFailure.MISMATCH, "prefill published too few blocks", 0.0)
                return
            self._say_finish(now, pull)

    def _order(
        self, pending: Pending, pull: Pull, layers: range, pairs: Sequence[tuple[int, int, int]]
    ) -> bool:
        """Orders a read. Returns False if this rank reads nothing of these layers, which counts as read."""
        done = layers.stop == self._num_layers
        pull.reading_to = (pull.read_chunks + done, 0 if done else layers.stop)
        main, indexer = self._peers[pull.session].shares(pairs, self._tp_size, self._tp_rank)
        if not main and not indexer:
            pull.read_chunks, pull.read_layers = pull.reading_to
            return False
        number = self._next_read
        self._next_read += 1
        pull.reading = number
        self._reads[number] = (pending.order.req_id, pull)
        self.orders.append(ReadOrder(number, pull.session, pending.order.req_id, layers, main, indexer))
        return True

    # -------------------------------------------------------------------------------------------- failures

    def _lose(
        self, now: float, pending: Pending, failure: ReceiveFailure, reason: str, wait_s: float
    ) -> None:
        """Ends the current attempt. The request waits `wait_s` for another one, if it has any left."""
        self._drop_pulls(pending, reason)
        if wait_s and pending.attempts <= self._limits.retries and pending.phase is not ReceivePhase.ENDING:
            pending.phase, pending.failure, pending.reason = ReceivePhase.WAITING, failure, reason
            pending.deadline = now + wait_s
            self.counts.retries += 1
        else:
            self._fail(pending, failure, reason)

    def _fail(self, pending: Pending, failure: ReceiveFailure, reason: str) -> None:
        if pending.phase is not ReceivePhase.ENDING:
            pending.phase, pending.failure, pending.reason = ReceivePhase.ENDING, failure, reason
        self._drop_pulls(pending, reason)
        if not self._busy(pending):
            self._end(pending)

    def _end(self, pending: Pending) -> None:
        order = pending.order
        if self._requests.get(order.req_id) is not pending:
            return
        if pending.reason:
            failed = order.wanted
            self.counts.failed[pending.failure] += 1
        else:
            failed = ()
            self._drop_pulls(pending, "finished")
        del self._requests[order.req_id]
        name = wire_name(order.request)
        if self._named.get(name) == order.req_id:
            del self._named[name]
        self._declines.over(name, order.prompt)
        failure = pending.failure if pending.reason else None
        layout = pending.prefill_layout if failure is ReceiveFailure.MISMATCH else ""
        self._outcomes.append(Outcome(order.req_id, pending.reason, failed, failure, layout))

    def _drop_pulls(self, pending: Pending, reason: str) -> None:
        for pull in pending.pulls.values():
            self._give_up(pull, reason)
        pending.pulls.clear()

    def _give_up(self, pull: Pull, reason: str) -> None:
        """Stops reading a transfer and tells prefill."""
        self._early.pop(pull.key, None)
        self._held.pop(pull.key, None)
        self._gone[pull.key] = reason
        while len(self._gone) > GONE_KEPT:
            self._gone.popitem(last=False)
        if pull.reading is not None:
            self.to_cancel.append(pull.reading)
        if not pull.finished:
            cancel = Cancel(self.session, pull.session, pull.publish.transfer, printable(reason))
            self._send(pull.session, cancel)

    # ------------------------------------------------------------------------------------------- the clock

    def tick(self, now: float) -> None:
        """Sends heartbeats, repeats `Finish`, and enforces deadlines."""
        limits = self._limits
        self._declines.forget_old(now)
        for pending in list(self._requests.values()):
            self._tick_request(now, pending)
        for pull in [p for p in self._early.values() if now - p.since >= limits.early_s]:
            self._give_up(pull, "no such request here")
        self._forget_silent(now)
        if now - self._beat_at >= limits.beat_s:
            self._beat_at = now
            self._beat()

    def _forget_silent(self, now: float) -> None:
        after_s = PEER_IDLE_LEASES * self._limits.lease_s
        if not any(now - peer.heard_at >= after_s for peer in self._peers.values()):
            return
        for session in self._unused():
            if now - self._peers[session].heard_at >= after_s:
                self._forget(now, session)

    def _forget_one(self, now: float) -> bool:
        """Evicts the peer that has been silent longest, to make room. Returns whether one was evicted."""
        unused = self._unused()
        if unused:
            self._forget(now, min(unused, key=lambda session: self._peers[session].heard_at))
        return bool(unused)

    def _unused(self) -> list[str]:
        used = {pull.session for _, pull in self._reads.values()}
        used |= {session for session, _ in [*self._early, *self._held]}
        return [session for session in self._peers if session not in used]

    def _tick_request(self, now: float, pending: Pending) -> None:
        limits = self._limits
        if pending.phase is ReceivePhase.ENDING:
            return
        if now >= pending.overall_deadline:
            reason = f"not received after {limits.request_s:g} s ({describe(pending)})"
            self._fail(pending, ReceiveFailure.DEADLINE, reason)
        elif pending.phase is ReceivePhase.WAITING and now >= pending.deadline:
            failure = pending.failure if pending.reason else ReceiveFailure.DEADLINE
            self._fail(pending, failure, pending.reason or "prefill did not offer it in time")
        else:
            silent = [p for p in pending.pulls.values() if now - p.heard_at >= limits.lease_s]
            if any(not pull.finished for pull in silent):
                self._lose(now, pending, ReceiveFailure.PREFILL, "prefill does not answer", limits.retry_s)
                self._advance(now, pending)
            for pull in pending.pulls.values():
                late = pull.finish_at is not None and now - pull.finish_at >= limits.beat_s
                if late and not pull.finished:
                    self._say_finish(now, pull)

    def _beat(self) -> None:
        entries: dict[str, list[tuple[int, int, int]]] = {}
        pulls = [pull for pending in self._requests.values() for pull in pending.pulls.values()]
        for pull in [*pulls, *self._early.values()]:
            if not pull.finished:
                entries.setdefault(pull.session, []).append(
                    (pull.publish.transfer, *pull.known(self._num_layers))
                )
                self._tell_progress(pull, again=True)
        for session, lines in entries.items():
            for part in parts(lines):
                self._send(session, Beat(self.session, session, part))

    def _tell_progress(self, pull: Pull, again: bool = False) -> None:
        """Reports read progress, which prefill awaits before it reuses the memory; repeated with each
        heartbeat."""
        peer, read = self._peers.get(pull.session), (pull.read_chunks, pull.read_layers)
        if (
            peer is None
            or not peer.hello.progress
            or read == (0, 0)
            or (read == pull.progress_sent and not again)
        ):
            return
        pull.progress_sent = read
        entry = (pull.publish.transfer, *read)
        self._send(pull.session, Progress(self.session, pull.session, (entry,)))

    # ------------------------------------------------------------------------------------------------ helpers

    def _find(self, session: str, transfer: int) -> Pull | None:
        key = (session, transfer)
        if key in self._held:
            pulls = self._requests[self._held[key]].pulls.values()
            return next(pull for pull in pulls if pull.key == key)
        return self._early.get(key)

    def _holder(self, pull: Pull) -> Pending | None:
        req_id = self._held.get(pull.key)
        return None if req_id is None else self._requests[req_id]

    def _say_finish(self, now: float, pull: Pull) -> None:
        pull.finish_at = now
        self._send(pull.session, Finish(self.session, pull.session, pull.publish.transfer))

    def _send(self, session: str, message: ToPrefill) -> None:
        self.outbox.append((session, message))
