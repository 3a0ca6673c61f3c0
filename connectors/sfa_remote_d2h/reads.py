"""Carries out decode's read orders in pieces; every order ends exactly once."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import ReadOrder
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Hello
from vllm_kvoffload.foreign_text import printable
from vllm_kvoffload.log import RateLimitedLog
from vllm_kvoffload.transfer import PeerHandle, ReadHandle, ReadStatus, Spans, TransferEngine, TransferError
from vllm_kvoffload.transfer.spans import block_spans

PIECE_BYTES = 32 << 20
"""Approximate size of a piece, so that heartbeats never wait long for a read."""

READ_S = 30.0
"""Deadline of a piece."""

QUIET_S = 30.0
"""How long polling may fail continuously before a read counts as ended."""


@dataclass
class InFlight:
    """A read order in progress. nbytes: total bytes to read. lost_at: when polling began to raise, None
    while it works."""

    order: ReadOrder
    pieces: deque[Spans]
    nbytes: int = 0
    read: int = 0
    handle: ReadHandle | None = None
    peer: PeerHandle | None = None
    deadline: float = 0.0
    error: str = ""
    over: bool = False
    lost_at: float | None = None


@dataclass
class Source:
    """A prefill rank to read from."""

    hello: Hello
    peer: PeerHandle


class Reads:
    """Executes reads. Used by one thread only.

    Args:
        engine: with this rank's memory registered.
        layout: of that memory.
    """

    def __init__(self, engine: TransferEngine, layout: Layout) -> None:
        self.bytes_read = 0
        self.errors = 0
        self._engine, self._layout = engine, layout
        self._sources: dict[str, Source] = {}
        self._leaving: list[PeerHandle] = []
        self._flights: dict[int, InFlight] = {}
        self._log = RateLimitedLog(__name__)

    def __len__(self) -> int:
        return len(self._flights)

    def meet(self, hello: Hello) -> str:
        """Makes a prefill rank's memory readable. Returns why it is not, or ""."""
        theirs = [(layer.index, layer.sizes) for layer in hello.layers]
        if theirs != [(layer.index, layer.sizes) for layer in self._layout.layers]:
            return "prefill has other layers than its digest says"
        try:
            peer = self._engine.add_peer(hello.metadata)
        except Exception as error:
            self.errors += not isinstance(error, TransferError)
            return f"decode can't read prefill's memory: {printable(str(error) or repr(error))}"
        self._sources[hello.session] = Source(hello, peer)
        return ""

    def leave(self, session: str) -> None:
        """Marks a prefill rank as gone; its peer is removed once no read uses it."""
        source = self._sources.pop(session, None)
        if source is not None:
            self._leaving.append(source.peer)

    def begin(self, order: ReadOrder) -> None:
        """Accepts an order; `poll` returns it when it has ended."""
        flight = self._flights[order.number] = InFlight(order, deque())
        try:
            flight.nbytes = self._wanted_bytes(order)
            flight.pieces.extend(self._pieces(order))
        except Exception as error:
            flight.error = f"{error}" or repr(error)

    def cancel(self, number: int, reason: str) -> None:
        """Ends an order early; it counts as ended once nothing writes its memory."""
        flight = self._flights.get(number)
        if flight is not None:
            flight.error = flight.error or reason
            flight.pieces.clear()
            if flight.handle is not None:
                try:
                    self._engine.cancel(flight.handle)
                except Exception as error:
                    self._failed("cancel", error)

    def poll(self) -> tuple[list[tuple[int, str]], bool]:
        """Returns (number, error or "") of ended orders, each once, and whether any order made progress."""
        moved = [self._advance(flight) for flight in list(self._flights.values())]
        over = [flight for flight in self._flights.values() if flight.over]
        for flight in over:
            del self._flights[flight.order.number]
            if not flight.error and flight.read != flight.nbytes:
                flight.error = f"{flight.read} of {flight.nbytes} bytes were read"
        if self._leaving:
            self._remove_peers()
        return [(flight.order.number, printable(flight.error)) for flight in over], any(moved)

    def close(self, deadline_s: float) -> None:
        """Cancels all orders and waits up to `deadline_s` for them to end."""
        end = time.monotonic() + deadline_s
        for flight in self._flights.values():
            self.cancel(flight.order.number, "shutdown")
            if flight.handle is not None:
                self._engine.wait(flight.handle, max(0.0, end - time.monotonic()))

    # ------------------------------------------------------------------------------------------------ helpers

    def _advance(self, flight: InFlight) -> bool:
        """Returns whether the order made progress. It ends when complete, or when it failed and its memory
        is idle."""
        if flight.handle is not None:
            status = self._status(flight, flight.handle)
            if status is ReadStatus.PENDING:
                if time.monotonic() >= flight.deadline and not flight.error:
                    self.cancel(flight.order.number, f"a read took longer than {READ_S:g} s")
                return False
            if status is ReadStatus.FAILED:
                flight.error = flight.error or flight.handle.reason or "a read failed"
            else:
                flight.read += flight.handle.nbytes
                self.bytes_read += flight.handle.nbytes
            flight.handle = None
        if not flight.error and flight.pieces:
            self._start(flight)
        flight.over = flight.handle is None
        return True

    def _status(self, flight: InFlight, handle: ReadHandle) -> ReadStatus:
        try:
            status = self._engine.poll(handle)
            flight.lost_at = None
            return status
        except Exception as error:  # the memory may still be written
            now = time.monotonic()
            if flight.lost_at is None:
                flight.lost_at = now
                self.cancel(flight.order.number, f"the transfer engine failed: {error!r}")
            self._failed("poll", error)
            return ReadStatus.FAILED if now - flight.lost_at >= QUIET_S else ReadStatus.PENDING

    def _start(self, flight: InFlight) -> None:
        """Starts the next piece."""
        source = self._sources.get(flight.order.session)
        if source is None:
            flight.error = "prefill is gone"
            return
        try:
            flight.handle = self._engine.read(source.peer, flight.pieces.popleft())
            flight.peer, flight.deadline = source.peer, time.monotonic() + READ_S
        except Exception as error:
            if not isinstance(error, TransferError):
                self._failed("read", error)
            flight.error = str(error) or repr(error)

    def _wanted_bytes(self, order: ReadOrder) -> int:
        layers = [self._layout.layers[number] for number in order.layers]
        main = sum(nbytes for layer in layers for _, _, nbytes in layer.main)
        indexer = sum(nbytes for layer in layers for _, _, nbytes in layer.indexer)
        return main * len(order.main) + indexer * len(order.indexer)

    def _pieces(self, order: ReadOrder) -> list[Spans]:
        source = self._sources.get(order.session)
        if source is None:
            raise TransferError("prefill's memory is not known")
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

    def _remove_peers(self) -> None:
        """Removes peers that left, unless a read or another session uses them."""
        used = {source.peer for source in self._sources.values()}
        reading = {flight.peer for flight in self._flights.values() if flight.handle is not None}
        leaving = [peer for peer in self._leaving if peer not in used]
        self._leaving = [peer for peer in leaving if peer in reading]
        for peer in set(leaving) - reading:
            try:
                self._engine.remove_peer(peer)
            except Exception as error:
                self._failed("remove_peer", error)

    def _failed(self, what: str, error: Exception) -> None:
        self.errors += 1
        self._log.error(what, f"the transfer engine's {what} failed: {printable(repr(error))}")
