"""What a decode rank knows of the requests it receives: orders, phases, transfers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from vllm_kvoffload.connectors.sfa_remote_d2h.wire import Chunk, Hello, Publish
from vllm_kvoffload.metrics.fields import ReceiveFailure


@dataclass(frozen=True)
class Receive:
    """A request to be received. blocks: ids of all its blocks here; the first `first` have their KV."""

    req_id: str
    request: str
    prompt: bytes
    blocks: tuple[int, ...]
    first: int

    @property
    def wanted(self) -> tuple[int, ...]:
        """Blocks that are to be read."""
        return self.blocks[self.first :]


@dataclass(frozen=True)
class ReadOrder:
    """A read to be made: `layers` of some blocks, pairs of (block here, block on prefill)."""

    number: int
    session: str
    req_id: str
    layers: range
    main: tuple[tuple[int, int], ...]
    indexer: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Outcome:
    """End of a request here. `failed_blocks`: what must not be attended to, empty when all went well."""

    req_id: str
    reason: str
    failed_blocks: tuple[int, ...]


class Phase(str, Enum):
    """Of a request."""

    WAITING = "waiting"
    READING = "reading"
    ENDING = "ending"


@dataclass
class Peer:
    """A prefill session that introduced itself."""

    hello: Hello
    member: int
    ratio: int
    heard_at: float


@dataclass(eq=False)
class Pull:
    """One transfer as decode sees it.

    read_chunks, read_layers: chunks read, layers of the next one. told: what prefill was told of that.
    """

    session: str
    publish: Publish
    heard_at: float
    since: float
    chunks: list[Chunk] = field(default_factory=list)
    complete: bool = False
    read_chunks: int = 0
    read_layers: int = 0
    told: tuple[int, int] = (0, 0)
    reading: int | None = None
    reading_to: tuple[int, int] = (0, 0)
    finish_at: float | None = None
    finished: bool = False
    errors: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """Session and number."""
        return self.session, self.publish.transfer


@dataclass(eq=False)
class Pending:
    """A request that has not ended here.

    reason, failure: why its last attempt was lost, where `reason` is not empty.
    """

    order: Receive
    since: float
    deadline: float
    overall_deadline: float
    phase: Phase = Phase.WAITING
    pulls: dict[int, Pull] = field(default_factory=dict)
    attempts: int = 0
    reason: str = ""
    failure: ReceiveFailure = ReceiveFailure.DEADLINE


def describe(pending: Pending) -> str:
    """How far a request is, for messages."""
    pulls = [
        f"transfer {pull.publish.transfer}: {pull.read_chunks} of {len(pull.chunks)} chunks and "
        f"{pull.read_layers} layers read, {'all' if pull.complete else 'not all'} published, "
        f"{'reading' if pull.reading is not None else 'not reading'}"
        for pull in pending.pulls.values()
    ]
    lost = f", before: {pending.reason}" if pending.reason else ""
    return "; ".join([f"{pending.phase.value}, attempt {pending.attempts}{lost}", *pulls])
