r"""A small engine's scheduler: batches, block allocator with prefix cache, top-k choices.

:class:`Scheduler` makes :class:`StepPlan`\ s the way vLLM does, in everything the offload can notice: blocks
are published by content hash when a step is *scheduled*, so a request may hit a prefix that another one
computes in the same step; freed blocks are reused at once; request ids are reused; drafts are rejected and
their positions written again. A row's content says which token, after which prefix, in which layer it
belongs to. `manager_programs` runs the plans.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.geometry import Component, KVGeometry
from vllm_kvoffload.policies import POLICIES
from vllm_kvoffload.settings.offload import SparseOffloadConfig

Keys = npt.NDArray[np.int64]

ROW_WORDS = 3
ROW_BYTES = 8 * ROW_WORDS
UNWRITTEN = 0xA5
_MASK = (1 << 62) - 1


def mix(prefix: int, token: int) -> int:
    """Key of a token after a prefix (splitmix64's finaliser): equal for equal content, else not."""
    x = (prefix * 0x9E3779B97F4A7C15 + token + 1) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) & _MASK


def content(keys: Keys, positions: Keys, layer: int) -> torch.Tensor:
    """Main KV rows, int64 [T, ROW_WORDS], of tokens with these keys at these positions."""
    return torch.from_numpy(np.stack([keys, keys ^ ((layer + 1) * 0x5DEECE66D), positions * 1000 + layer], 1))


@dataclass(frozen=True)
class Setup:
    """Configuration of a program. pattern: F or S for each layer."""

    index_topk: int = 16
    ways: int = 16
    slots: int = 16
    policy: str = "rrip"
    delivery: str = "in_place"
    drafts: int = 0
    mtp_layers: int = 0
    pattern: str = "FSFSS"
    max_num_seqs: int = 3
    num_blocks: int = 40
    block_size: int = 4
    max_model_len: int = 96
    token_budget: int = 24
    prefill_buffers: int = 2
    reuse_newest: bool = True
    hold_ms: float = 0.0
    idle_rate: float = 0.05

    @property
    def geometry(self) -> KVGeometry:
        types = tuple("full" if kind == "F" else "shared" for kind in self.pattern)
        row = (Component("kv", ROW_BYTES),)
        return KVGeometry(
            "model",
            types,
            "test",
            self.index_topk,
            row,
            row,
            self.drafts,
            self.mtp_layers,  # type: ignore[arg-type]
        )

    @property
    def config(self) -> SparseOffloadConfig:
        return SparseOffloadConfig(
            enabled=True,
            topk_buffer_size=self.slots,
            ways=self.ways,
            policy=self.policy,
            delivery=self.delivery,
        )

    def host_layers(self) -> list[torch.Tensor]:
        shape = (self.num_blocks, self.block_size, ROW_BYTES)
        return [torch.full(shape, UNWRITTEN, dtype=torch.uint8) for _ in range(self.geometry.num_layers)]


@dataclass
class Request:
    """tokens: prompt and output so far; keys: of each token; computed: tokens whose KV exists."""

    req_id: str
    tokens: list[int]
    to_generate: int
    keys: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    drafts: list[int] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self.rekey(len(self.keys))

    def rekey(self, start: int) -> None:
        del self.keys[start:]
        for token in self.tokens[start:]:
            self.keys.append(mix(self.keys[-1] if self.keys else 0, token))

    def scheduled_keys(self, query_len: int) -> list[int]:
        """Keys of all positions that exist after a step with this many query tokens, drafts included."""
        keys = self.keys[: self.computed + query_len]
        for token in self.drafts[: self.computed + query_len - len(keys)]:
            keys.append(mix(keys[-1], token))
        return keys


class Blocks:
    """Reference-counted blocks; full ones can be found by the key of their last token. Block 0 is unused."""

    def __init__(self, num_blocks: int, reuse_newest: bool) -> None:
        self.free = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.by_key: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self._reuse_newest = reuse_newest

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken = [self.free.pop(-1 if self._reuse_newest else 0) for _ in range(count)]
        for block in taken:
            self.refs[block] = 1
            self.forget(block)
        return taken

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free.append(block)

    def publish(self, block: int, key: int) -> None:
        if block not in self.key_of and key not in self.by_key:
            self.by_key[key], self.key_of[block] = block, key

    def forget(self, block: int) -> None:
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.by_key[key]

    def hit(self, keys: list[int]) -> list[int]:
        """Takes the longest run of known blocks."""
        found: list[int] = []
        for key in keys:
            block = self.by_key.get(key)
            if block is None:
                break
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
            found.append(block)
        return found


