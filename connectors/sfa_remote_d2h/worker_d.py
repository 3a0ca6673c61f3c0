"""Decode's worker half: listens on its control port, reads KV into host pool and indexer caches."""

from __future__ import annotations

import time
import uuid
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.consumer import Consumer
from vllm_kvoffload.connectors.sfa_remote_d2h.io_thread import (
    TICK_S,
    Idle,
    IOThread,
    receive_all,
    send,
    tcp,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import DecodeMetadata
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import ReadOrder
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Hello, WireError, decode_to_decode, encode
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.remote_d2h import Limits
from vllm_kvoffload.transfer import (
    PeerHandle,
    ReadHandle,
    ReadStatus,
    Spans,
    TransferEngine,
    TransferError,
)
from vllm_kvoffload.transfer.spans import block_spans

logger = get_logger(__name__)

PIECE_BYTES = 32 << 20
"""A read is made in pieces of about this size, so that heartbeats never wait long for one."""

READ_S = 30.0
"""Deadline of a piece."""

BUSY_S = 0.001
"""Between looks at reads in flight."""

ROUND_S = 0.02
"""How long reads may follow each other before messages are looked at again."""


@dataclass
class InFlight:
    """A read order being carried out, piece by piece."""

    order: ReadOrder
    pieces: deque[Spans]
    handle: ReadHandle | None = None
    deadline: float = 0.0
    error: str = ""
    over: bool = False


@dataclass
class Source:
    """A prefill rank to read from."""

    hello: Hello
    peer: PeerHandle


@dataclass
class Results:
    """What the engine is told at the end of a step."""

    done: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class DecodeWorker(IOThread):
    """One rank. Raises ConfigError when its control port is taken.

    Args:
        engine: with nothing registered yet; it is closed at the end. channel: likewise.
    """

    def __init__(
        self,
        engine: TransferEngine,
        layout: Layout,
        digest: str,
        *,
        host: str,
        port: int,
        tp_size: int,
        tp_rank: int,
        limits: Limits,
        channel: StatsChannel | None = None,
    ) -> None:
        super().__init__("kvoffload-decode-io", channel)
        self._engine, self._layout = engine, layout
        session = uuid.uuid4().hex
        self.consumer = Consumer(session, digest, len(layout.layers), tp_size, tp_rank, limits)
        self.bytes_read = 0
        self._idle = Idle()
        self._sources: dict[str, Source] = {}
        self._flights: dict[int, InFlight] = {}
        self._router = self._bind(host, port)
        engine.register(layout.regions)

    def _bind(self, host: str, port: int) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            router.bind(tcp(host, port))
        except zmq.ZMQError as error:
            router.close(linger=0)
            rule = f"control port {port} of {host} can't be bound: {error.strerror}"
            fix = "choose a base with as many free ports as decode has DP x TP ranks"
            raise ConfigError("kv_port", port, rule, fix) from error
        self._poller.register(router, zmq.POLLIN)
        return router

    def begin_step(self, metadata: DecodeMetadata) -> None:
        """New requests; their blocks are quiet."""
        now = time.monotonic()
        with self.lock:
            for order in metadata.receives:
                self.consumer.expect(now, order)
            for req_id, error in metadata.answered:
                self.consumer.prefill_returned(now, req_id, error)
        self.wake()

    def finish_step(self, finished_req_ids: set[str], idle: bool = False) -> Results:
        """Requests that were received, or failed, since the last step. The others go on.

        idle: the step computed nothing, so that it may wait a moment.
        """
        results = Results()
        with self.lock:
            for req_id in finished_req_ids:
                self.consumer.cancel(req_id)
            waits = idle and bool(self.consumer.live) and not self.consumer.has_outcomes
            self._idle.begin()
        if waits:
            self._idle.wait()
        else:
            self._idle.worked()
        with self.lock:
            for outcome in self.consumer.take_outcomes():
                results.done.add(outcome.req_id)
                results.failed_blocks.update(outcome.failed_blocks)
                if outcome.reason:
                    logger.warning("request %s was not received: %s", outcome.req_id, outcome.reason)
        if finished_req_ids:
            self.wake()
        return results

    # ------------------------------------------------------------------------------------------ the thread

    def _timeout_s(self) -> float:
        return BUSY_S if self._flights else TICK_S

    def _round(self, ready: set[zmq.Socket[bytes]], now: float) -> None:
        for _ in ready:
            for frames in receive_all(self._router):
                self._receive(now, frames)
        with self.lock:
            self.consumer.tick(now)
        self._carry_out()
        # A layer's read is often over at once, and the next layer published by then.
        while self._poll_reads() and time.monotonic() < now + ROUND_S:
            pass

    def _metrics(self) -> dict[str, int]:
        with self.lock:
            return {**self.consumer.metrics(), "pulled_bytes": self.bytes_read}

    def _receive(self, now: float, frames: list[bytes]) -> None:
        try:
            message = decode_to_decode(frames[-1])
        except WireError as error:
            logger.error("prefill rank %s: %s", frames[0].hex(), error)
            return
        if frames[0] != message.session.encode():
            logger.error("a message of session %s came from another one", message.session)
            return
        with self.lock:
            self.consumer.receive(now, message)
            known = message.session in self.consumer.peers
        if isinstance(message, Hello) and known:
            self._meet(message)
        self._carry_out()

    def _meet(self, hello: Hello) -> None:
        if [layer.sizes for layer in hello.layers] != [layer.sizes for layer in self._layout.layers]:
            logger.error("prefill rank %s has other layers than its digest says", hello.session)
            return
        try:
            self._sources[hello.session] = Source(hello, self._engine.add_peer(hello.metadata))
        except TransferError as error:
            logger.error("prefill rank %s of %s: %s", hello.session, hello.engine_id, error)

    def _carry_out(self) -> None:
        """Does what the state machine wants done."""
        with self.lock:
            consumer = self.consumer
            outbox, consumer.outbox = consumer.outbox, []
            orders, consumer.orders = consumer.orders, []
            cancelled, consumer.to_cancel = consumer.to_cancel, []
            lost, consumer.lost_peers = consumer.lost_peers, []
            if consumer.has_outcomes:
                self._idle.tell()
        for session, message in outbox:
            send(self._router, [session.encode(), encode(message)])
        for order in orders:
            self._flights[order.number] = InFlight(order, deque(self._pieces(order)))
        for number in cancelled:
            self._cancel(number, "cancelled")
        for session in lost:
            source = self._sources.pop(session, None)
            if source is not None:
                self._engine.remove_peer(source.peer)

    def _cancel(self, number: int, reason: str) -> None:
        flight = self._flights.get(number)
        if flight is not None:
            flight.error = flight.error or reason
            flight.pieces.clear()
            if flight.handle is not None:
                self._engine.cancel(flight.handle)

    def _pieces(self, order: ReadOrder) -> list[Spans]:
        source = self._sources.get(order.session)
        if source is None:
            return []
        pairs = [np.array(p, dtype=np.int64).reshape(-1, 2) for p in (order.main, order.indexer)]
        pieces: list[Spans] = []
        batch: list[Spans] = []
        size = 0
        for number in order.layers:
            ours, theirs = self._layout.layers[number], source.hello.layers[number]
            for blocks, here, there in (
                (pairs[0], ours.main, theirs.main),
                (pairs[1], ours.indexer, theirs.indexer),
            ):
                for (local, local_step, nbytes), (remote, remote_step, _) in zip(here, there, strict=True):
                    batch.append(
                        block_spans(
                            blocks[:, 0], local, local_step, blocks[:, 1], remote, remote_step, nbytes
                        )
                    )
                    size += batch[-1].total_bytes
            if size >= PIECE_BYTES:
                pieces.append(Spans.concat(batch))
                batch, size = [], 0
        return [*pieces, Spans.concat(batch)] if batch else pieces

    def _poll_reads(self) -> bool:
        """Whether any order got on."""
        moved = [self._advance(flight) for flight in self._flights.values()]
        for flight in [flight for flight in self._flights.values() if flight.over]:
            del self._flights[flight.order.number]
            with self.lock:
                self.consumer.read_done(time.monotonic(), flight.order.number, flight.error)
        self._carry_out()
        return any(moved)

    def _advance(self, flight: InFlight) -> bool:
        """Whether the order got on. It is over once carried out, or failed with its memory quiet."""
        if flight.handle is not None:
            status = self._engine.poll(flight.handle)
            if status is ReadStatus.PENDING:
                if time.monotonic() >= flight.deadline and not flight.error:
                    self._cancel(flight.order.number, f"a read took longer than {READ_S:g} s")
                return False
            if status is ReadStatus.FAILED:
                flight.error = flight.error or flight.handle.reason
            else:
                self.bytes_read += flight.handle.nbytes
            flight.handle = None
        if not flight.error and flight.pieces:
            self._start(flight)
        flight.over = flight.handle is None
        return True

    def _start(self, flight: InFlight) -> None:
        """Begins to read the next piece."""
        source = self._sources.get(flight.order.session)
        if source is None:
            flight.error = "prefill is gone"
            return
        try:
            flight.handle = self._engine.read(source.peer, flight.pieces.popleft())
            flight.deadline = time.monotonic() + READ_S
        except TransferError as error:
            flight.error = str(error)

    def _close(self) -> None:
        end = time.monotonic() + 1.0
        for flight in self._flights.values():
            self._cancel(flight.order.number, "shutdown")
            if flight.handle is not None:
                self._engine.wait(flight.handle, max(0.0, end - time.monotonic()))
        self._router.close(linger=0)
        self._engine.close()
