"""A seed gives the same tokens however a prompt is cut into steps, and after a preemption."""

from __future__ import annotations

import pytest

from tests.golden.lab import OFFLOAD, TINY
from tests.golden.workloads import SMALL_POOL, WORKLOADS

pytestmark = pytest.mark.slow

TWINS, UNSEEDED = (0, 1), 5
WHOLE, CHUNKED = {"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 64}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}


def seeded_tokens(result):
    outcomes = result.outcomes
    for outcome, job in zip(outcomes, WORKLOADS["seeded"].jobs, strict=True):
        assert len(outcome.token_ids) == job.max_tokens
    return [outcome.token_ids for n, outcome in enumerate(outcomes) if n != UNSEEDED]


def chunks(result, job):
    """Steps that computed more of it than a token and its drafts."""
    return sum(step.get(f"job-{job}", 0) > 3 for step in result.trace.schedule)


@pytest.fixture(scope="module")
def whole(_lab):
    """The tokens of prompts that are computed in a single step each."""
    result = _lab.run("seeded", **WHOLE)
    assert chunks(result, 0) == 1
    tokens = seeded_tokens(result)
    assert tokens[TWINS[0]] == tokens[TWINS[1]]
    assert len(set(map(tuple, tokens))) == len(tokens) - 1  # random, not the most likely ones
    return tokens


@pytest.mark.parametrize("offload", [None, OFFLOAD], ids=["plain", "offload"])
def test_chunked_prompts(lab, whole, offload):
    result = lab.run("seeded", offload=offload, **CHUNKED)
    assert chunks(result, 0) > 3
    assert seeded_tokens(result) == whole


def test_preempted_requests(lab, whole):
    result = lab.run("seeded", **SMALL_POOL, **CHUNKED)
    assert {f"job-{n}" for n in range(UNSEEDED)} & set(result.trace.preempted)
    assert seeded_tokens(result) == whole


def test_drafts(lab):
    """The number of random draws depends on the batch size: only engines with equal batches agree."""
    model = f"{TINY}-mtp"
    plain, offloading = (
        lab.run("seeded", model, offload=offload, **MTP, **CHUNKED)
        for offload in (None, {"topk_buffer_size": 256})
    )
    assert chunks(plain, 0) > 3
    assert {0, 2} <= set(plain.trace.accepted)
    assert seeded_tokens(offloading) == seeded_tokens(plain)