@dataclass
class StepPlan:
    """One step, as pure data: what every rank is told, and what it must see.

    keys: int64 [N, longest]; topk: for each group int32 [T, K]; positions, query_keys: int64 [T].
    hold_s: how long attention uses a part. drafts: the draft passes that follow.
    """

    finished: list[str]
    preempted: list[str]
    req_ids: list[str]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    keys: Keys
    positions: Keys
    query_keys: Keys
    topk: list[torch.Tensor]
    hold_s: float
    drafts: list[StepPlan] = field(default_factory=list)

    def again(self) -> StepPlan:
        """The same step once more; what ended before it has been said."""
        return replace(self, finished=[], preempted=[])


@dataclass(frozen=True)
class Part:
    """A request's share of a pass. computed: tokens before it; keys: of all tokens after it."""

    req_id: str
    blocks: list[int]
    computed: int
    keys: list[int]

    @staticmethod
    def of(request: Request, count: int) -> Part:
        """Its next `count` tokens."""
        return Part(request.req_id, request.blocks, request.computed, request.scheduled_keys(count))


class Scheduler:
    """vLLM's scheduling, first come first served, in miniature. `log` counts what a program went through."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.blocks = Blocks(setup.num_blocks, setup.reuse_newest)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.idle: list[Request] = []  # sessions that wait for more input: not running, not finished
        self.finished: list[str] = []
        self.preempted: list[str] = []
        self.log: dict[str, int] = {}
        self._fresh_tokens = itertools.count(1000)
        self._written: set[int] = set()
        self._published: list[int] = []

    # ---------------------------------------------------------------------------------------- what users do

    @property
    def live(self) -> list[Request]:
        return self.waiting + self.running + self.idle

    def add(self, family: int, shared: int, own: int, to_generate: int) -> None:
        """A request whose first `shared` tokens are its family's; it gets the lowest free id."""
        taken = {request.req_id for request in self.live}
        req_id = next(name for name in map("r{}".format, itertools.count()) if name not in taken)
        tokens = [family * 100 + i for i in range(shared)] + [next(self._fresh_tokens) for _ in range(own)]
        request = Request(req_id, tokens[: self.setup.max_model_len - to_generate - 8], to_generate)
        request.rekey(0)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        self.count("aborted")
        self._end(request)

    def preempt(self, request: Request) -> None:
        """Frees a running request's blocks; it starts again, from the prefix cache or from scratch."""
        self.count("preempted")
        self.running.remove(request)
        self.waiting.insert(0, request)
        self.blocks.release(request.blocks)
        request.blocks, request.computed, request.drafts = [], 0, []
        self.preempted.append(request.req_id)

    def resume_session(self, request: Request, count: int) -> None:
        """More input for an idle session. Its last sampled token, never computed, is dropped as in vLLM."""
        self.count("resumed")
        self.idle.remove(request)
        del request.tokens[request.computed :]
        request.rekey(request.computed)
        count = min(count, self.setup.max_model_len - len(request.tokens) - request.to_generate - 8)
        if count < 1:
            self.waiting.append(request)
            self._end(request)
            return
        request.extend([next(self._fresh_tokens) for _ in range(count)])
        self.waiting.append(request)

    def forget_step(self, plan: StepPlan) -> None:
        """A failed step's requests are dropped, and what it was to publish with them."""
        for block in self._published:
            self.blocks.forget(block)
        for request in self.live:
            if request.req_id in plan.req_ids:
                self._end(request)

    # ------------------------------------------------------------------------------------------- scheduling

    def schedule(self) -> StepPlan | None:
        """The next step, None when there is nothing to run."""
        self._written.clear()
        self._published.clear()
        budget, scheduled, before = self.setup.token_budget, [], len(self.preempted)
        for request in list(self.running):
            if request not in self.running or not budget:
                continue
            request.drafts = self._draft(request)
            want = min(len(request.tokens) + len(request.drafts) - request.computed, budget)
            if want > 0 and self._allocate(request, want):
                scheduled.append((request, want))
                budget -= want
        if len(self.preempted) == before:
            self._admit(scheduled, budget)
        if not scheduled:
            return None
        self.rng.shuffle(scheduled)
        plan = self._plan([Part.of(request, count) for request, count in scheduled])
        plan.finished, self.finished = self.finished, []
        plan.preempted, self.preempted = self.preempted, []
        blocks = [list(request.blocks) for request, _ in scheduled]
        for request, count in scheduled:
            self._advance(request, count)
        if self.setup.mtp_layers:
            plan.drafts = self._draft_passes(plan, [request for request, _ in scheduled], blocks)
        return plan

    def _draft_passes(
        self, plan: StepPlan, requests: list[Request], blocks: list[list[int]]
    ) -> list[StepPlan]:
        """Draft 0 runs over the step's batch; each later one over the next token of every request.

        Rows that later passes write are never those that the next step writes at their positions.
        """
        passes = [replace(plan, finished=[], preempted=[], drafts=[])]
        keys = [request.keys[: request.computed] for request in requests]
        for _ in range(1, self.setup.drafts):
            for one in keys:
                one.append(mix(one[-1], next(self._fresh_tokens)))
            parts = zip(requests, blocks, keys, strict=True)
            passes.append(self._plan([Part(r.req_id, b, len(k) - 1, k.copy()) for r, b, k in parts]))
        return passes

    def schedule_or_fail(self) -> StepPlan:
        plan = self.schedule()
        assert plan is not None, "nothing to run"
        return plan

    def _draft(self, request: Request) -> list[int]:
        ready = request.computed == len(request.tokens) - 1 and len(request.tokens) > 1
        return [
            next(self._fresh_tokens) for _ in range(self.rng.randint(0, self.setup.drafts) if ready else 0)
        ]

    def _allocate(self, request: Request, count: int) -> bool:
        """Blocks for `count` more tokens, at the cost of the youngest requests. False: it was its own."""
        total = request.computed + count
        while (taken := self.blocks.allocate(self._missing_blocks(request, total))) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        request.blocks += taken
        self._publish(request, total)
        return True

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.setup.max_num_seqs:
            request = self.waiting[0]
            if not request.blocks:
                size = self.setup.block_size
                whole = (len(request.tokens) - 1) // size
                request.blocks = self.blocks.hit([request.keys[i * size + size - 1] for i in range(whole)])
                request.computed = len(request.blocks) * size
            count = min(len(request.tokens) - request.computed, budget)
            taken = self.blocks.allocate(self._missing_blocks(request, request.computed + count))
            if taken is None:
                if request in self.waiting and not self.running and not scheduled:
                    self._end(request)  # alone, and too big
                    continue
                self.blocks.release(request.blocks)
                request.blocks, request.computed = [], 0
                return
            if self._written.intersection(request.blocks):
                self.count("prefix_in_step")
            request.blocks += taken
            self._publish(request, request.computed + count)
            self.waiting.pop(0)
            self.running.append(request)
            scheduled.append((request, count))
            budget -= count

    def _missing_blocks(self, request: Request, total: int) -> int:
        """Blocks to allocate for this many tokens, plus positions that draft passes may write behind them."""
        ahead = self.setup.drafts if self.setup.mtp_layers else 0
        return max(self._blocks_for(total + ahead) - len(request.blocks), 0)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.setup.block_size)

    def _publish(self, request: Request, total: int) -> None:
        size = self.setup.block_size
        self._written.update(request.blocks[request.computed // size : self._blocks_for(total)])
        for i in range(request.computed // size, min(total, len(request.tokens)) // size):
            self.blocks.publish(request.blocks[i], request.keys[i * size + size - 1])
            self._published.append(request.blocks[i])

    def _advance(self, request: Request, count: int) -> None:
        """Simulates sampling: the number of accepted drafts, and whether the request is finished."""
        end = request.computed + count
        if end < len(request.tokens):
            request.computed = end
            return
        held = self.rng.randint(0, end - len(request.tokens))
        self.count("rejected", end - len(request.tokens) - held)
        request.extend([*request.drafts[:held], next(self._fresh_tokens)])
        request.computed = len(request.tokens) - 1
        request.to_generate -= held + 1
        request.drafts = []
        room = self.setup.max_model_len - len(request.tokens) - self.setup.drafts - 1
        if request.to_generate <= 0 or room <= 0:
            self.count("finished")
            self._end(request)
        elif self.rng.random() < self.setup.idle_rate:
            self.count("idle")
            self.running.remove(request)
            self.idle.append(request)

    def _end(self, request: Request) -> None:
        for queue in (self.waiting, self.running, self.idle):
            if request in queue:
                queue.remove(request)
        self.blocks.release(request.blocks)
        request.blocks = []
        self.finished.append(request.req_id)

    def count(self, what: str, by: int = 1) -> None:
        self.log[what] = self.log.get(what, 0) + by

    # -------------------------------------------------------------------------------------------- the step

    def _plan(self, parts: list[Part]) -> StepPlan:
        computed = np.array([part.computed for part in parts], dtype=np.int32)
        seq_lens = np.array([len(part.keys) for part in parts], dtype=np.int32)
        size = self.setup.block_size
        table = torch.zeros((len(parts), self._blocks_for(self.setup.max_model_len)), dtype=torch.int32)
        keys = np.zeros((len(parts), int(seq_lens.max())), dtype=np.int64)
        positions, query_keys, slots = [], [], []
        for n, part in enumerate(parts):
            table[n, : len(part.blocks)] = torch.tensor(part.blocks, dtype=torch.int32)
            keys[n, : seq_lens[n]] = part.keys
            where = np.arange(part.computed, seq_lens[n])
            positions.append(where)
            query_keys.append(keys[n, where])
            slots.append(np.array(part.blocks)[where // size] * size + where % size)
        flat = np.concatenate(positions)
        groups = len(self.setup.geometry.groups)
        return StepPlan(
            finished=[],
            preempted=[],
            req_ids=[part.req_id for part in parts],
            query_start_loc=np.concatenate([[0], np.cumsum(seq_lens - computed)]).astype(np.int32),
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=torch.from_numpy(np.concatenate(slots)),
            keys=keys,
            positions=flat,
            query_keys=np.concatenate(query_keys),
            topk=[torch.from_numpy(self._choose(flat)) for _ in range(groups)],
            hold_s=self.setup.hold_ms / 1000 * self.rng.random(),
        )

    def _choose(self, positions: Keys) -> npt.NDArray[np.int32]:
        width = self.setup.index_topk
        topk = np.full((len(positions), width), -1, dtype=np.int32)
        sets = self.setup.slots // self.setup.ways
        for t, last in enumerate(positions.tolist()):
            ids = list(range(last + 1))
            match self.rng.randrange(6):
                case 0:
                    ids = ids[-width:]
                case 1:
                    ids = [i for i in ids if i % sets == last % sets]
                case 2:
                    ids = self.rng.choices(ids, k=width)  # duplicates
                case 3:
                    ids = self.rng.sample(ids, self.rng.randint(0, min(len(ids), width)))
                case 4:
                    ids = ids[:width]
                case _:
                    self.rng.shuffle(ids)
            row = (ids[-width:] + [-1] * width)[:width]
            self.rng.shuffle(row)
            if self.setup.delivery == "compact":  # the published plan takes an id behind padding for padding
                row.sort(key=lambda position: position < 0)
            topk[t] = row
        return topk


def drive(scheduler: Scheduler, rng: random.Random) -> None:
    """Something that users do between two steps."""
    while len(scheduler.live) < rng.randint(1, scheduler.setup.max_num_seqs + 2):
        family, shared, own = rng.randrange(2), rng.choice([0, 5, 16, 24, 40]), rng.randint(1, 12)
        for _ in range(rng.randint(1, 2)):
            scheduler.add(family, shared, own, to_generate=rng.randint(1, 12))
    if scheduler.running and rng.random() < 0.08:
        scheduler.preempt(rng.choice(scheduler.running))
    if scheduler.live and rng.random() < 0.06:
        scheduler.abort(rng.choice(scheduler.live))
    for request in list(scheduler.idle):
        if rng.random() < 0.3:
            scheduler.resume_session(request, rng.randint(1, 8))


def make_plans(setup: Setup, seed: int, steps: int) -> tuple[list[StepPlan], Scheduler]:
    """A whole program, made without running it, and the scheduler that made it."""
    rng = random.Random(seed)
    scheduler = Scheduler(setup, rng)
    plans: list[StepPlan] = []
    while len(plans) < steps:
        drive(scheduler, rng)
        plan = scheduler.schedule()
        if plan is not None:
            plans.append(plan)
    return plans, scheduler


def setup_for(seed: int, delivery: str = "in_place") -> Setup:
    """A setup for each seed: both widths of a set, all policies, hot pools from the least that must do."""
    rng = random.Random(seed)
    ways, drafts = (16, 32)[seed % 2], (0, 1, 3, 0)[seed % 4]
    topk = 32 // (1 + drafts) if ways == 32 else 16
    least = topk * (1 + drafts)
    return Setup(
        index_topk=topk,
        ways=ways,
        slots=least * (1, 1, 2, 4)[seed // 4 % 4],
        policy=random.Random(f"policy {seed}").choice(POLICIES),
        delivery=delivery,
        drafts=drafts,
        mtp_layers=rng.randint(0, 1) if drafts else 0,
        pattern=rng.choice(["FSFSS", "FFF", "FSSS", "F"]),
        prefill_buffers=rng.choice([1, 2, 3]),
        reuse_newest=rng.random() < 0.5,
        hold_ms=rng.choice([0.0, 1.0]),
    )
