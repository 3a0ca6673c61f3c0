"""A seed gives the same tokens however a prompt is cut into steps, also after a preemption."""

from __future__ import annotations

import pytest
from lab import OFFLOAD
from workloads import SMALL_POOL, WORKLOADS

from vllm_kvoffload.demo.checkpoint import MODELS

pytestmark = pytest.mark.slow

TWINS, UNSEEDED = (0, 1), 5
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def seeded_tokens(result):
    outcomes = result.outcomes
    assert [len(outcome.token_ids) for outcome in outcomes] == [
        job.max_tokens for job in WORKLOADS["seeded"].jobs
    ]
    return [outcome.token_ids for n, outcome in enumerate(outcomes) if n != UNSEEDED]


def chunks(result, job):
    """Steps that it took to compute a prompt."""
    return sum(step.get(f"job-{job}", 0) > 1 for step in result.trace.schedule)


@pytest.fixture(scope="module")
def whole(_lab):
    """The tokens of prompts that are computed in a single step each."""
    result = _lab.run("seeded", max_num_batched_tokens=2048)
    assert chunks(result, 0) == 1
    tokens = seeded_tokens(result)
    assert tokens[TWINS[0]] == tokens[TWINS[1]]
    assert len(set(map(tuple, tokens))) == len(tokens) - 1  # random, not the most likely ones
    return tokens


@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["plain", "offload"])
def test_chunked_prompts(lab, whole, offload):
    result = lab.run("seeded", offload=offload, max_num_batched_tokens=64)
    assert chunks(result, 0) > 3
    assert seeded_tokens(result) == whole


def test_preempted_requests(lab, whole):
    result = lab.run("seeded", **SMALL_POOL, max_num_batched_tokens=64)
    assert {"job-0", "job-1", "job-2", "job-3", "job-4"} & set(result.trace.preempted)
    assert seeded_tokens(result) == whole
