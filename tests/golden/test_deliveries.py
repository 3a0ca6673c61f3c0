"""Every delivery and policy, with and without drafts, gives what no offload gives (I-6), to the bit."""

from __future__ import annotations

import pytest

from vllm_kvoffload.policies import POLICIES
from vllm_kvoffload.settings.offload import DELIVERIES

pytestmark = pytest.mark.slow

MODEL = "glm-tiny-mtp"
POOL = {"topk_buffer_size": 256}


def options(drafts: int) -> dict[str, object]:
    if not drafts:
        return {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}}


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("delivery", DELIVERIES)
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


@pytest.mark.parametrize("ways", [16, 32])
@pytest.mark.parametrize("policy", ["fifo", "rrip"])
def test_compact_delivery_of_everything_else(lab, policy, ways):
    offload = {"topk_buffer_size": 128, "ways": ways, "delivery": "compact", "policy": policy}
    for workload in ("short", "long", "prefix", "abort", "churn"):
        result, difference = lab.compare(workload, offload=offload)
        assert difference == 0.0
        assert result.trace.stats["hits"] > 0


@pytest.mark.parametrize("workload", ["preempted", "same_step"])
@pytest.mark.parametrize("policy", ["fifo", "rrip"])
def test_compact_delivery_under_pressure(lab, monkeypatch, workload, policy):
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "3:4")
    lab.close()  # streams read the variable when the engine starts
    offload = {"topk_buffer_size": 128, "delivery": "compact", "policy": policy}
    _, difference = lab.compare(workload, offload=offload)
    assert difference == 0.0
    lab.close()
