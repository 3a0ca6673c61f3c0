"""Decode's worker half: listens on its control port and reads KV into the host pool and indexer caches."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.connection_gate import ConnectionGate
from vllm_kvoffload.connectors.sfa_remote_d2h.consumer import Consumer
from vllm_kvoffload.connectors.sfa_remote_d2h.curve import ControlKey, Gatekeeper
from vllm_kvoffload.connectors.sfa_remote_d2h.halves import ConnectorWorker, StepResults
from vllm_kvoffload.connectors.sfa_remote_d2h.io_thread import (
    TICK_S,
    Idle,
    is_connection_of,
    receive,
    send,
    set_options,
    tcp,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import DecodeMetadata
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure, Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.reads import Reads
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Declined,
    Hello,
    NeedHello,
    Refused,
    ToPrefill,
    VersionError,
    WireError,
    decode_to_decode,
    encode,
)
from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.metrics.fields import ReceiveFailure
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.remote_d2h import RemoteD2HLimits
from vllm_kvoffload.transfer import TransferEngine

logger = get_logger(__name__)

BUSY_S = 0.001
"""Poll interval while reads are in flight."""

ROUND_S = 0.02
"""Longest time spent on reads before messages are handled again."""

MESSAGES_A_ROUND = 256
"""Messages handled before reads and deadlines get their turn; libzmq serves connections fairly."""

QUEUE_LENGTH = 64
"""Messages that libzmq queues per connection and direction. Further ones wait on prefill, or are lost."""

MAX_STUCK = 256
"""Limit on connections that were shut down but not closed by libzmq: it keeps those it no longer reads
from, for example when peers take each other's name."""

REBIND_S = 1.0

MAX_ROUTES = 4096
"""Maximum number of sessions whose connection is remembered."""


