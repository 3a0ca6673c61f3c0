"""Prefill's side of the protocol, for one rank: transfers, leases, and when blocks are free. Pure.

Nothing here waits, sends or reads a clock: every call gets the time in seconds, and outgoing messages are
collected in `outbox`. A transfer is `open` from the first step that computes for its request until decode
finishes or cancels it, the engine drops it (abort, preemption), or its lease ends. Then it is closed for
good: any later message about it is answered with `Closed`, except that a finished transfer stays finished
for a while, in case the answer was lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from vllm_kvoffload.connectors.sfa_remote_d2h.counts import TransferCounts
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Beat,
    BeatAck,
    Cancel,
    Chunk,
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
from vllm_kvoffload.metrics.fields import TransferEnd

Endpoint = TypeVar("Endpoint")

FINISHED_KEPT = 4096
"""Finished transfers remembered, so that a repeated `Finish` gets the same answer."""

HELLO_RETRY_S = 0.5
HELLO_AGAIN_S = 0.1
"""Shortest time between two introductions to an endpoint, even if it asks for more."""

UNANSWERED_S = 2.0
"""How long shared layer buffers wait for the first answer of a decode rank."""

SILENT_S = 5.0
"""Time without an answer to an introduction after which the endpoint is logged."""

REFUSED_S = 5.0
"""How long a decode rank that refused this engine is not asked again; another process may replace it."""

REPEAT_S = 1.0
"""Interval at which a `Publish` is repeated until a heartbeat answers it."""


@dataclass
class Transfer(Generic[Endpoint]):
    """One open transfer. `bound`: decode's session that sent a heartbeat for it, "" before the first.
    `read`: (chunks read completely, layers read of the next one). `secret`: from the request's rendezvous."""

    number: int
    req_id: str
    request: str
    endpoint: Endpoint
    prompt: bytes
    num_blocks: int
    lease_end: float
    chunks: list[Chunk] = field(default_factory=list)
    complete: bool = False
    bound: str = ""
    read: tuple[int, int] = (0, 0)
    said_at: float = float("-inf")
    secret: str = ""


@dataclass
class Link:
    """State of the decode rank at an endpoint. `peer`: its session, "" while unknown.

    secret: sent in the last `Hello`, which the present `peer`, if any, has seen. asked_at: when the first
    unanswered `Hello` was sent, None if there is none. again: decode asked for a `Hello`, so earlier
    messages to it are lost.
    """

    peer: str = ""
    secret: str = ""
    asked_at: float | None = None
    hello_at: float = float("-inf")
    used_at: float = float("-inf")
    refused: str = ""
    again: bool = False


