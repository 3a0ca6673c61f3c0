"""State of the requests that a decode rank receives: orders, phases, transfers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from vllm_kvoffload.connectors.sfa_remote_d2h.ports import owner
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Chunk, Hello, Publish
from vllm_kvoffload.metrics.fields import ReceiveFailure


@dataclass(frozen=True)
class Receive:
    """A request to be received. blocks: ids of all its blocks; the first `first` already have their KV."""

    req_id: str
    request: str
    prompt: bytes
    blocks: tuple[int, ...]
    first: int

    @property
    def wanted(self) -> tuple[int, ...]:
        """The blocks to read."""
        return self.blocks[self.first :]


@dataclass(frozen=True)
class ReadOrder:
    """A read to perform: `layers` of some blocks, as pairs of (block here, block on prefill)."""

    number: int
    session: str
    req_id: str
    layers: range
    main: tuple[tuple[int, int], ...]
    indexer: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Outcome:
    """End of a receive. `failed_blocks`: blocks that must not be attended to; empty on success.

    failure: kind of failure, None on success. prefill_layout: digest of the mismatching prefill, "" for
    other failures.
    """

    req_id: str
    reason: str
    failed_blocks: tuple[int, ...]
    failure: ReceiveFailure | None = None
    prefill_layout: str = ""


@dataclass(frozen=True)
class Failure:
    """Why a request was not received, as reported to the engine and the proxy.

    reason: one sentence. failure: a value of `ReceiveFailure`. prefill_layout: as in `Outcome`.
    """

    reason: str
    failure: str
    prefill_layout: str = ""


class ReceivePhase(str, Enum):
    """ReceivePhase of a request."""

    WAITING = "waiting"
    READING = "reading"
    ENDING = "ending"


@dataclass
class Peer:
    """A prefill session that was admitted.

    ratio: prefill ranks per decode rank. member: index of this one among them.
    """

    hello: Hello
    member: int
    ratio: int
    heard_at: float

    def shares(
        self, pairs: Sequence[tuple[int, int, int]], tp_size: int, tp_rank: int
    ) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Selects the main KV and indexer KV that a decode rank reads from this peer, out of `Pull.pairs`.

        Main blocks are divided among decode's ranks, which share a host pool, and come from member 0.
        Indexer blocks are needed by every decode rank, and divided among the prefill ranks that serve it.
        """
        main: list[tuple[int, int]] = []
        if self.member == 0:
            main = [(a, b) for n, a, b in pairs if owner(n, tp_size) == tp_rank]
        indexer = [(a, b) for n, a, b in pairs if owner(n, self.ratio) == self.member]
        return tuple(main), tuple(indexer)


