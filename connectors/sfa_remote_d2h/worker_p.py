"""Prefill's worker half: tells decode ranks which layers they may read, and when blocks may be freed."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.curve import ControlKey
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.halves import ConnectorWorker, StepResults
from vllm_kvoffload.connectors.sfa_remote_d2h.io_thread import (
    TICK_S,
    Idle,
    connection_name,
    receive,
    send,
    set_options,
    tcp,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import PrefillMetadata, PrefillStep, Target
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import TPMismatchError, tp_ratio
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import SILENT_S, Producer
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    MAX_TP,
    Hello,
    ToDecode,
    VersionError,
    WireError,
    decode_to_prefill,
    encode,
)
from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.hostnames import HostError, canonical_host
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.runtime.base import Event
from vllm_kvoffload.settings.remote_d2h import MAX_PORT, RemoteD2HLimits
from vllm_kvoffload.transfer import TransferEngine

logger = get_logger(__name__)

UNUSED_S = 30.0
"""Idle time after which a connection without transfers is closed."""

WRITTEN_S = 30.0
"""Deadline for a layer's writes on the device."""

POLL_S = 0.001
"""Poll interval while the device still writes layers."""

MESSAGES_A_ROUND = 128
"""Messages handled per endpoint before the next one gets its turn."""

QUEUE_LENGTH = 256
"""Messages that libzmq queues for an unreachable decode rank; further ones are lost."""

MAX_ENDPOINTS = 512
"""Maximum number of connections to decode ranks. Those without transfers make room for new ones."""

SETTLED_S = 2.0
"""Silence after which a decode rank's connection may be closed to make room: the last messages have
arrived."""

MAX_RECONNECT_MS = 1000

Endpoint = tuple[str, int]


class EndpointError(ValueError):
    """An endpoint that cannot be connected to."""


