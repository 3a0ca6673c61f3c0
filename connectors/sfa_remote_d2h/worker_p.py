"""Prefill's worker half: tells decode ranks what may be read, and when blocks are free again."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Collection

import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.io_thread import TICK_S, Idle, IOThread, receive_all, send, tcp
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import PrefillMetadata
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import tp_ratio
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import Producer
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Hello,
    WireError,
    decode_to_prefill,
    encode,
)
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.runtime.base import Event
from vllm_kvoffload.settings.remote_d2h import Limits
from vllm_kvoffload.transfer import TransferEngine

logger = get_logger(__name__)

UNUSED_S = 30.0
"""A connection without transfers is closed after so long."""

WRITTEN_S = 30.0
"""Deadline of a layer's writes on the device."""

POLL_S = 0.001
"""Between looks at layers that the device still writes."""

Endpoint = tuple[str, int]


class PrefillWorker(IOThread):
    """One rank. The compute thread calls the methods; sockets belong to the thread.

    Args:
        engine: with nothing registered yet; it is closed at the end. channel: likewise.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: Layout,
        digest: str,
        *,
        engine_id: str,
        tp_size: int,
        tp_rank: int,
        limits: Limits,
        progress: bool = False,
        channel: StatsChannel | None = None,
    ) -> None:
        super().__init__("kvoffload-prefill-io", channel)
        self._engine, self._layout = engine, layout
        self._tp_size, self._tp_rank = tp_size, tp_rank
        engine.register(layout.regions)
        hello = Hello(
            session=uuid.uuid4().hex,
            engine_id=engine_id,
            tp_size=tp_size,
            tp_rank=tp_rank,
            digest=digest,
            num_blocks=layout.num_blocks,
            layers=layout.layers,
            metadata=engine.local_metadata(),
            lease_s=limits.lease_s,
            progress=progress,
        )
        self.producer: Producer[Endpoint] = Producer(hello, len(layout.layers))
        self._position = {layer.index: number for number, layer in enumerate(layout.layers)}
        self._step: list[str] = []
        self._on_news: Callable[[], None] | None = None
        self._idle = Idle()
        self._unwritten: deque[tuple[Event | None, list[str], int]] = deque()
        self._sockets: dict[Endpoint, zmq.Socket[bytes]] = {}
        self._endpoints: dict[zmq.Socket[bytes], Endpoint] = {}

    def drop(self, metadata: PrefillMetadata) -> None:
        """Before anything may overwrite their blocks."""
        self._await_written()
        with self.lock:
            for req_id, retry in metadata.dropped:
                self.producer.drop(req_id, "preempted" if retry else "aborted", retry)
            self._step = []
        self.wake()

    def begin_step(self, metadata: PrefillMetadata) -> None:
        """A step's blocks will be computed now."""
        self._await_written()
        now = time.monotonic()
        with self.lock:
            for req_id in metadata.held:
                self.producer.engine_finished(req_id)
            for step in metadata.steps:
                if step.opens:
                    rank = self._tp_rank // tp_ratio(self._tp_size, step.target.tp_size)
                    endpoint = (step.target.host, step.target.port + rank)
                    self.producer.open(now, step.req_id, step.request, endpoint, step.prompt, step.num_blocks)
                self.producer.begin_chunk(step.req_id, step.start, step.blocks, step.final)
            self._step = [step.req_id for step in metadata.steps]
        self.wake()

    def layer_done(self, layer: int, written: Event | None = None) -> None:
        """A layer's KV, its indexer's too, is written, or will be when the device gets to an event."""
        position = self._position.get(layer)
        if position is not None and self._step:
            self._publish_when(written, position + 1)

    def end_step(self, written: Event | None = None) -> None:
        """The same for every layer."""
        if self._step:
            self._publish_when(written, len(self._layout.layers))
            self._step = []

    def unread(self, layer: int, requests: Collection[str]) -> list[str]:
        """Those of the requests of which decode may still read this layer (its number in the model)."""
        position = self._position.get(layer)
        if position is None:
            return []
        with self.lock:
            written = {name for _, step, layers in self._unwritten if layers > position for name in step}
            waiting = [name for name in requests if name in written]  # published when the device has them
            return [*waiting, *(n for n in self.producer.unread(position, requests) if n not in written)]

    def give_up(self, requests: Collection[str], reason: str, retry: bool) -> None:
        """What decode reads of these requests doesn't count any more. retry: they will be computed again."""
        with self.lock:
            for req_id in requests:
                self.producer.drop(req_id, reason, retry)
        self.wake()

    def listen(self, on_news: Callable[[], None]) -> None:
        """Calls a function, on any thread, whenever `unread` may have changed."""
        self._on_news = on_news

    def take_free(self, idle: bool = False) -> set[str]:
        """Requests whose blocks may be freed.

        idle: the step computed nothing, so that it may wait a moment for them.
        """
        with self.lock:
            self._idle.begin()
            waits = idle and self.producer.keeps
        if waits:
            self._idle.wait()
        else:
            self._idle.worked()
        with self.lock:
            return self.producer.take_free()

    def _publish_when(self, written: Event | None, layers: int) -> None:
        with self.lock:
            self._unwritten.append((written, self._step, layers))
            self._publish_written()
        self.wake()

    def _publish_written(self) -> None:
        """Under the lock: publishes what the device has written, in order."""
        while self._unwritten and (self._unwritten[0][0] is None or self._unwritten[0][0].query()):
            _, step, layers = self._unwritten.popleft()
            self.producer.publish(time.monotonic(), step, layers)

    def _await_written(self) -> None:
        """Nothing of a step is left unpublished when the next one changes its requests' last chunk."""
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
            for frames in receive_all(socket):
                self._receive(now, self._endpoints[socket], frames)
        with self.lock:
            self._publish_written()
            self.producer.tick(now)
            outbox, self.producer.outbox = self.producer.outbox, []
            idle = self.producer.forget_idle(now, UNUSED_S)
            if self.producer.has_free:
                self._idle.tell()
        for endpoint, message in outbox:
            send(self._socket(endpoint), [encode(message)])
        for endpoint in idle:
            self._close_socket(endpoint)
        if self._on_news is not None:
            self._on_news()

    def _metrics(self) -> dict[str, int]:
        with self.lock:
            return self.producer.metrics()

    def _receive(self, now: float, endpoint: Endpoint, frames: list[bytes]) -> None:
        try:
            message = decode_to_prefill(frames[-1])
        except WireError as error:
            logger.error("decode rank at %s:%d: %s", *endpoint, error)
            return
        with self.lock:
            self.producer.receive(now, endpoint, message)
            link = self.producer.links.get(endpoint)
            refused = link.refused if link is not None else ""
        if refused:
            logger.error("decode rank at %s:%d refuses this engine: %s", *endpoint, refused)

    def _socket(self, endpoint: Endpoint) -> zmq.Socket[bytes]:
        socket = self._sockets.get(endpoint)
        if socket is None:
            socket = self._context.socket(zmq.DEALER)
            # The same name after a reconnect, so that decode's answers find this rank again.
            socket.setsockopt(zmq.IDENTITY, self.producer.hello.session.encode())
            socket.connect(tcp(*endpoint))
            self._sockets[endpoint], self._endpoints[socket] = socket, endpoint
            self._poller.register(socket, zmq.POLLIN)
        return socket

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
