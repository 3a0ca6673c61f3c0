"""A prefill and a decode engine as far as the protocol sees them, with a network that loses, repeats and
reorders messages. Memory is modelled: a block holds which block of which prompt it is, or POISON once freed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_kvoffload.connectors.sfa_remote_d2h.consumer import Consumer
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Outcome, ReadOrder, Receive, ReceivePhase
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import Producer
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import (
    Hello,
    ToDecode,
    decode_to_decode,
    decode_to_prefill,
    encode,
    prompt_digest,
)
from vllm_kvoffload.metrics import DECODE, PREFILL
from vllm_kvoffload.settings.remote_d2h import RemoteD2HLimits

LAYERS = 2
POISON = ("poison",)
WORKERS = {"frames_refused", "control_errors"}
LIMITS = RemoteD2HLimits(lease_s=10.0, request_s=200.0)
POOL = 40
FACTS = {"dtype": "bfloat16", "block_size": "16"}


@dataclass
class Job:
    """A prompt being prefilled."""

    req_id: str
    request: str
    prompt: int
    num_blocks: int
    first: int
    open: bool = False
    blocks: list[int] = field(default_factory=list)
    step: tuple[int, int] | None = None  # blocks [begin, end) of the running step
    layer: int = 0
    complete: bool = False
    held: bool = False
    freed: int = 0
    secret: str = ""


@dataclass
class Wanted:
    """A request on decode."""

    req_id: str
    request: str
    prompt: int
    first: int
    blocks: list[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class World:
    """Both engines, their ranks and the network between them."""

    def __init__(self, prefill_tp: int, decode_tp: int, shared: bool = False) -> None:
        self.shared = shared  # all layers of prefill use the same memory, one after the other
        self.prefill_tp, self.decode_tp = prefill_tp, decode_tp
        self.ratio = prefill_tp // decode_tp
        self.now = 0.0
        self.starts = 0
        self.requests = 0
        self.names: list[str] = []
        self.network: list[tuple[str, int, int, bytes]] = []  # direction, prefill rank, decode rank, frame
        self.completed: list[str] = []
        self.failed: dict[str, str] = {}
        self.unreadable = 0  # peers that decode will fail to meet
        self.start_prefill_engine()
        self.start_decode_engine()

    # ------------------------------------------------------------------------------------------- engines

    def start_prefill_engine(self) -> None:
        self.starts += 1
        self.jobs: dict[str, Job] = {}
        self.free = list(range(POOL))
        self.memory: dict[tuple[int, int, int], tuple] = {}
        self.sessions = [f"p{self.starts}.{rank}" for rank in range(self.prefill_tp)]
        self.producers = [
            Producer(
                Hello(
                    s,
                    f"engine{self.starts}",
                    self.prefill_tp,
                    rank,
                    digest_of(FACTS),
                    POOL,
                    (),
                    b"",
                    LIMITS.lease_s,
                    self.shared,
                    "",
                    FACTS,
                ),
                LAYERS,
            )
            for rank, s in enumerate(self.sessions)
        ]

    def start_decode_engine(self) -> None:
        self.starts += 1
        self.wanted: dict[str, Wanted] = {}
        self.decode_free = list(range(POOL))
        self.main: dict[tuple[int, int], tuple] = {}
        self.indexer: dict[tuple[int, int, int], tuple] = {}
        self.reads: list[tuple[int, ReadOrder]] = []
        self.consumers = [
            Consumer(f"d{self.starts}.{rank}", FACTS, LAYERS, self.decode_tp, rank, LIMITS)
            for rank in range(self.decode_tp)
        ]
        self.secret = f"secret{self.starts}"
        for consumer in self.consumers:
            consumer.use_secret(self.secret)
        self.told = [0] * self.decode_tp  # requests that each rank reported

    def pump(self) -> None:
        """Collects the state machines' output: messages to the network, orders, outcomes."""
        for rank, producer in enumerate(self.producers):
            for endpoint, message in producer.outbox:
                self.network.append(("d", rank, endpoint, encode(message)))
            producer.outbox.clear()
        for rank, consumer in enumerate(self.consumers):
            self.meet(consumer)
            for session, message in consumer.outbox:
                if session in self.sessions:
                    self.network.append(("p", self.sessions.index(session), rank, encode(message)))
            consumer.outbox.clear()
            self.reads += [(rank, order) for order in consumer.orders]
            consumer.orders.clear()
            for order in self.reads:
                self.check_order(*order)
            for outcome in consumer.take_outcomes():
                self.outcome(rank, outcome)
        self.collect_freed()
        self.check_counts()

    def meet(self, consumer: Consumer) -> None:
        """Plays the worker's part: a session becomes a peer once its memory is readable."""
        hellos, consumer.to_meet = consumer.to_meet, []
        for hello in hellos:
            assert hello.secret == self.secret, "a stranger's memory is parsed"
            if self.unreadable:
                self.unreadable -= 1
                consumer.refuse(hello, "decode can't read prefill's memory")
            else:
                consumer.admit(self.now, hello)

    def check_counts(self) -> None:
        """Nothing is counted twice, or not at all."""
        for consumer, told in zip(self.consumers, self.told, strict=True):
            counts, live = consumer.counts, len(consumer.live)
            assert counts.started == counts.done + counts.failed.total() + live
            assert counts.done + counts.failed.total() == told
            values = consumer.metrics()
            assert values.keys() | WORKERS | {"pulled_bytes", "unauthenticated_closed"} == DECODE.index.keys()
            assert sum(values[f"receives.{phase.value}"] for phase in ReceivePhase) == live
        for producer in self.producers:
            values = producer.metrics()
            assert values.keys() | WORKERS == PREFILL.index.keys()
            closed = sum(value for key, value in values.items() if key.startswith("transfers_closed."))
            assert values["transfers_opened"] == closed + values["open_transfers"]

    def check_order(self, rank: int, order: ReadOrder) -> None:
        """A read must go into blocks of its own request, which is not over on this rank."""
        wanted = self.wanted[order.req_id]
        assert rank not in wanted.outcomes
        blocks = set(wanted.blocks[wanted.first :])
        assert {ours for ours, _ in (*order.main, *order.indexer)} <= blocks

    def outcome(self, rank: int, outcome: Outcome) -> None:
        wanted = self.wanted[outcome.req_id]
        assert rank not in wanted.outcomes, "reported twice"
        assert not any(r == rank and order.req_id == outcome.req_id for r, order in self.reads)
        wanted.outcomes[rank] = outcome
        self.told[rank] += 1
        assert outcome.failed_blocks == (tuple(wanted.blocks[wanted.first :]) if outcome.reason else ())
        assert (outcome.failure is None) == (not outcome.reason)
        if len(wanted.outcomes) < self.decode_tp:
            return
        reasons = [o.reason for o in wanted.outcomes.values() if o.reason]
        if reasons:
            self.failed[wanted.req_id] = reasons[0]
        else:
            self.check_received(wanted)
            self.completed.append(wanted.req_id)
        del self.wanted[wanted.req_id]
        self.decode_free += wanted.blocks

    def check_received(self, wanted: Wanted) -> None:
        for number in range(wanted.first, len(wanted.blocks)):
            block = wanted.blocks[number]
            for layer in range(LAYERS):
                right = (wanted.prompt, number, layer)
                assert self.main.get((layer, block)) == right
                for rank in range(self.decode_tp):
                    assert self.indexer.get((rank, layer, block)) == right

    def collect_freed(self) -> None:
        freed = [producer.take_free() for producer in self.producers]
        for req_id in set().union(*freed):
            job = self.jobs[req_id]
            assert job.held
            job.freed += sum(req_id in names for names in freed)
            if job.freed == self.prefill_tp:
                self.release(job)
                del self.jobs[req_id]

    def release(self, job: Job) -> None:
        for block in job.blocks:
            for rank in range(self.prefill_tp):
                for layer in range(LAYERS):
                    self.memory[rank, layer, block] = POISON
        self.free += job.blocks
        job.blocks = []

    # ------------------------------------------------------------------------------------------- actions

    def request(self, num_blocks: int, first: int, name: str | None = None) -> str | None:
        if len(self.decode_free) < num_blocks:
            return None
        self.requests += 1
        request = name or f"r{self.requests}"
        self.names.append(request)
        req_id = f"{request}-{self.requests}"
        blocks = [self.decode_free.pop(0) for _ in range(num_blocks)]
        wanted = self.wanted[req_id] = Wanted(req_id, request, self.requests, first, blocks)
        order = Receive(req_id, request, prompt_digest([wanted.prompt]), tuple(blocks), first)
        for consumer in self.consumers:
            consumer.expect(self.now, order)
        self.pump()
        return req_id

    def submit(self, wanted: Wanted) -> None:
        """The proxy hands the request to prefill."""
        job = Job(
            f"{wanted.req_id}-p{len(self.jobs)}-{self.requests}",
            wanted.request,
            wanted.prompt,
            0,
            wanted.first,
        )
        job.num_blocks, job.secret = len(wanted.blocks), self.secret
        self.jobs.setdefault(job.req_id, job)

    def step(self, job: Job, count: int) -> None:
        """Prefill's engine begins a step of a job, or computes the next layer of the step."""
        if job.complete:
            return
        if job.step is None:
            self.begin_step(job, count)
        else:
            self.compute_layer(job, *job.step)
        self.pump()

    def begin_step(self, job: Job, count: int) -> None:
        begin = len(job.blocks)
        end = min(begin + count, job.num_blocks)
        if len(self.free) < end - begin:
            return
        job.blocks += [self.free.pop(0) for _ in range(end - begin)]
        job.step, job.layer = (begin, end), 0
        prompt, start = prompt_digest([job.prompt]), max(begin, job.first)
        for rank, producer in enumerate(self.producers):
            if not job.open:
                producer.open(
                    self.now, job.req_id, job.request, rank // self.ratio, prompt, job.num_blocks, job.secret
                )
            producer.begin_chunk(job.req_id, start, job.blocks[start:end], end == job.num_blocks)
        job.open = True

    def may_overwrite(self, job: Job) -> bool:
        """Whether a job's next layer may use the memory of the one before it."""
        others = [layer for layer in range(LAYERS) if layer != job.layer]
        return not any(p.unread(layer, [job.req_id]) for p in self.producers for layer in others)

    def overwrite(self, job: Job) -> None:
        """The next layer's older rows are loaded, the other layers' are gone."""
        for number, block in enumerate(job.blocks):
            for rank in range(self.prefill_tp):
                for layer in range(LAYERS):
                    self.memory[rank, layer, block] = POISON
                self.memory[rank, job.layer, block] = (job.prompt, number, job.layer)

    def compute_layer(self, job: Job, begin: int, end: int) -> None:
        if self.shared:
            if not self.may_overwrite(job):
                return
            self.overwrite(job)
        for rank in range(self.prefill_tp):
            for number in range(begin, end):
                self.memory[rank, job.layer, job.blocks[number]] = (job.prompt, number, job.layer)
        job.layer += 1
        for producer in self.producers:
            producer.publish(self.now, [job.req_id], job.layer)
        if job.layer == LAYERS:
            job.step = None
        if job.layer == LAYERS and end == job.num_blocks:
            job.complete = job.held = True
            for producer in self.producers:
                producer.engine_finished(job.req_id)

    def preempt(self, job: Job) -> None:
        if job.complete or not job.open:
            return
        for producer in self.producers:
            producer.drop(job.req_id, "preempted", retry=True)
        self.release(job)
        job.open, job.step = False, None
        self.pump()

    def abort_prefill(self, job: Job) -> None:
        if job.complete:
            return
        for producer in self.producers:
            producer.drop(job.req_id, "aborted")
        self.release(job)
        del self.jobs[job.req_id]
        self.pump()

    def abort(self, req_id: str) -> None:
        for consumer in self.consumers:
            consumer.cancel(req_id)
        self.pump()

    def finish_read(self, index: int, error: str = "") -> None:
        rank, order = self.reads.pop(index)
        if order.session not in self.sessions:
            error = error or "peer died"
        else:
            self.copy(rank, order)
        self.consumers[rank].read_done(self.now, order.number, error)
        self.pump()

    def copy(self, rank: int, order: ReadOrder) -> None:
        source = self.sessions.index(order.session)
        for layer in order.layers:
            for ours, theirs in order.main:
                self.main[layer, ours] = self.memory.get((source, layer, theirs), POISON)
            for ours, theirs in order.indexer:
                self.indexer[rank, layer, ours] = self.memory.get((source, layer, theirs), POISON)

    def deliver(self, index: int, keep: bool = False) -> None:
        direction, prefill, decode, frame = self.network[index] if keep else self.network.pop(index)
        if direction == "d":
            self.consumers[decode].receive(self.now, decode_to_decode(frame))
        else:
            self.producers[prefill].receive(self.now, decode, decode_to_prefill(frame))
        self.pump()

    def stranger(self, message: ToDecode, rank: int = 0) -> None:
        """A message of an engine that is none of ours."""
        self.consumers[rank].receive(self.now, decode_to_decode(encode(message)))
        self.pump()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for machine in (*self.producers, *self.consumers):
            machine.tick(self.now)
        self.pump()

    # ----------------------------------------------------------------------------------------------- rest

    def settle(self, seconds: float, work: bool = False) -> None:
        """Advances time over a perfect network; with `work`, prefill computes its outstanding requests."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(10_000):
                if self.network:
                    self.deliver(0)
                elif self.reads:
                    self.finish_read(0)
                else:
                    break
            for job in list(self.jobs.values()) if work else []:
                self.step(job, 4)
            self.advance(0.5)

    def check_nothing_left(self) -> None:
        assert not self.wanted
        assert not self.reads
        assert not [job for job in self.jobs.values() if job.held]
        assert len(self.decode_free) == POOL
        for consumer in self.consumers:
            assert not consumer.live
            assert not consumer._early
            assert not consumer._declines
            assert not consumer.to_meet
            assert not consumer._held
            assert not consumer._named
        for producer in self.producers:
            assert not producer.open_requests
            assert not producer._owed
            assert not producer._transfers

    @property
    def phases(self) -> list[ReceivePhase]:
        return [phase for consumer in self.consumers for phase in consumer.live.values()]