class Producer(Generic[Endpoint]):
    """Transfers of one prefill rank.

    Args:
        hello: this rank's introduction; its `lease_s` is how long a transfer lives without a heartbeat.
        num_layers: layers published of every chunk, in order.
    """

    def __init__(self, hello: Hello, num_layers: int) -> None:
        self.hello = hello
        self.outbox: list[tuple[Endpoint, ToDecode]] = []
        self.counts = TransferCounts()
        self._num_layers = num_layers
        self._transfers: dict[int, Transfer[Endpoint]] = {}
        self._by_request: dict[str, int] = {}
        self._finished: OrderedDict[int, None] = OrderedDict()
        self._links: dict[Endpoint, Link] = {}
        self._next = 1
        self._owed: set[str] = set()  # finished requests whose blocks are kept until reported
        self._free: set[str] = set()  # the subset that may be freed

    @property
    def open_requests(self) -> set[str]:
        """Requests with an open transfer."""
        return set(self._by_request)

    @property
    def links(self) -> dict[Endpoint, Link]:
        """Known endpoints."""
        return self._links

    # ---------------------------------------------------------------------------------- calls from the engine

    def open(
        self,
        now: float,
        req_id: str,
        request: str,
        endpoint: Endpoint,
        prompt: bytes,
        num_blocks: int,
        secret: str = "",
    ) -> None:
        """Opens a transfer. An older one of the same request is dropped, since its blocks were replaced.

        secret: of the decode engine that waits for the request. If it differs from the one last sent to
        the endpoint, this rank introduces itself again: decode may have restarted.
        """
        self.drop(req_id, "preempted", retry=True)
        lease_end = now + self.hello.lease_s
        transfer = Transfer(self._next, req_id, wire_name(request), endpoint, prompt, num_blocks, lease_end)
        transfer.secret = secret
        self._next += 1
        self.counts.opened += 1
        self._transfers[transfer.number] = transfer
        self._by_request[req_id] = transfer.number
        link = self._link(endpoint)
        if secret != link.secret:
            # The endpoint's state is kept: a request may carry any secret, and must not affect others.
            # Only a refusal is dropped, since it came from an engine with another secret.
            if link.refused:
                link.peer = link.refused = ""
            self._say_hello(now, endpoint, link, secret)
        self._publish(now, transfer, 0)

    def begin_chunk(self, req_id: str, start: int, blocks: Iterable[int], final: bool) -> None:
        """Records that a step starts to compute these blocks. Unknown requests are ignored, as everywhere
        here."""
        transfer = self._of(req_id)
        chunk = Chunk(start, tuple(blocks), 0)
        if transfer is not None and not transfer.complete and (chunk.blocks or final):
            transfer.chunks.append(chunk)
            transfer.complete = final

    def publish(self, now: float, req_ids: Iterable[str], layers: int) -> None:
        """Records that the first `layers` layers of these requests' last chunk are computed."""
        for req_id in req_ids:
            transfer = self._of(req_id)
            if transfer is None or not transfer.chunks or transfer.chunks[-1].layers >= layers:
                continue
            transfer.chunks[-1] = replace_layers(transfer.chunks[-1], min(layers, self._num_layers))
            self._publish(now, transfer, len(transfer.chunks) - 1)

    def drop(self, req_id: str, reason: str, retry: bool = False) -> None:
        """Ends a transfer because the engine takes the blocks back: aborted, or preempted and to be
        recomputed."""
        transfer = self._of(req_id)
        if transfer is not None:
            end = TransferEnd.PREEMPTED if retry else TransferEnd.ABORTED
            self._close(transfer, end, reason, retry)

    def unread(self, layer: int, req_ids: Iterable[str]) -> list[str]:
        """Returns the requests of which decode may still read this layer (index from 0)."""
        transfers = [(req_id, self._of(req_id)) for req_id in req_ids]
        return [req_id for req_id, transfer in transfers if transfer and is_unread(transfer, layer)]

    def decline(
        self, now: float, endpoint: Endpoint, request: str, prompt: bytes, secret: str, reason: str
    ) -> None:
        """Tells a decode rank that this rank will not transfer a request."""
        self._link(endpoint).used_at = now
        name, session = wire_name(request), self.hello.session
        message = Declined(session, secret, name, prompt, printable(reason), self.hello.digest)
        self._send(endpoint, message)

    def fail_endpoint(self, endpoint: Endpoint) -> None:
        """Ends all transfers to an endpoint that cannot be connected to."""
        for transfer in [t for t in self._transfers.values() if t.endpoint == endpoint]:
            self._close(transfer, TransferEnd.UNREACHABLE, tell=False)
        self._links.pop(endpoint, None)

    def refused(self, now: float, endpoint: Endpoint, reason: str) -> None:
        """Records that the decode rank at an endpoint speaks another protocol version."""
        link = self._link(endpoint)
        self._answered(now, endpoint, link, Refused(link.peer or "unknown", self.hello.session, reason))

    def silent(self, now: float) -> list[Endpoint]:
        """Returns endpoints with transfers that have left an introduction unanswered for too long."""
        needed = {transfer.endpoint for transfer in self._transfers.values()}
        links = [(end, link) for end, link in self._links.items() if end in needed and not link.peer]
        return [end for end, link in links if link.asked_at is not None and now - link.asked_at >= SILENT_S]

    def engine_finished(self, req_id: str) -> None:
        """The engine has finished the request and keeps its blocks until `take_free` returns it."""
        self._owed.add(req_id)
        if req_id not in self._by_request:
            self._free.add(req_id)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` would return something."""
        return bool(self._free)

    @property
    def keeps(self) -> bool:
        """Whether finished requests are kept and none can be freed yet."""
        return bool(self._owed) and not self._free

    def take_free(self) -> set[str]:
        """Returns the requests whose blocks the engine may free, each once."""
        free, self._free = self._free, set()
        self._owed -= free
        return free

    def metrics(self) -> dict[str, int]:
        """Counters by key of `metrics.PREFILL`."""
        gauges = {"open_transfers": len(self._transfers), "kept_requests": len(self._owed)}
        return {**gauges, "peer_ranks": len(self._links), **self.counts.values()}

    # ----------------------------------------------------------------------------------- messages from decode

    def receive(self, now: float, endpoint: Endpoint, message: ToPrefill) -> None:
        """Handles a message from the decode rank at an endpoint."""
        link = self._link(endpoint)
        link.used_at = now
        if message.peer != self.hello.session:
            return  # meant for this rank's predecessor
        if isinstance(message, (HelloAck, Refused)):
            self._answered(now, endpoint, link, message)
        elif isinstance(message, NeedHello):
            link.again = True
            self._introduce(now, endpoint, link, HELLO_AGAIN_S)
        elif message.session != link.peer:
            self._introduce(now, endpoint, link)  # decode restarted, or its answer to Hello was lost
        elif isinstance(message, Beat):
            self._beat(now, endpoint, message)
        elif isinstance(message, Progress):
            for number, chunks, layers in message.entries:
                transfer = self._at(endpoint, number)
                if transfer is not None:
                    transfer.read = max(transfer.read, (chunks, layers))
        elif isinstance(message, Finish):
            self._finish(endpoint, message)
        elif isinstance(message, Cancel):
            transfer = self._at(endpoint, message.transfer)
            if transfer is not None:
                self._close(transfer, TransferEnd.CANCELLED, tell=False)

    def _answered(self, now: float, endpoint: Endpoint, link: Link, message: HelloAck | Refused) -> None:
        news = link.again or bool(link.refused) or link.peer != message.session
        link.peer, link.asked_at, link.again = message.session, None, False
        link.refused = (message.reason or "no reason given") if isinstance(message, Refused) else ""
        for transfer in [t for t in self._transfers.values() if t.endpoint == endpoint]:
            if link.refused:
                self._refuse(now, transfer, link)
            elif transfer.bound not in ("", message.session):
                self._close(transfer, TransferEnd.RESTARTED, tell=False)
            elif news:
                self._publish(now, transfer, 0)

    def _refuse(self, now: float, transfer: Transfer[Endpoint], link: Link) -> None:
        """Ends a transfer that decode will not read, and tells decode to end the request now, not at a
        deadline."""
        request, prompt = transfer.request, transfer.prompt
        self.decline(now, transfer.endpoint, request, prompt, transfer.secret, link.refused)
        self._close(transfer, TransferEnd.REFUSED, tell=False)

    def _beat(self, now: float, endpoint: Endpoint, message: Beat) -> None:
        alive = []
        entries = {number: (chunks, layers) for number, chunks, layers in message.entries}
        for number, (chunks, layers) in entries.items():  # one answer per transfer
            transfer = self._at(endpoint, number)
            if transfer is None:
                if number not in self._finished:
                    self._send(endpoint, Closed(self.hello.session, number, "unknown", False))
                continue
            transfer.lease_end = now + self.hello.lease_s
            transfer.bound = message.session
            alive.append(number)
            known = (chunks, layers)
            have = (len(transfer.chunks), transfer.chunks[-1].layers if transfer.chunks else 0)
            if known != have or transfer.complete:
                self._publish(now, transfer, max(0, min(chunks, len(transfer.chunks)) - 1))
        for part in parts(alive) if alive else [()]:
            self._send(endpoint, BeatAck(self.hello.session, part))

    def _finish(self, endpoint: Endpoint, message: Finish) -> None:
        transfer = self._at(endpoint, message.transfer)
        session = self.hello.session
        if transfer is not None and self._all_published(transfer):
            self._finished[transfer.number] = None
            while len(self._finished) > FINISHED_KEPT:
                self._finished.popitem(last=False)
            self._close(transfer, TransferEnd.FINISHED, tell=False)
        if message.transfer in self._finished:
            self._send(endpoint, Finished(session, message.transfer))
        elif transfer is None:
            self._send(endpoint, Closed(session, message.transfer, "expired", False))

    def _all_published(self, transfer: Transfer[Endpoint]) -> bool:
        layers = self._num_layers
        return transfer.complete and all(chunk.layers == layers for chunk in transfer.chunks)

    # -------------------------------------------------------------------------------------------- the clock

    def tick(self, now: float) -> None:
        """Ends expired leases and repeats unanswered introductions."""
        for transfer in [t for t in self._transfers.values() if now >= t.lease_end]:
            self._close(transfer, TransferEnd.EXPIRED, "lease expired")
        for endpoint in {t.endpoint for t in self._transfers.values()}:
            link = self._link(endpoint)
            if not link.peer:
                self._introduce(now, endpoint, link)
        if self.hello.progress:
            self._end_unanswered(now)
        for transfer in [t for t in self._transfers.values() if not t.bound]:
            if now - transfer.said_at >= REPEAT_S:
                self._publish(now, transfer, 0)

    def _end_unanswered(self, now: float) -> None:
        """Ends transfers to decode ranks that never answered: with shared layer buffers the whole engine
        would wait for them until the lease ends."""
        for transfer in list(self._transfers.values()):
            link = self._link(transfer.endpoint)
            if link.peer or link.asked_at is None:
                continue
            opened_at = transfer.lease_end - self.hello.lease_s  # no heartbeat has extended it
            known_silent = opened_at - link.asked_at >= UNANSWERED_S
            if now - opened_at >= (HELLO_RETRY_S if known_silent else UNANSWERED_S):
                self._close(transfer, TransferEnd.UNREACHABLE, tell=False)

    def forget_idle(self, now: float, after_s: float) -> list[Endpoint]:
        """Forgets endpoints without transfers that have been silent for `after_s`; returns them."""
        idle = [endpoint for endpoint, link in self._idle() if now - link.used_at >= after_s]
        for endpoint in idle:
            del self._links[endpoint]
        return idle

    def forget_one(self, now: float, among: Container[Endpoint], after_s: float) -> Endpoint | None:
        """Forgets one such endpoint: the oldest that never answered, otherwise one that was silent for
        `after_s`, so that the last message to it has arrived."""
        idle = [(bool(link.peer), link.used_at, end) for end, link in self._idle() if end in among]
        found = [item for item in idle if not item[0] or now - item[1] >= after_s]
        if not found:
            return None
        endpoint = min(found, key=lambda item: item[:2])[2]
        del self._links[endpoint]
        return endpoint

    def _idle(self) -> list[tuple[Endpoint, Link]]:
        """Endpoints without a transfer."""
        needed = {transfer.endpoint for transfer in self._transfers.values()}
        return [(endpoint, link) for endpoint, link in self._links.items() if endpoint not in needed]

    # ------------------------------------------------------------------------------------------------ helpers

    def _of(self, req_id: str) -> Transfer[Endpoint] | None:
        number = self._by_request.get(req_id)
        return None if number is None else self._transfers[number]

    def _at(self, endpoint: Endpoint, number: int) -> Transfer[Endpoint] | None:
        """Returns a transfer to the decode rank at an endpoint, including one opened under another of its
        names."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.endpoint == endpoint:
            return transfer
        peers = [self._link(one).peer for one in (endpoint, transfer.endpoint)]
        return transfer if peers[0] and peers[0] == peers[1] else None

    def _close(
        self,
        transfer: Transfer[Endpoint],
        end: TransferEnd,
        reason: str = "",
        retry: bool = False,
        tell: bool = True,
    ) -> None:
        self.counts.closed[end] += 1
        del self._transfers[transfer.number]
        del self._by_request[transfer.req_id]
        if transfer.req_id in self._owed:
            self._free.add(transfer.req_id)
        if tell:
            closed = Closed(self.hello.session, transfer.number, printable(reason), retry)
            self._send(transfer.endpoint, closed)

    def _publish(self, now: float, transfer: Transfer[Endpoint], first: int) -> None:
        link = self._link(transfer.endpoint)
        link.used_at = now
        if link.refused and now - link.hello_at >= REFUSED_S:
            link.peer = link.refused = ""
        if not link.peer:
            self._introduce(now, transfer.endpoint, link)
            return  # everything is sent once decode has answered
        if link.refused:
            self._refuse(now, transfer, link)
            return
        transfer.said_at = now
        chunks = tuple(transfer.chunks[first:])
        self._send(
            transfer.endpoint,
            Publish(
                self.hello.session,
                transfer.number,
                transfer.request,
                transfer.prompt,
                transfer.num_blocks,
                first,
                chunks,
                transfer.complete,
            ),
        )

    def _introduce(self, now: float, endpoint: Endpoint, link: Link, wait_s: float = HELLO_RETRY_S) -> None:
        """Sends `Hello` again, each time with the next secret from the endpoint's requests: some may date
        from an earlier run of decode."""
        if now - link.hello_at < wait_s:
            return
        secrets = sorted({t.secret for t in self._transfers.values() if t.endpoint == endpoint})
        later = [secret for secret in secrets if secret > link.secret]
        self._say_hello(now, endpoint, link, (later or secrets or [link.secret])[0])

    def _say_hello(self, now: float, endpoint: Endpoint, link: Link, secret: str) -> None:
        if now - link.hello_at < HELLO_AGAIN_S and secret == link.secret:
            return
        link.hello_at, link.secret = now, secret
        if link.asked_at is None:
            link.asked_at = now
        self._send(endpoint, msgspec.structs.replace(self.hello, secret=secret))

    def _link(self, endpoint: Endpoint) -> Link:
        return self._links.setdefault(endpoint, Link())

    def _send(self, endpoint: Endpoint, message: ToDecode) -> None:
        self.outbox.append((endpoint, message))


def is_unread(transfer: Transfer[Endpoint], layer: int) -> bool:
    """Whether decode may still read a layer of any published chunk."""
    chunks, layers = transfer.read
    return any(
        chunk.layers > layer and bool(chunk.blocks)
        for number, chunk in enumerate(transfer.chunks[chunks:], chunks)
        if number > chunks or layer >= layers
    )


def replace_layers(chunk: Chunk, layers: int) -> Chunk:
    """Returns the chunk with more layers published."""
    return Chunk(chunk.start, chunk.blocks, layers)
