"""MTP with the offload: tokens, log-probabilities and drafts equal those without offload, to the bit.

Drafts have to be compared: a wrong draft layer is hidden by verification, which just rejects more.
"""

from __future__ import annotations

from typing import Any

import pytest
from lab import Result
from test_mtp_baseline import assert_same_tokens, draft_counts, mtp

pytestmark = pytest.mark.slow

ORDINARY = ["short", "long", "mixed", "prefix", "abort", "churn"]


def compare(lab, workload: str, model: str, offload: dict[str, Any], **options: Any) -> Result:
    """A workload with offload. Fails unless everything is as without."""
    result, difference = lab.compare(workload, model, offload, **options)
    assert result.trace.drafts == lab.reference(workload, model, **options).trace.drafts
    assert difference == 0.0
    return result


def compare_all(
    lab, workloads: list[str], model: str, offload: dict[str, Any], **options: Any
) -> list[Result]:
    """`compare` for several workloads on two engines in all."""
    for workload in workloads:
        lab.reference(workload, model, **options)
    return [compare(lab, workload, model, offload, **options) for workload in workloads]


@pytest.mark.parametrize(
    ("model", "drafts", "offload"),
    [
        ("glm-tiny-mtp", 1, {"topk_buffer_size": 128}),  # the smallest for one draft
        ("glm-tiny-mtp", 3, {"topk_buffer_size": 256, "policy": "fifo"}),
        ("glm-tiny-mtp", 3, {"topk_buffer_size": 1024, "prefill_buffers": 5, "ways": 32}),
        ("dsv32-tiny-mtp", 1, {"topk_buffer_size": 256, "policy": "clock"}),
        ("dsv32-tiny-mtp", 3, {"topk_buffer_size": 256}),
    ],
)
def test_same_results(lab, model, drafts, offload):
    results = compare_all(lab, ORDINARY, model, offload, **mtp(drafts))
    assert sorted(draft_counts(*results)) == list(range(drafts + 1))
    for result in results:
        assert result.trace.stats["hits"] > 0
        assert result.trace.stats["fetched_bytes"] > 0


def test_preemption(lab):
    result = compare(lab, "preempted", "glm-tiny-mtp", {"topk_buffer_size": 256}, **mtp(3))
    assert len(set(result.trace.preempted)) >= 2


@pytest.mark.parametrize("model", ["glm-tiny-mtp", "dsv32-tiny-mtp"])
def test_a_request_as_long_as_the_model(lab, model):
    """While one is at its end, vLLM runs no MTP layer for anybody, and never writes what it left out.

    The others' later drafts then depend on what was in these places before; their tokens don't.
    """
    reference = lab.reference("full", model, **mtp(3))
    result = lab.run("full", model, {"topk_buffer_size": 256}, **mtp(3))
    assert any(set(ids) == {0} for step in result.trace.drafts for ids in step.values())
    assert_same_tokens(result.outcomes, reference.outcomes)
