"""A real vLLM engine in this process, driven step by step, so that a test decides what arrives when."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 32 << 20,
    "enforce_eager": True,
    "dtype": "float32",
    "tokenizer_mode": "hf",
    "disable_log_stats": False,
    "use_tqdm_on_load": False,
}
"""Engine arguments of a test that doesn't say otherwise."""

STEP_LIMIT = 5000
"""Steps after which a workload counts as hanging."""


@dataclass(frozen=True)
class Job:
    """One request of a workload.

    arrival: engine step before which it is added. abort_after: output tokens after which the client goes
    away; 0 means right after the first engine step that could have worked on it. prompt_logprobs: vLLM
    reads no prefix cache for a request that wants them. seed: None takes the most likely
    token every time, else one of the 100 most likely.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    arrival: int = 0
    abort_after: int | None = None
    prompt_logprobs: bool = True
    seed: int | None = None


@dataclass
class Outcome:
    """What a request got: ids, and the log-probability of every prompt token after the first and of every
    output. cached_tokens: tokens of its prompt that came from the prefix cache."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False
    cached_tokens: int = 0


@dataclass
class Trace:
    """Actions of the scheduler in a workload.

    schedule: for each step the tokens that each job computes. preempted: jobs, once per preemption.
    peak_blocks: most KV blocks in use at once. stats: growth of the offload counters, empty without offload.
    drafts: for each step the draft tokens that each job verifies. accepted: how many of them, for each set.
    """

    schedule: list[dict[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    peak_blocks: int = 0
    stats: dict[str, float] = field(default_factory=dict)
    drafts: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    @property
    def mixed_steps(self) -> int:
        """Steps that decode for one request while another prefills."""
        return sum(1 in step.values() and max(step.values()) > 1 for step in self.schedule if step)


BeforeStep = Callable[[int, dict[str, Outcome]], None]


class EngineUnderTest:
    """An offline vLLM engine. `offload`: the `sparse_kv_offload_config` without `enabled`; None for none."""

    def __init__(self, checkpoint: Path, offload: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        section = {"dram_size_per_dp_GB": 1, **(offload or {}), "enabled": offload is not None}
        arguments = copy.deepcopy({**OPTIONS, **options})  # vLLM writes into the dicts it gets
        self.offloads = offload is not None
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(checkpoint), additional_config={"sparse_kv_offload_config": section}, **arguments
            )
        )
        self.trace = Trace()
        self._watch_scheduler()

    def on_workers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of a module-level function on every rank; its first argument is the worker."""
        executor = self.engine.engine_core.engine_core.model_executor
        results: list[Any] = executor.collective_rpc(function, args=args)
        return results

    @property
    def runner(self) -> Any:
        """The model runner; only with a single rank, as everything that follows from it."""
        return self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        """The scheduler."""
        return self.engine.engine_core.engine_core.scheduler

    @property
    def manager(self) -> Any:
        """The offload manager; only with offload."""
        return self.runner.offload.manager

    @property
    def num_blocks(self) -> int:
        """KV blocks that the scheduler hands out, vLLM's null block included."""
        return int(self.scheduler.kv_cache_config.num_blocks)

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def blocks(self, name: str) -> list[int]:
        """Block table of a running job, without unused entries."""
        batch = self.runner.input_batch
        index = next(n for n, req_id in enumerate(batch.req_ids) if _job_name(req_id) == name)
        table = batch.block_table[0].get_numpy_array()[index]
        return [int(block) for block in table if block]

    def row(self, name: str) -> int:
        """Hot-pool row of a running job."""
        rows = self.manager.partitions
        return int(next(rows.lookup(req_id).partition for req_id in rows.live if _job_name(req_id) == name))

    def run(self, jobs: Sequence[Job], before_step: BeforeStep | None = None) -> list[Outcome]:
        """Runs a workload to its end, and checks that nothing is held afterwards.

        It finds NaN wherever the offload keeps rows, so that what is read before it was written shows.
        `before_step(step, outcomes)` may look at, or break, anything. `trace` tells what the scheduler did.
        """
        assert self.engine.reset_prefix_cache(), "blocks are still in use before the workload"
        if self.offloads:
            self.on_workers(poison)
        self.trace = Trace()
        before = self._stats()
        outcomes = {f"job-{n}": Outcome() for n in range(len(jobs))}
        waiting = dict(zip(outcomes, jobs, strict=True))
        live: set[str] = set()
        step = 0
        while waiting or live:
            assert step < STEP_LIMIT, f"still not done: {sorted(live | set(waiting))}"
            for name in [n for n, job in waiting.items() if job.arrival <= step]:
                self._add(name, waiting.pop(name))
                live.add(name)
            if before_step is not None:
                before_step(step, outcomes)
            for output in self.engine.step():
                _collect(outcomes[output.request_id], output)
                if output.finished:
                    live.discard(output.request_id)
            step += 1
            for name in sorted(live):
                job = jobs[int(name.removeprefix("job-"))]
                if job.abort_after is not None and len(outcomes[name].token_ids) >= job.abort_after:
                    self.engine.abort_request([name])
                    live.discard(name)
        self.check_idle()
        self.trace.stats = {key: value - before.get(key, 0) for key, value in self._stats().items()}
        return list(outcomes.values())

    def check_idle(self) -> None:
        """Fails if a block, a row or a request is still held although nothing runs."""
        self.engine.step()  # vLLM tells the worker about finished requests with the next step
        assert not self.scheduler.has_requests()
        assert self.free_blocks == self.num_blocks - 1
        if self.offloads:
            self.on_workers(check_released)

    def close(self) -> None:
        """Shuts the engine down and frees what it held."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.engine
        cleanup_dist_env_and_memory()
        gc.freeze()  # vLLM collects garbage many times at every start: don't look at its modules again

    def _add(self, name: str, job: Job) -> None:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0 if job.seed is None else 1.0,
            seed=job.seed,
            top_k=0 if job.seed is None else 100,
            max_tokens=job.max_tokens,
            logprobs=0,
            prompt_logprobs=0 if job.prompt_logprobs else None,
            ignore_eos=True,
            detokenize=False,
        )
        self.engine.add_request(name, {"prompt_token_ids": list(job.prompt)}, params)

    def _stats(self) -> dict[str, float]:
        return self.on_workers(offload_stats)[0] if self.offloads else {}

    def _watch_scheduler(self) -> None:
        scheduler = self.scheduler
        schedule, preempt = scheduler.schedule, scheduler._preempt_request
        count_accepted = scheduler.make_spec_decoding_stats

        def watched_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            tokens = {_job_name(req_id): count for req_id, count in output.num_scheduled_tokens.items()}
            self.trace.schedule.append(tokens)
            drafts = output.scheduled_spec_decode_tokens.items()
            self.trace.drafts.append({_job_name(req_id): tuple(ids) for req_id, ids in drafts})
            self.trace.peak_blocks = max(self.trace.peak_blocks, self.num_blocks - 1 - self.free_blocks)
            return output

        def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> None:
            self.trace.preempted.append(_job_name(request.request_id))
            preempt(request, *args, **kwargs)

        def watched_verification(*args: Any, **kwargs: Any) -> Any:
            if kwargs["num_draft_tokens"]:
                self.trace.accepted.append(kwargs["num_accepted_tokens"])
            return count_accepted(*args, **kwargs)

        scheduler.schedule, scheduler._preempt_request = watched_schedule, watched_preempt
        scheduler.make_spec_decoding_stats = watched_verification


def poison(worker: Any) -> None:
    """Puts NaN wherever the offload keeps rows."""
    manager = worker.model_runner.offload.manager
    for rows in (*manager.host_rows.layers, *manager.hot.layers, *manager.prefill._buffers):
        rows.fill_(255)


def check_released(worker: Any) -> None:
    """Fails if a request still has a row."""
    manager = worker.model_runner.offload.manager
    manager.partitions.check_empty()
    assert manager.partitions.num_free == manager.partitions.total
    assert not manager._seen


def offload_stats(worker: Any) -> dict[str, float]:
    """Counters of a rank."""
    counters: dict[str, float] = worker.model_runner.offload.manager.stats.as_dict()
    return counters


def _job_name(req_id: str) -> str:
    return "-".join(req_id.split("-")[:2])  # vLLM appends a random part


def _collect(outcome: Outcome, output: Any) -> None:
    outcome.token_ids = list(output.outputs[0].token_ids)
    outcome.logprobs = _chosen(output.prompt_logprobs or []) + _chosen(output.outputs[0].logprobs)
    outcome.finished = output.finished
    outcome.cached_tokens = output.num_cached_tokens or 0


def _chosen(entries: Sequence[Any]) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in entries if entry is not None]


@contextmanager
def engine(
    checkpoint: Path, offload: dict[str, Any] | None = None, **options: Any
) -> Iterator[EngineUnderTest]:
    """An engine for the length of a block."""
    under_test = EngineUnderTest(checkpoint, offload, **options)
    try:
        yield under_test
    finally:
        under_test.close()


def worst_difference(ours: Sequence[Outcome], reference: Sequence[Outcome]) -> float:
    """Largest log-probability difference; infinite when any token id, or the number of results, differs."""
    worst = 0.0
    for a, b in zip(ours, reference, strict=True):
        if a.token_ids != b.token_ids or len(a.logprobs) != len(b.logprobs) or a.finished != b.finished:
            return float("inf")
        if any(map(math.isnan, (*a.logprobs, *b.logprobs))):
            return float("inf")
        worst = max([worst, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))])
    return worst