class PrefillWorker(ConnectorWorker):
    """The worker half of one rank. The compute thread calls the methods; the I/O thread owns the sockets.

    Args:
        engine: nothing registered yet; closed at the end. channel: also closed at the end.
        facts: of model and layout, see `Layout.facts`.
        control_key: 64 hex digits shared with decode: control messages are encrypted.
        last_layer_at_end: publish the last layer at the step's end only, which may still be found invalid.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: Layout,
        facts: Mapping[str, str],
        *,
        engine_id: str,
        tp_size: int,
        tp_rank: int,
        limits: RemoteD2HLimits,
        progress: bool = False,
        last_layer_at_end: bool = False,
        channel: StatsChannel | None = None,
        control_key: str | None = None,
    ) -> None:
        super().__init__("kvoffload-prefill-io", channel)
        self._engine, self._layout = engine, layout
        self._tp_size, self._tp_rank = tp_size, tp_rank
        engine.register(layout.regions)
        hello = Hello(
            session=uuid.uuid4().hex,
            engine_id=printable(engine_id, 200),
            tp_size=tp_size,
            tp_rank=tp_rank,
            digest=digest_of(facts),
            num_blocks=layout.num_blocks,
            layers=layout.layers,
            metadata=engine.local_metadata(),
            lease_s=limits.lease_s,
            progress=progress,
            facts=dict(facts),
        )
        self._key = None if control_key is None else ControlKey(control_key)
        self.frames_refused = 0
        self.protocol: Producer[Endpoint] = Producer(hello, len(layout.layers))
        self._position = {layer.index: number for number, layer in enumerate(layout.layers)}
        self._early = len(layout.layers) - last_layer_at_end  # layers that may be published before the end
        self._step: list[str] = []
        self._on_news: Callable[[], None] | None = None
        self._idle = Idle()
        self._unwritten: deque[tuple[Event | None, list[str], int]] = deque()
        self._sockets: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._endpoints: dict[zmq.Socket[bytes], Endpoint] = {}

    def drop(self, metadata: PrefillMetadata) -> None:
        """Ends transfers of dropped requests, before their blocks may be overwritten."""
        self._await_written()
        with self.lock:
            for req_id, retry in metadata.dropped:
                self.protocol.drop(req_id, "preempted" if retry else "aborted", retry)
            self._step = []
        self.wake()

    def begin_step(self, metadata: PrefillMetadata) -> None:
        """Registers the blocks that a step is about to compute."""
        self._await_written()
        now = time.monotonic()
        with self.lock:
            for req_id in metadata.held:
                self.protocol.engine_finished(req_id)
            for item in metadata.declined:
                self.attempt(
                    "a refusal", self._decline, now, item.target, item.request, item.prompt, item.reason
                )
            for step in metadata.steps:
                self.attempt("a request's step", self._begin_request, now, step)
            self._step = [step.req_id for step in metadata.steps]
        self.wake()

    def _begin_request(self, now: float, step: PrefillStep) -> None:
        target = step.target
        if step.opens:
            try:
                rank = self._tp_rank // tp_ratio(self._tp_size, target.tp_size)
            except TPMismatchError as error:
                self._decline(now, target, step.request, step.prompt, str(error))
                return
            endpoint = (target.host, target.port + rank)
            self.protocol.open(
                now, step.req_id, step.request, endpoint, step.prompt, step.num_blocks, target.secret
            )
        self.protocol.begin_chunk(step.req_id, step.start, step.blocks, step.final)

    def _decline(self, now: float, target: Target, request: str, prompt: bytes, reason: str) -> None:
        """Tells all ranks of a decode engine that a request will not be transferred."""
        if self._tp_rank == 0:
            for rank in range(min(max(target.tp_size, 0), MAX_TP)):
                endpoint = (target.host, target.port + rank)
                self.protocol.decline(now, endpoint, request, prompt, target.secret, reason)

    def layer_done(self, layer: int, written: Event | None = None) -> None:
        """Publishes a layer's KV, indexer KV included, now or when the device reaches `written`."""
        position = self._position.get(layer)
        if position is not None and position < self._early and self._step:
            self._publish_when(written, position + 1)

    def end_step(self, written: Event | None = None) -> None:
        """Publishes all layers of the step, as `layer_done` does."""
        if self._step:
            self._publish_when(written, len(self._layout.layers))
            self._step = []

    def unread(self, layer: int, requests: Collection[str]) -> list[str]:
        """Returns the requests of which decode may still read this layer (its number in the model)."""
        position = self._position.get(layer)
        if position is None:
            return []
        with self.lock:
            written = {name for _, step, layers in self._unwritten if layers > position for name in step}
            waiting = [name for name in requests if name in written]  # not on the device yet
            return [*waiting, *(n for n in self.protocol.unread(position, requests) if n not in written)]

    def give_up(self, requests: Collection[str], reason: str, retry: bool) -> None:
        """Invalidates decode's reads of these requests. retry: they will be computed again."""
        with self.lock:
            for req_id in requests:
                self.protocol.drop(req_id, reason, retry)
        self.wake()

    def listen(self, on_news: Callable[[], None]) -> None:
        """Registers a callback, called on any thread whenever `unread` may have changed."""
        self._on_news = on_news

    def finish_step(
        self,
        finished_req_ids: Iterable[str] = (),  # noqa: ARG002  # they come with the next step's metadata
        idle: bool = False,
    ) -> StepResults:
        """Returns requests whose blocks may be freed.

        idle: the step computed nothing, so that the call may wait briefly for them.
        """
        with self.lock:
            self._idle.begin()
            waits = idle and self.protocol.keeps
        if waits:
            self._idle.wait()
        else:
            self._idle.worked()
        with self.lock:
            return StepResults(sent=self.protocol.take_free())

    def _publish_when(self, written: Event | None, layers: int) -> None:
        with self.lock:
            self._unwritten.append((written, self._step, layers))
            self._publish_written()
        self.wake()

    def _publish_written(self) -> None:
        """Publishes layers that the device has written, in order. Call with the lock held."""
        while self._unwritten and (self._unwritten[0][0] is None or self._unwritten[0][0].query()):
            _, step, layers = self._unwritten.popleft()
            self.protocol.publish(time.monotonic(), step, layers)

    def _await_written(self) -> None:
        """Waits until all of a step is published, before the next one changes its requests' last chunk."""
        with self.lock:
            waits = [event for event, _, _ in self._unwritten if event is not None]
        for event in waits:
            event.wait(WRITTEN_S)
        with self.lock:
            self._publish_written()

    def _timeout_s(self) -> float:
        return POLL_S if self._unwritten else TICK_S

    def _round(self, ready: set[zmq.Socket[bytes]], now: float) -> None:
        for socket in ready:
            for _ in range(MESSAGES_A_ROUND):
                frames = receive(socket)
                if frames is None:
                    break
                self.attempt("a message", self._take, now, self._endpoints[socket], frames)
        with self.lock:
            self.attempt("publishing", self._publish_written)
            self.attempt("a tick", self.protocol.tick, now)
            outbox, self.protocol.outbox = self.protocol.outbox, []
            idle = self.protocol.forget_idle(now, UNUSED_S)
            silent = self.protocol.silent(now)
            if self.protocol.has_free:
                self._idle.tell()
        self._send_all(outbox)
        for endpoint in idle:
            self._close_socket(endpoint)
        for host, port in silent:
            text = (
                f"decode rank at {printable(host, 64)}:{port} has not answered for {SILENT_S:g} s: it is "
                "down, was restarted since the request was sent, or has another control_key_file"
            )
            self.limited_log.warning("silent", text)
        if self._on_news is not None:
            self.attempt("news", self._on_news)

    def _metrics(self) -> dict[str, int]:
        with self.lock:
            values = self.protocol.metrics()
        return {**values, "frames_refused": self.frames_refused, "control_errors": self.errors}

    def _send_all(self, outbox: list[tuple[Endpoint, ToDecode]]) -> None:
        """Sends to each endpoint separately: an unusable one affects only its own transfers."""
        failed: set[Endpoint] = set()
        for endpoint, message in outbox:
            if endpoint in failed:
                continue
            try:
                send(self._socket(endpoint), [encode(message)])
            except Exception as error:
                failed.add(endpoint)
                self.errors += not isinstance(error, (EndpointError, HostError, zmq.ZMQError))
                with self.lock:
                    self.protocol.fail_endpoint(endpoint)
                name = printable(f"{endpoint[0]}:{endpoint[1]}", 128)
                text = f"decode rank at {name} can't be talked to, its transfers end: {printable(str(error))}"
                self.limited_log.error("endpoint", text)

    def _take(self, now: float, endpoint: Endpoint, frames: list[zmq.Frame]) -> None:
        if len(frames) == 1:
            self._receive(now, endpoint, frames[0].bytes)
        else:
            self._refuse(endpoint, "parts", f"a message of {len(frames)} parts")

    def _receive(self, now: float, endpoint: Endpoint, frame: bytes) -> None:
        try:
            message = decode_to_prefill(frame)
        except VersionError as error:
            self._refuse(endpoint, "version", str(error))
            with self.lock:
                self.protocol.refused(now, endpoint, str(error))
            return
        except WireError as error:
            self._refuse(endpoint, "frame", str(error))
            return
        with self.lock:
            self.protocol.receive(now, endpoint, message)
            link = self.protocol.links.get(endpoint)
            refused = link.refused if link is not None else ""
        if refused:
            text = f"decode rank at {endpoint[0]}:{endpoint[1]} refuses this engine: {printable(refused)}"
            self.limited_log.error("refused", text)

    def _refuse(self, endpoint: Endpoint, kind: str, reason: str) -> None:
        self.frames_refused += 1
        self.limited_log.error(kind, f"decode rank at {endpoint[0]}:{endpoint[1]}: {printable(reason)}")

    def _socket(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        """Returns the connection to an endpoint. Raises EndpointError, HostError, ZMQError."""
        socket = self._sockets.get(endpoint)
        if socket is None:
            host, port = endpoint
            canonical_host(host)
            if not 1 <= port <= MAX_PORT:
                raise EndpointError(f"{port} is no port")
            self._make_room()
            socket = self._context.socket(zmq.DEALER)
            try:
                self._connect(socket, endpoint)
            except Exception:
                socket.close(linger=0)
                raise
            self._sockets[endpoint], self._endpoints[socket] = socket, endpoint
            self._poller.register(socket, zmq.POLLIN)
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
        set_options(socket, QUEUE_LENGTH)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        # Keep the name after a reconnect, so that decode's answers reach this rank again.
        socket.setsockopt(zmq.IDENTITY, connection_name(self.protocol.hello.session))
        if self._key is not None:
            self._key.connect(socket)
        socket.connect(tcp(*endpoint))

    def _make_room(self) -> None:
        """Closes an idle connection. Raises EndpointError if every connection is needed."""
        if len(self._sockets) < MAX_ENDPOINTS:
            return
        with self.lock:
            endpoint = self.protocol.forget_one(time.monotonic(), self._sockets, SETTLED_S)
        if endpoint is not None:
            self._close_socket(endpoint)
        if len(self._sockets) >= MAX_ENDPOINTS:
            raise EndpointError(f"there are connections to {MAX_ENDPOINTS} others, all in use")

    def _close_socket(self, endpoint: Endpoint) -> None:
        socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            del self._endpoints[socket]
            self._poller.unregister(socket)
            socket.close(linger=0)

    def _close(self) -> None:
        for endpoint in list(self._sockets):
            self._close_socket(endpoint)
        self._engine.close()
