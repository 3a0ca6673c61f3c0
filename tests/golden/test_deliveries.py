"""Every delivery and policy, with and without drafts, gives what no offload gives (I-6), to the bit.

Each two of delivery, policy and number of drafts meet in one run.
"""

from __future__ import annotations

import pytest

from vllm_kvoffload.policies import DEFAULT_POLICY, POLICIES
from vllm_kvoffload.settings.offload import DELIVERIES

pytestmark = pytest.mark.slow

MODEL = "glm-tiny-mtp"
POOL = {"topk_buffer_size": 256}


def options(drafts: int) -> dict[str, object]:
    if not drafts:
        return {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}


DRAFTS = (0, 1, 3)
RUNS = sorted(
    {
        (DELIVERIES[(row + column) % len(DELIVERIES)], policy, drafts)
        for row, policy in enumerate(POLICIES)
        for column, drafts in enumerate(DRAFTS)
    }
    | {("compact", "fifo", drafts) for drafts in DRAFTS}  # the published plan, which is code of its own
    | {("in_place", "fifo", 0)}
)


@pytest.mark.parametrize(("delivery", "policy", "drafts"), RUNS)
def test_deliveries_and_policies(lab, delivery, policy, drafts):
    offload = {**POOL, "delivery": delivery, "policy": policy}
    result, difference = lab.compare("mixed", MODEL, offload, **options(drafts))
    assert difference == 0.0
    assert result.trace.drafts == lab.reference("mixed", MODEL, **options(drafts)).trace.drafts
    stats = result.trace.stats
    assert stats["hits"] > 5 * stats["misses"] > 0
    assert stats["fetched_bytes"] > 0
    published = delivery == "compact" and policy == "fifo"
    assert (stats["new_rows"] == 0) == published  # as published, a step's own tokens are not kept


@pytest.mark.parametrize(
    ("policy", "ways", "workloads"),
    [
        ("fifo", 16, ["short", "long", "prefix", "abort", "churn"]),  # the published plan
        ("fifo", 32, ["churn"]),
        ("rrip", 32, ["short", "long", "prefix", "abort", "churn"]),
    ],
)
def test_compact_delivery_of_everything_else(lab, policy, ways, workloads):
    offload = {"topk_buffer_size": 128, "ways": ways, "delivery": "compact", "policy": policy}
    for workload in workloads:
        result, difference = lab.compare(workload, offload=offload)
        assert difference == 0.0
        assert result.trace.stats["hits"] > 0


@pytest.mark.parametrize(("policy", "workload"), [("fifo", "preempted"), ("rrip", "same_step")])
def test_compact_delivery_under_pressure(lab, monkeypatch, workload, policy):
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "3:4")
    lab.close()  # streams read the variable when the engine starts
    offload = {"topk_buffer_size": 128, "delivery": "compact", "policy": policy}
    _, difference = lab.compare(workload, offload=offload)
    assert difference == 0.0
    lab.close()