class DecodeWorker(ConnectorWorker):
    """The worker half of one rank. Raises ConfigError when its control port is taken.

    Args:
        engine: nothing registered yet; closed at the end. channel: also closed at the end.
        facts: of model and layout, see `Layout.facts`.
        control_key: 64 hex digits shared with prefill: control messages are encrypted.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: Layout,
        facts: Mapping[str, str],
        *,
        host: str,
        port: int,
        tp_size: int,
        tp_rank: int,
        limits: RemoteD2HLimits,
        channel: StatsChannel | None = None,
        control_key: str | None = None,
    ) -> None:
        super().__init__("kvoffload-decode-io", channel)
        self._engine = engine
        self._session = uuid.uuid4().hex
        self.protocol = Consumer(self._session, facts, len(layout.layers), tp_size, tp_rank, limits)
        self.frames_refused = 0
        # By session: the name of the connection it used last. A session may have several, since an engine is
        # reachable under more than one name and address.
        self._routes: OrderedDict[str, bytes] = OrderedDict()
        self._idle = Idle()
        self._reads = Reads(engine, layout)
        self._gatekeeper: Gatekeeper | None = None
        self._key = None if control_key is None else ControlKey(control_key)
        if self._key is not None:
            self._gatekeeper = Gatekeeper(self._context, self._key)
            self._poller.register(self._gatekeeper.socket, zmq.POLLIN)
        self._address = (host, port)
        self._router = self._bind(host, port)
        self._gate = self._watched()
        engine.register(layout.regions)

    @property
    def bytes_read(self) -> int:
        """Bytes read from prefill since the start."""
        return self._reads.bytes_read

    def _watched(self) -> ConnectionGate:
        gate = ConnectionGate(self._router, self._address[1])
        self._poller.register(gate.monitor, zmq.POLLIN)
        return gate

    def _listen_anew(self) -> None:
        """Recreates the listening socket: only closing it ends the connections that libzmq keeps. Prefill
        reconnects under the same names. Raises ConfigError while the port is still taken."""
        if not self._router.closed:
            for item in (self._router, self._gate.monitor):
                self._poller.unregister(item)
            self._gate.close()
            self._router.close(linger=0)
        end = time.monotonic() + REBIND_S
        while self._router.closed:
            try:
                self._router = self._bind(*self._address)
            except ConfigError:  # libzmq closes in the background
                if time.monotonic() >= end:
                    raise
                time.sleep(BUSY_S)
        before, self._gate = self._gate, self._watched()
        self._gate.closed, self._gate.failed = before.closed, before.failed

    def _bind(self, host: str, port: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        set_options(router, QUEUE_LENGTH)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._key is not None:
            self._key.serve(router)
        try:
            router.bind(tcp(host, port))
        except zmq.ZMQError as error:
            router.close(linger=0)
            rule = f"control port {port} of {host} can't be bound: {error.strerror}"
            fix = "choose a base with as many free ports as decode has DP x TP ranks"
            raise ConfigError("kv_port", port, rule, fix) from error
        self._poller.register(router, zmq.POLLIN)
        return router

    def use_secret(self, secret: str) -> None:
        """Sets the secret that prefill must present; until then it is not answered."""
        with self.lock:
            self.protocol.use_secret(secret)

    def begin_step(self, metadata: DecodeMetadata) -> None:
        """Registers new requests, whose blocks are not being written."""
        now = time.monotonic()
        with self.lock:
            self.protocol.use_secret(metadata.secret)
            for order in metadata.receives:
                self.attempt("a new request", self._expect, now, order)
            for req_id, error in metadata.answered:
                self.attempt("a rendezvous", self.protocol.prefill_returned, now, req_id, error)
        self.wake()

    def _expect(self, now: float, order: Receive) -> None:
        try:
            self.protocol.expect(now, order)
        except Exception as error:
            self.protocol.abandon(order, f"decode could not begin to receive it: {error!r}")
            raise

    def finish_step(self, finished_req_ids: Iterable[str] = (), idle: bool = False) -> StepResults:
        """Returns requests received or failed since the last step. The others continue.

        idle: the step computed nothing, so that the call may wait briefly.
        """
        results, aborted = StepResults(), list(finished_req_ids)
        with self.lock:
            for req_id in aborted:
                self.attempt("an abort", self.protocol.cancel, req_id)
            waits = idle and bool(self.protocol.live) and not self.protocol.has_outcomes
            self._idle.begin()
        if waits:
            self._idle.wait()
        else:
            self._idle.worked()
        with self.lock:
            for outcome in self.protocol.take_outcomes():
                results.received.add(outcome.req_id)
                results.failed_blocks.update(outcome.failed_blocks)
                if outcome.reason:
                    reason, failure = printable(outcome.reason), outcome.failure or ReceiveFailure.PREFILL
                    failed = Failure(reason, failure.value, outcome.prefill_layout)
                    results.failures[outcome.req_id] = failed
                    name = printable(outcome.req_id)
                    logger.warning("request %s was not received (%s): %s", name, failure.value, reason)
        if aborted:
            self.wake()
        return results

    # --------------------------------------------------------------------------------------------- the thread

    def _timeout_s(self) -> float:
        return BUSY_S if self._reads else TICK_S

    def _round(self, ready: set[zmq.Socket[bytes]], now: float) -> None:
        if self._router.closed or self._gate.stuck >= MAX_STUCK:
            text = f"{MAX_STUCK} unproven connections would not end: the control port is opened anew"
            self.limited_log.warning("stuck", text)
            self._listen_anew()
        if self._gatekeeper is not None:
            self.attempt("a check of keys", self._gatekeeper.answer)
        if self._router in ready:
            for _ in range(MESSAGES_A_ROUND):
                frames = receive(self._router)
                if frames is None:
                    break
                self.attempt("a message", self._take, now, frames)
        self.attempt("a look at connections", self._watch, now)
        with self.lock:
            self.attempt("a tick", self.protocol.tick, now)
        self._carry_out()
        # A layer's read often ends at once, and by then the next layer is published.
        while self._poll_reads() and time.monotonic() < now + ROUND_S:
            pass

    def _metrics(self) -> dict[str, int]:
        with self.lock:
            values = self.protocol.metrics()
        return {
            **values,
            "pulled_bytes": self.bytes_read,
            "frames_refused": self.frames_refused,
            "unauthenticated_closed": self._gate.closed,
            "control_errors": self.errors + self._reads.errors,
        }

    def _watch(self, now: float) -> None:
        failed, closed = self._gate.failed, self._gate.closed
        self._gate.watch(now)
        self._gate.tick(now)
        if self._gate.failed > failed:
            key = (
                "another control_key_file, or none"
                if self._key is not None
                else "a control_key_file, or no ZeroMQ"
            )
            self.limited_log.warning(
                "handshake", f"a connection to the control port failed: its sender has {key}"
            )
        if self._gate.closed > closed:
            text = "a connection to the control port was closed: no Hello with the secret of this start came"
            self.limited_log.warning("unauthenticated", text)

    def _take(self, now: float, frames: list[zmq.Frame]) -> None:
        """Handles a message, together with its connection."""
        self._gate.watch(now)
        try:
            descriptor = int(frames[-1].get(zmq.SRCFD))
        except zmq.ZMQError:  # not ZMTP 3: libzmq reports no connection
            self._refuse(frames[0].bytes, -1, "protocol", "its connection speaks no ZMTP 3")
            return
        if len(frames) != 2:
            self._refuse(frames[0].bytes, descriptor, "parts", f"a message of {len(frames)} parts")
            return
        self._receive(now, frames[0].bytes, frames[1].bytes, descriptor)

    def _receive(self, now: float, identity: bytes, frame: bytes, descriptor: int) -> None:
        session = self._gate.frame(now, descriptor)
        try:
            message = decode_to_decode(frame)
        except VersionError as error:
            self._refuse(identity, -1, "version", str(error))
            send(self._router, [identity, encode(Refused("unknown", "unknown", printable(str(error))))])
            return
        except WireError as error:
            self._refuse(identity, descriptor, "frame", str(error))
            return
        if not is_connection_of(identity, message.session):
            self._refuse(identity, descriptor, "session", f"a {type(message).__name__} of another session")
            return
        if not isinstance(message, (Hello, Declined)) and session != message.session:
            if self.protocol.ready:  # a connection must introduce itself even if its session is known
                send(self._router, [identity, encode(NeedHello(self._session, message.session))])
            return
        if not isinstance(message, (Hello, Declined)):
            self._answer_over(message.session, identity)
        elif self.protocol.proved(message.secret):
            self._gate.introduced(descriptor, message.session)
            self._answer_over(message.session, identity)
        with self.lock:
            reason = self.protocol.receive(now, message)
        if reason:
            self._refuse(identity, -1, "hello", reason)
        self._carry_out()

    def _refuse(self, identity: bytes, descriptor: int, kind: str, reason: str) -> None:
        """Counts and logs a refusal. descriptor: connection to end if it is unauthenticated, or -1."""
        self.frames_refused += 1
        sender = identity.decode("ascii", "backslashreplace")
        self.limited_log.error(
            f"refused {kind}", f"prefill rank {printable(sender, 64)}: {printable(reason)}"
        )
        self._gate.refuse(descriptor)

    def _meet(self, hello: Hello) -> None:
        reason = self._reads.meet(hello)
        with self.lock:
            if reason:
                self.protocol.refuse(hello, reason)
            else:
                reason = self.protocol.admit(time.monotonic(), hello)
        if reason:
            self._refuse(hello.session.encode(), -1, "peer", reason)
        if hello.session not in self.protocol.peers:
            self._reads.leave(hello.session)

    def _carry_out(self) -> None:
        """Carries out the state machine's queued actions until none is left."""
        while True:
            with self.lock:
                protocol = self.protocol
                outbox, protocol.outbox = protocol.outbox, []
                orders, protocol.orders = protocol.orders, []
                cancelled, protocol.to_cancel = protocol.to_cancel, []
                failed, protocol.failed_peers = protocol.failed_peers, []
                hellos, protocol.to_meet = protocol.to_meet, []
                if protocol.has_outcomes:
                    self._idle.tell()
            for session in failed:
                self._reads.leave(session)
            for order in orders:
                self._reads.begin(order)
            for number in cancelled:
                self._reads.cancel(number, "cancelled")
            for session, message in outbox:
                self.attempt("an answer", self._send, session, message)
            for hello in hellos:
                self.attempt("a new peer", self._meet, hello)
            if not hellos:
                return

    def _answer_over(self, session: str, identity: bytes) -> None:
        self._routes[session] = identity
        self._routes.move_to_end(session)
        if len(self._routes) > MAX_ROUTES:
            self._routes.popitem(last=False)

    def _send(self, session: str, message: ToPrefill) -> None:
        send(self._router, [self._routes.get(session, session.encode()), encode(message)])

    def _poll_reads(self) -> bool:
        """Polls the reads; returns whether any order made progress."""
        over, moved = self._reads.poll()
        for number, error in over:
            with self.lock:
                self.attempt("the end of a read", self.protocol.read_done, time.monotonic(), number, error)
        self._carry_out()
        return moved

    def _close(self) -> None:
        self._reads.close(1.0)
        self._gate.close()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._router.close(linger=0)
        self._engine.close()
