"""The engine with offload against Hugging Face transformers on the same checkpoint."""

from __future__ import annotations

import pytest

from tests.golden.engine import Job, Outcome, engine
from tests.golden.hf_reference import load_reference, run_reference
from tests.golden.workloads import prompt

pytestmark = pytest.mark.slow

MARGIN = 3e-6
"""A choice that is closer than this may differ between two correct implementations (see hf_reference)."""


def _jobs(lengths: list[int]) -> list[Job]:
    return [Job(prompt(length, 20 + n), max_tokens=16, arrival=2 * n) for n, length in enumerate(lengths)]


def _differences(model, jobs: list[Job], outcomes: list[Outcome]) -> list[float]:
    """Worst difference of each request whose choices are all clear."""
    clear = []
    for job, outcome in zip(jobs, outcomes, strict=True):
        run = run_reference(model, [*job.prompt, *outcome.token_ids], record=True)
        if run.minimal_margin() >= MARGIN:
            expected = run.prompt_logprobs().tolist()
            pairs = zip(outcome.logprobs, expected, strict=True)
            clear.append(max(abs(ours - theirs) for ours, theirs in pairs))
    return clear


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("glm-tiny", [30, 200, 300, 350, 400, 420]),
        ("dsv32-tiny", [30, 200, 300, 350, 400]),
        ("glm", [300, 340, 380, 420]),
    ],
)
def test_same_logprobs(lab, name, lengths):
    lab.close()
    directory = lab.checkpoint(name)
    jobs = _jobs(lengths)
    with engine(directory, {"topk_buffer_size": 256}, kv_cache_memory_bytes=96 << 20) as under_test:
        outcomes = under_test.run(jobs)
        assert under_test.trace.stats["fetched_bytes"] > 0
    differences = _differences(load_reference(directory), jobs, outcomes)
    assert len(differences) >= 3
    assert max(differences) < 1e-4


@pytest.mark.parametrize(
    "change",
    [{"index_topk": 32}, {"indexer_types": ["full", "shared", "shared", "shared"]}],
    ids=["half the top-k", "another sharing pattern"],
)
def test_control_wrong_choices(lab, change):
    lab.close()
    directory = lab.checkpoint("glm-tiny")
    jobs = _jobs([200, 300, 350])
    with engine(directory, {"topk_buffer_size": 128}, hf_overrides=change) as under_test:
        outcomes = under_test.run(jobs)
    differences = _differences(load_reference(directory), jobs, outcomes)
    assert len(differences) >= 2
    assert min(differences) > 1e-2
