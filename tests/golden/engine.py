"""A real vLLM engine in this process, driven step by step, so that a test decides what arrives when."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One request of a workload.

    arrival: engine step before which it is added. abort_after: output tokens after which the client goes
    away; 0 means right after the first engine step that could have worked on it. prompt_logprobs: vLLM
    reads no prefix cache for a request that wants them.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 16
    arrival: int = 0
    abort_after: int | None = None
    prompt_logprobs: bool = True


@dataclass
class Outcome:
    """What a request got: ids, and the log-probability of every prompt token after the first and of every output."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: bool = False


class EngineUnderTest:
    """An offline vLLM engine. `offload` is the `sparse_kv_offload_config` without its `enabled`, None for none."""

    def __init__(self, checkpoint: Path, offload: dict[str, Any] | None = None, **options: Any) -> None:
        from vllm import LLM

        section = {"dram_size_per_dp_GB": 1, **(offload or {}), "enabled": offload is not None}
        arguments: dict[str, Any] = {
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 96 << 20,
            "enforce_eager": True,
            "dtype": "float32",
            "tokenizer_mode": "hf",
            "disable_log_stats": False,
            **options,
        }
        self.llm = LLM(
            model=str(checkpoint), additional_config={"sparse_kv_offload_config": section}, **arguments
        )
        self.engine = self.llm.llm_engine

    @property
    def runner(self) -> Any:
        """The model runner."""
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
        """KV blocks that the scheduler hands out."""
        return int(self.scheduler.kv_cache_config.num_blocks)

    def run(
        self, jobs: Sequence[Job], before_step: Callable[[int, dict[str, Outcome]], None] | None = None
    ) -> list[Outcome]:
        """Runs a workload to its end; `before_step(step, outcomes)` may look at, or break, anything."""
        from vllm import SamplingParams

        outcomes = {f"job-{n}": Outcome() for n in range(len(jobs))}
        waiting = dict(zip(outcomes, jobs, strict=True))
        live: set[str] = set()
        step = 0
        while waiting or live:
            for name in [n for n, job in waiting.items() if job.arrival <= step]:
                job = waiting.pop(name)
                params = SamplingParams(
                    temperature=0,
                    max_tokens=job.max_tokens,
                    logprobs=0,
                    prompt_logprobs=0 if job.prompt_logprobs else None,
                    ignore_eos=True,
                    detokenize=False,
                )
                self.engine.add_request(name, {"prompt_token_ids": list(job.prompt)}, params)
                live.add(name)
            if before_step is not None:
                before_step(step, outcomes)
            for output in self.engine.step():
                outcome = outcomes[output.request_id]
                outcome.token_ids = list(output.outputs[0].token_ids)
                outcome.logprobs = _chosen(output.prompt_logprobs or []) + _chosen(output.outputs[0].logprobs)
                if output.finished:
                    outcome.finished = True
                    live.discard(output.request_id)
            step += 1
            for name in sorted(live):
                after = jobs[int(name[4:])].abort_after
                if after is not None and len(outcomes[name].token_ids) >= after and jobs[int(name[4:])].arrival < step:
                    self.engine.abort_request([name])
                    live.discard(name)
        return list(outcomes.values())

    def close(self) -> None:
        """Shuts the engine down and frees what it held."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.llm, self.engine
        gc.collect()
        cleanup_dist_env_and_memory()


def _chosen(entries: Sequence[Any]) -> list[float]:
    return [next(iter(entry.values())).logprob for entry in entries if entry is not None]


@contextmanager
def engine(checkpoint: Path, offload: dict[str, Any] | None = None, **options: Any) -> Iterator[EngineUnderTest]:
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
        worst = max([worst, *(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))])
    return worst
