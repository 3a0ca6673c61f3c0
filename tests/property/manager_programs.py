"""Runs the plans of `manager_model` on real managers, and checks every row that attention gets."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import torch

from tests.property.manager_model import ROW_BYTES, Scheduler, Setup, StepPlan, content, drive, make_plans
from vllm_kvoffload.runtime import CPURuntime, DelayPlan
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.offloaded import OffloadedKV
from vllm_kvoffload.sparse.step import StepBatch

DEADLINE_S = 20.0


class Collective:
    """A barrier over rank threads that also fails when the ranks don't wait for the same thing."""

    def __init__(self, ranks: int) -> None:
        self._labels: list[str] = []
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(ranks, self._compare, timeout=DEADLINE_S)

    def _compare(self) -> None:
        labels, self._labels = self._labels, []
        if len(set(labels)) != 1:
            raise AssertionError(f"ranks wait for different collectives: {labels}")

    def wait(self, label: str) -> None:
        with self._lock:
            self._labels.append(label)
        self._barrier.wait()

    def abort(self) -> None:
        self._barrier.abort()


class WrongRowError(AssertionError):
    """Attention got something else than the rows it asked for."""


class Boom(Exception):
    """Raised inside attention by a failing step."""


class Rank:
    """Runs plans on a manager, through input buffers that it reuses from step to step as vLLM does."""

    def __init__(
        self,
        setup: Setup,
        runtime: CPURuntime,
        host_layers: list[torch.Tensor],
        *,
        writer: bool = True,
        collective: Collective | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.setup = setup
        self._collective = collective
        self.manager = SparseKVManager(
            setup.geometry,
            setup.config,
            max_num_seqs=setup.max_num_seqs,
            max_model_len=setup.max_model_len,
            prefill_buffers=setup.prefill_buffers,
            host_layers=host_layers,
            runtime=runtime,
            writer=writer,
            barrier=None if collective is None else lambda: collective.wait("store"),
            deadline_s=deadline_s,
        )
        self.kvs = [OffloadedKV(self.manager, layer) for layer in range(setup.geometry.num_layers)]
        blocks = -(-setup.max_model_len // setup.block_size)
        self._block_table = torch.zeros((setup.max_num_seqs, blocks), dtype=torch.int32)
        self._slot_mapping = torch.full((setup.token_budget,), -1, dtype=torch.int64)
        self._topk = torch.full((setup.token_budget, setup.index_topk), -1, dtype=torch.int32)
        self.expected = {"decode_steps": 0, "prefill_bytes": 0, "written_bytes": 0}
        self._writer = writer
        self.failed = False

    def run(
        self,
        plan: StepPlan,
        fail_at: tuple[int, int] | None = None,
    ) -> None:
        """One step. `fail_at`: (layer, part) whose attention raises :class:`Boom`."""
        self.manager.release(plan.finished)
        self.manager.release(plan.preempted)
        batch = self.batch(plan)
        self.manager.begin_step(batch)
        layers = self.setup.geometry.num_target_layers
        self._run_layers(plan, batch, range(layers), fail_at)
        self._account(batch, layers)
        self.expected["decode_steps"] += bool((batch.query_lens <= 1 + self.setup.drafts).any())
        for index, draft in enumerate(plan.drafts):
            batch = self.batch(draft)
            self.manager.begin_draft(batch, index)
            self._run_layers(draft, batch, range(layers, layers + 1), fail_at)
            self._account(batch, 1)

    def _run_layers(
        self, plan: StepPlan, batch: StepBatch, layers: range, fail_at: tuple[int, int] | None
    ) -> None:
        self._gather("embedding")
        for layer in layers:
            self._run_layer(plan, batch, layer, fail_at)
            self._gather(f"layer {layer}")

    def batch(self, plan: StepPlan) -> StepBatch:
        """The step's inputs, in buffers that still have the step before in them."""
        tokens, requests = len(plan.positions), len(plan.req_ids)
        self._block_table[:requests] = plan.block_table
        self._slot_mapping.fill_(-1)[:tokens] = plan.slot_mapping
        return StepBatch(
            query_start_loc=plan.query_start_loc,
            seq_lens=plan.seq_lens,
            block_table=self._block_table[:requests],
            slot_mapping=self._slot_mapping[:tokens],
            block_size=self.setup.block_size,
            req_ids=tuple(plan.req_ids),
        )

    def _gather(self, label: str) -> None:
        if self._collective is not None:
            self._collective.wait(label)

    def _run_layer(
        self, plan: StepPlan, batch: StepBatch, layer: int, fail_at: tuple[int, int] | None
    ) -> None:
        group, tokens = self.setup.geometry.group_of(layer), len(plan.positions)
        if group.owner == layer:
            self._topk[:tokens] = plan.topk[group.index]
        topk = self._topk[:tokens]
        rows = content(plan.query_keys, plan.positions, layer)
        self.kvs[layer].append(rows, batch.slot_mapping)
        seen = np.zeros(tokens, dtype=np.int64)
        for number, part in enumerate(self.kvs[layer].parts(topk, batch)):
            if fail_at == (layer, number):
                self.failed = True
                raise Boom(f"layer {layer}, part {number}")
            np.add.at(seen, part.tokens.numpy(), 1)
            # Twice: a buffer that is refilled while attention still uses it changes under the reader.
            for pause_s in (0.0, plan.hold_s):
                if pause_s:
                    time.sleep(pause_s)
                self._check(plan, layer, part.tokens, part.rows, part.indices, topk)
        if not (seen == 1).all():
            raise WrongRowError(f"layer {layer}: query tokens covered {seen.tolist()} times")

    def _check(
        self,
        plan: StepPlan,
        layer: int,
        tokens: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        topk: torch.Tensor,
    ) -> None:
        chosen = topk[tokens].numpy()
        where = indices.numpy()
        if where.shape != chosen.shape or not ((where >= 0) == (chosen >= 0)).all():
            raise WrongRowError(f"layer {layer}: indices don't match the choice: {where} for {chosen}")
        t, k = np.nonzero(chosen >= 0)
        ids = chosen[t, k].astype(np.int64)
        owner = np.searchsorted(plan.query_start_loc, tokens.numpy()[t], side="right") - 1
        expected = content(plan.keys[owner, ids], ids, layer)
        got = rows[torch.from_numpy(where[t, k].astype(np.int64))]
        wrong = torch.nonzero((got != expected).any(1)).flatten().tolist()
        if wrong:
            first = wrong[0]
            raise WrongRowError(
                f"layer {layer}: {len(wrong)} of {len(ids)} rows are wrong, the first for request "
                f"{plan.req_ids[owner[first]]}, query token {int(tokens[t[first]])}, position {ids[first]}: "
                f"got {got[first].tolist()} instead of {expected[first].tolist()}"
            )

    def _account(self, batch: StepBatch, layers: int) -> None:
        decodes = batch.query_lens <= 1 + self.setup.drafts
        self.expected["prefill_bytes"] += int(batch.computed[~decodes].sum()) * layers * ROW_BYTES
        if self._writer:
            self.expected["written_bytes"] += len(batch.slot_mapping) * layers * ROW_BYTES

    def close(self, scheduler: Scheduler) -> None:
        """Nothing may be left behind once every request has gone, and the counters must add up."""
        live = [request.req_id for request in scheduler.live]
        self.manager.release([*scheduler.finished, *scheduler.preempted, *live])
        self.manager.partitions.check_empty()
        assert not self.manager._seen, f"still known: {self.manager._seen}"
        if not self.failed:
            stats = self.manager.stats.as_dict()
            assert {name: stats[name] for name in self.expected} == self.expected


def run_program(setup: Setup, seed: int, steps: int = 30) -> dict[str, int]:
    """A program on one rank, with the random delays of the same seed; what it went through."""
    plans, scheduler = make_plans(setup, seed, steps)
    with CPURuntime(DelayPlan(seed, max_ms=1)) as runtime:
        rank = Rank(setup, runtime, setup.host_layers())
        for plan in plans:
            rank.run(plan)
        rank.close(scheduler)
    return scheduler.log


def run_failing_program(setup: Setup, seed: int, steps: int = 20) -> dict[str, int]:
    """A program some of whose steps fail in attention. They run again, or their requests are dropped."""
    rng = random.Random(seed)
    scheduler = Scheduler(setup, rng)
    with CPURuntime(DelayPlan(seed, max_ms=1)) as runtime:
        rank = Rank(setup, runtime, setup.host_layers())
        for _ in range(steps):
            drive(scheduler, rng)
            plan = scheduler.schedule()
            if plan is None:
                continue
            fail_at = (
                (rng.randrange(setup.geometry.num_layers), rng.randrange(2)) if rng.random() < 0.4 else None
            )
            try:
                rank.run(plan, fail_at)
            except Boom:
                scheduler.count("failed")
                if rng.random() < 0.7:
                    rank.run(plan.again())
                else:
                    scheduler.forget_step(plan)
        rank.close(scheduler)
    return scheduler.log


def run_rank_pair(setup: Setup, seed: int, steps: int = 25, writer_ms: float = 1) -> None:
    """The same program on a writing rank, delayed by up to `writer_ms`, and a reading one; one host pool."""
    plans, scheduler = make_plans(setup, seed, steps)
    with (
        CPURuntime(DelayPlan(seed, max_ms=writer_ms)) as writing,
        CPURuntime(DelayPlan(seed + 1000, max_ms=1)) as reading,
    ):
        for rank in _run_ranks(setup, plans, (writing, reading)):
            rank.close(scheduler)


def _run_ranks(setup: Setup, plans: list[StepPlan], runtimes: tuple[CPURuntime, CPURuntime]) -> list[Rank]:
    collective, host = Collective(2), setup.host_layers()
    ranks = [Rank(setup, runtimes[i], host, writer=i == 0, collective=collective) for i in range(2)]
    errors: list[BaseException] = []

    def loop(rank: Rank) -> None:
        try:
            for plan in plans:
                rank.run(plan)
        except BaseException as error:
            errors.append(error)
            collective.abort()

    threads = [threading.Thread(target=loop, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in real or errors:
        raise error
    return ranks
