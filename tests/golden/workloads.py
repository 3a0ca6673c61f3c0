"""Named workloads: which requests arrive when, and on what kind of engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.golden.engine import Job


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """Random token ids of the demo vocabulary, control tokens left out."""
    generator = random.Random(f"{tokens}/{seed}")
    return tuple(generator.randrange(32, 2000) for _ in range(tokens))


@dataclass(frozen=True)
class Workload:
    """Jobs, and the engine options (besides the defaults) that they are made for."""

    jobs: tuple[Job, ...]
    options: dict[str, Any] = field(default_factory=dict)


def _short() -> tuple[Job, ...]:
    lengths = (1, 2, 17, 63, 64, 65, 100)  # around index_topk and block size, both 64
    return tuple(Job(prompt(length, 1), max_tokens=24) for length in lengths)


def _long() -> tuple[Job, ...]:
    return tuple(Job(prompt(length, 2), max_tokens=24) for length in (400, 900, 1500))


def _mixed() -> tuple[Job, ...]:
    return (
        Job(prompt(30, 3)),
        Job(prompt(90, 3), max_tokens=40),
        Job(prompt(400, 3), max_tokens=24, arrival=1),
        Job(prompt(1200, 3), max_tokens=24, arrival=4),
        Job(prompt(700, 3), max_tokens=12, arrival=9),
        Job(prompt(129, 3), max_tokens=12, arrival=12),
    )


def _brief() -> tuple[Job, ...]:
    return (Job(prompt(90, 11), max_tokens=20), Job(prompt(640, 11), max_tokens=16))  # for big models


def _prefix() -> tuple[Job, ...]:
    first, conversation = prompt(640, 4), prompt(200, 4)
    return (
        Job(first + prompt(10, 5), max_tokens=12, prompt_logprobs=False),
        Job(first + prompt(70, 5), max_tokens=12, arrival=1, prompt_logprobs=False),
        Job(first, max_tokens=12, arrival=6, prompt_logprobs=False),
        # all cached but one token: it never prefills
        Job(first + prompt(1, 5), max_tokens=12, arrival=8, prompt_logprobs=False),
        Job(first[:320] + prompt(300, 5), max_tokens=12, arrival=9, prompt_logprobs=False),
        Job(conversation, max_tokens=60, prompt_logprobs=False),
        Job(conversation + prompt(5, 5), max_tokens=12, arrival=40, prompt_logprobs=False),
    )


def _abort() -> tuple[Job, ...]:
    return (
        Job(prompt(300, 6), max_tokens=40),
        Job(prompt(1500, 6), abort_after=0),  # in the middle of its prefill
        Job(prompt(200, 6), max_tokens=40, abort_after=5),
        Job(prompt(500, 6), max_tokens=24, arrival=3),
        Job(prompt(500, 6), max_tokens=24, arrival=12, abort_after=1, prompt_logprobs=False),
        Job(prompt(250, 6), max_tokens=24, arrival=14),
    )


def _churn() -> tuple[Job, ...]:
    generator = random.Random(7)
    return tuple(
        Job(
            prompt(generator.randrange(5, 350), 100 + n),
            max_tokens=generator.randrange(1, 20),
            arrival=generator.randrange(0, 30),
            abort_after=generator.choice((None, None, None, 0, 3)),
        )
        for n in range(32)
    )


def _preempted() -> tuple[Job, ...]:
    # They are admitted together and then grow over block borders until there are no blocks left.
    return tuple(
        Job(prompt(length, 8), max_tokens=150, prompt_logprobs=length < 200)
        for length in (230, 170, 300, 250, 120, 250)
    )


def _same_step() -> tuple[Job, ...]:
    # The twin is scheduled together with the request that computes its prefix. 641 = 10 blocks and one token,
    # so one twin has a single token of its own (decode), the others have some (prefill).
    prefill, decode = prompt(700, 9), prompt(641, 10)
    twins = ((prefill, 0), (prefill, 0), (prefill + prompt(90, 9), 0), (decode, 4), (decode, 4))
    return tuple(Job(ids, max_tokens=8, arrival=arrival, prompt_logprobs=False) for ids, arrival in twins)


def _seeded() -> tuple[Job, ...]:
    # Two with one seed, one that decodes while they prefill, and one without a seed among them.
    jobs = _preempted()
    return (
        *(replace(job, seed=7, prompt_logprobs=False) for job in (jobs[2], jobs[2], jobs[0], jobs[5])),
        replace(jobs[1], seed=8, prompt_logprobs=False),
        Job(prompt(300, 13), max_tokens=20, prompt_logprobs=False),
    )


def _full() -> tuple[Job, ...]:
    # The maximum request length. At its end no request gets drafts.
    return (Job(prompt(2020, 12), max_tokens=28), Job(prompt(100, 12), max_tokens=50, arrival=4))


SMALL_POOL = {"num_gpu_blocks_override": 24, "max_model_len": 1024}
WIDE_STEPS = {"max_num_batched_tokens": 2048}

WORKLOADS = {
    "short": Workload(_short()),
    "long": Workload(_long()),
    "mixed": Workload(_mixed()),
    "brief": Workload(_brief()),
    "prefix": Workload(_prefix()),
    "abort": Workload(_abort()),
    "churn": Workload(_churn()),
    "full": Workload(_full()),
    "seeded": Workload(_seeded()),
    "preempted": Workload(_preempted(), SMALL_POOL),
    "same_step": Workload(_same_step(), WIDE_STEPS),
}
