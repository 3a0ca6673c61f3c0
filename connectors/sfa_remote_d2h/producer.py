"""Prefill's side of the protocol, for one rank: transfers, leases, and when blocks are free. Pure.

Nothing here waits, sends or knows a clock: every call gets the time, in seconds, and what is to be sent is
collected in `outbox`. A transfer is `open` from the step that first computes for its request until it is
finished by decode, cancelled by decode, dropped by the engine (abort, preemption), or its lease ends. Then
it is closed for good: whatever is said about it later gets `Closed` as an answer, except that a transfer
which was finished stays so for a while, in case the answer got lost.
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
"""Least time between two introductions to an endpoint, even if it asks for more of them."""

UNANSWERED_S = 2.0
"""How long buffers that layers share wait for the first answer of a decode rank."""

SILENT_S = 5.0
"""Time without an answer to an introduction after which an endpoint is logged."""

REFUSED_S = 5.0
"""How long a decode rank that refused this engine is not asked again; it may be replaced by another."""

REPEAT_S = 1.0
"""Between repeats of a `Publish` that no heartbeat has answered yet."""


@dataclass
class Transfer(Generic[Endpoint]):
    """One open transfer. `bound`: decode's session that has sent a heartbeat for it, "" before that. `read`:
    chunks that decode has read, and layers of the next one. `secret`: came with the request's rendezvous."""

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
    """What is known of the decode rank at an endpoint. `peer`: its session, "" while unknown.

    secret: what the last `Hello` had, shown to the present `peer` if there is one. asked_at: when the first
    `Hello` went out that has no answer, None while there is none. again: decode asked for a `Hello`, so that
    what it was told is lost.
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
        num_layers: layers that are published of every chunk, in order.
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
        self._owed: set[str] = set()  # requests whose blocks the engine will keep until they are reported
        self._free: set[str] = set()  # of these, the ones that nobody needs any more

    @property
    def open_requests(self) -> set[str]:
        """Requests with an open transfer."""
        return set(self._by_request)

    @property
    def links(self) -> dict[Endpoint, Link]:
        """Endpoints that were talked to."""
        return self._links

    # ------------------------------------------------------------------------------- what the engine does

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
        """Begins a transfer; one that the request already has is dropped, since its blocks are others.

        secret: of the decode engine that waits for the request. If the endpoint was last shown another one,
        this rank introduces itself again: decode may have restarted.
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
            # What is known of the endpoint stays: a request may bring any secret, and costs others nothing.
            # Only a refusal was of an engine with another secret.
            if link.refused:
                link.peer = link.refused = ""
            self._say_hello(now, endpoint, link, secret)
        self._publish(now, transfer, 0)

    def begin_chunk(self, req_id: str, start: int, blocks: Iterable[int], final: bool) -> None:
        """A step starts to compute these blocks. Unknown requests are ignored, as everywhere here."""
        transfer = self._of(req_id)
        chunk = Chunk(start, tuple(blocks), 0)
        if transfer is not None and not transfer.complete and (chunk.blocks or final):
            transfer.chunks.append(chunk)
            transfer.complete = final

    def publish(self, now: float, req_ids: Iterable[str], layers: int) -> None:
        """The first `layers` layers of these requests' last chunk are computed."""
        for req_id in req_ids:
            transfer = self._of(req_id)
            if transfer is None or not transfer.chunks or transfer.chunks[-1].layers >= layers:
                continue
            transfer.chunks[-1] = replace_layers(transfer.chunks[-1], min(layers, self._num_layers))
            self._publish(now, transfer, len(transfer.chunks) - 1)

    def drop(self, req_id: str, reason: str, retry: bool = False) -> None:
        """The engine takes the request's blocks back now: aborted, or preempted and to be computed again."""
        transfer = self._of(req_id)
        if transfer is not None:
            end = TransferEnd.PREEMPTED if retry else TransferEnd.ABORTED
            self._close(transfer, end, reason, retry)

    def unread(self, layer: int, req_ids: Iterable[str]) -> list[str]:
        """Those of the requests of which decode may still read this layer (the n-th of all, from 0)."""
        transfers = [(req_id, self._of(req_id)) for req_id in req_ids]
        return [req_id for req_id, transfer in transfers if transfer and is_unread(transfer, layer)]

    def decline(
        self, now: float, endpoint: Endpoint, request: str, prompt: bytes, secret: str, reason: str
    ) -> None:
        """Tells a decode rank that no transfer of a request will come from here."""
        self._link(endpoint).used_at = now
        name, session = wire_name(request), self.hello.session
        message = Declined(session, secret, name, prompt, printable(reason), self.hello.digest)
        self._send(endpoint, message)

    def fail_endpoint(self, endpoint: Endpoint) -> None:
        """No connection to an endpoint can be made: its transfers end."""
        for transfer in [t for t in self._transfers.values() if t.endpoint == endpoint]:
            self._close(transfer, TransferEnd.UNREACHABLE, tell=False)
        self._links.pop(endpoint, None)

    def refused(self, now: float, endpoint: Endpoint, reason: str) -> None:
        """The decode rank at an endpoint speaks another version."""
        link = self._link(endpoint)
        self._answered(now, endpoint, link, Refused(link.peer or "unknown", self.hello.session, reason))

    def silent(self, now: float) -> list[Endpoint]:
        """Endpoints with transfers that have not answered an introduction for long."""
        needed = {transfer.endpoint for transfer in self._transfers.values()}
        links = [(end, link) for end, link in self._links.items() if end in needed and not link.peer]
        return [end for end, link in links if link.asked_at is not None and now - link.asked_at >= SILENT_S]

    def engine_finished(self, req_id: str) -> None:
        """The engine is done with the request and keeps its blocks until `take_free` names it."""
        self._owed.add(req_id)
        if req_id not in self._by_request:
            self._free.add(req_id)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` has something to tell."""
        return bool(self._free)

    @property
    def keeps(self) -> bool:
        """Whether requests that are done are kept, and none is free yet."""
        return bool(self._owed) and not self._free

    def take_free(self) -> set[str]:
        """Requests whose blocks the engine may free; each is named once."""
        free, self._free = self._free, set()
        self._owed -= free
        return free

    def metrics(self) -> dict[str, int]:
        """By key of `metrics.PREFILL`."""
        gauges = {"open_transfers": len(self._transfers), "kept_requests": len(self._owed)}
        return {**gauges, "peer_ranks": len(self._links), **self.counts.values()}

    # ----------------------------------------------------------------------------------- what decode says

    def receive(self, now: float, endpoint: Endpoint, message: ToPrefill) -> None:
        """A message from the decode rank at an endpoint."""
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
            self._introduce(now, endpoint, link)  # it restarted, or its answer to Hello got lost
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
        """Decode will not read a transfer: it is told to end the request now, not at a deadline."""
        request, prompt = transfer.request, transfer.prompt
        self.decline(now, transfer.endpoint, request, prompt, transfer.secret, link.refused)
        self._close(transfer, TransferEnd.REFUSED, tell=False)

    def _beat(self, now: float, endpoint: Endpoint, message: Beat) -> None:
        alive = []
        entries = {number: (chunks, layers) for number, chunks, layers in message.entries}
        for number, (chunks, layers) in entries.items():  # a transfer is told once, however often it is named
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
        """Ends leases, and introduces this rank where that is not done yet."""
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
        """Ends transfers to decode ranks that have never answered: where layers share buffers, the whole engine
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
        """Forgets endpoints that no transfer needs and that said nothing for so long; returns them."""
        idle = [endpoint for endpoint, link in self._idle() if now - link.used_at >= after_s]
        for endpoint in idle:
            del self._links[endpoint]
        return idle

    def forget_one(self, now: float, among: Container[Endpoint], after_s: float) -> Endpoint | None:
        """Forgets one such endpoint: the oldest of those that never answered, or else one that was silent for
        so long: what was last said to a decode rank must have arrived."""
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

    # ------------------------------------------------------------------------------------------------ parts

    def _of(self, req_id: str) -> Transfer[Endpoint] | None:
        number = self._by_request.get(req_id)
        return None if number is None else self._transfers[number]

    def _at(self, endpoint: Endpoint, number: int) -> Transfer[Endpoint] | None:
        """A transfer to the decode rank at an endpoint, also one that was opened under another name of it."""
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
            return  # all of it is said once decode has answered
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
        """Says `Hello` again, each time with the next of the secrets that the endpoint's requests brought:
        requests of an earlier start of decode may still be among them."""
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
    """Whether decode may still read a layer of any chunk that was published."""
    chunks, layers = transfer.read
    return any(
        chunk.layers > layer and bool(chunk.blocks)
        for number, chunk in enumerate(transfer.chunks[chunks:], chunks)
        if number > chunks or layer >= layers
    )


def replace_layers(chunk: Chunk, layers: int) -> Chunk:
    """The chunk with more layers."""
    return Chunk(chunk.start, chunk.blocks, layers)