@dataclass(eq=False)
class Pull:
    """Decode's view of one transfer.

    read_chunks, read_layers: chunks read completely, layers read of the next one. progress_sent: the
    progress last reported to prefill.
    """

    session: str
    publish: Publish
    heard_at: float
    since: float
    chunks: list[Chunk] = field(default_factory=list)
    complete: bool = False
    read_chunks: int = 0
    read_layers: int = 0
    progress_sent: tuple[int, int] = (0, 0)
    reading: int | None = None
    reading_to: tuple[int, int] = (0, 0)
    finish_at: float | None = None
    finished: bool = False
    errors: int = 0
    taken: set[int] = field(default_factory=set)
    end: int = 0

    def take(self, message: Publish, blocks_there: int, num_layers: int) -> str:
        """Adds the chunks of a `Publish`. Returns how they contradict earlier ones, or "".

        blocks_there: number of blocks on prefill. A contradicting chunk is not kept: blocks beyond
        the prompt or prefill's cache, or twice; chunks out of order, changed, or after the last.
        """
        same = (message.request, message.prompt, message.num_blocks)
        if same != (self.publish.request, self.publish.prompt, self.publish.num_blocks):
            return "another request under the same transfer"
        if message.first > len(self.chunks):
            return ""  # chunks in between were lost: a heartbeat asks for them
        for index, chunk in enumerate(message.chunks, message.first):
            reason = self._take_chunk(index, chunk, blocks_there, num_layers)
            if reason:
                return reason
        all_of_it = message.first + len(message.chunks) == len(self.chunks)
        self.complete |= message.complete and all_of_it
        return ""

    def _take_chunk(self, index: int, chunk: Chunk, blocks_there: int, num_layers: int) -> str:
        if chunk.layers > num_layers:
            return f"{chunk.layers} of {num_layers} layers"
        if index == len(self.chunks):
            reason = self._contradiction(index, chunk, blocks_there)
            if not reason:
                self.chunks.append(chunk)
                self.taken.update(chunk.blocks)
                self.end = chunk.start + len(chunk.blocks)
            return reason
        known = self.chunks[index]
        if (chunk.start, chunk.blocks) != (known.start, known.blocks):
            return f"chunk {index} changed"
        if chunk.layers > known.layers:
            self.chunks[index] = chunk
        return ""

    def _contradiction(self, index: int, chunk: Chunk, blocks_there: int) -> str:
        """Returns why a chunk cannot follow the known ones, "" if it can."""
        end, taken = chunk.start + len(chunk.blocks), set(chunk.blocks)
        if self.complete or (self.chunks and not self.chunks[-1].blocks):
            return f"chunk {index} after the last"
        if chunk.start < self.end or end > self.publish.num_blocks:
            return f"blocks {chunk.start} to {end}, of {self.publish.num_blocks} and after {self.end}"
        if len(taken) < len(chunk.blocks) or not self.taken.isdisjoint(taken):
            return f"chunk {index} has a block twice"
        if taken and max(taken) >= blocks_there:
            return f"block {max(taken)} of {blocks_there}"
        return ""

    def unfit(self, order: Receive) -> str:
        """Returns why the transfer does not match a request of the same id, "" if it does."""
        if self.publish.prompt != order.prompt:
            return "another prompt"
        if self.publish.num_blocks != len(order.blocks):
            return f"{self.publish.num_blocks} blocks published, {len(order.blocks)} expected"
        return ""

    def pairs(self, order: Receive, chunk: Chunk) -> list[tuple[int, int, int]]:
        """Returns (block number in the request, block here, block on prefill) of the wanted blocks of a
        chunk."""
        numbered = enumerate(chunk.blocks, chunk.start)
        return [
            (number, order.blocks[number], theirs) for number, theirs in numbered if number >= order.first
        ]

    def covers(self, order: Receive) -> bool:
        """Whether the chunks contain every wanted block."""
        have = {n for chunk in self.chunks for n in range(chunk.start, chunk.start + len(chunk.blocks))}
        return have >= set(range(order.first, len(order.blocks)))

    def known(self, num_layers: int) -> tuple[int, int]:
        """Number of chunks known up to the first incomplete one, and the layers known of that one."""
        for index, chunk in enumerate(self.chunks):
            if chunk.layers < num_layers:
                return index + 1, chunk.layers
        return len(self.chunks), num_layers if self.chunks else 0

    @property
    def key(self) -> tuple[str, int]:
        """Session and transfer number."""
        return self.session, self.publish.transfer


@dataclass(eq=False)
class Pending:
    """A receive that has not ended.

    reason, failure: why its last attempt failed, if `reason` is not empty. prefill_layout: as in
    `Outcome`.
    """

    order: Receive
    since: float
    deadline: float
    overall_deadline: float
    phase: ReceivePhase = ReceivePhase.WAITING
    pulls: dict[int, Pull] = field(default_factory=dict)
    attempts: int = 0
    reason: str = ""
    failure: ReceiveFailure = ReceiveFailure.DEADLINE
    prefill_layout: str = ""


def describe(pending: Pending) -> str:
    """Describes the progress of a request, for messages."""
    pulls = [
        f"transfer {pull.publish.transfer}: {pull.read_chunks} of {len(pull.chunks)} chunks and "
        f"{pull.read_layers} layers read, {'all' if pull.complete else 'not all'} published, "
        f"{'reading' if pull.reading is not None else 'not reading'}"
        for pull in pending.pulls.values()
    ]
    failed = f", before: {pending.reason}" if pending.reason else ""
    return "; ".join([f"{pending.phase.value}, attempt {pending.attempts}{failed}", *pulls])
