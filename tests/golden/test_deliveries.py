"""Every delivery and policy, with and without drafts, gives what no offload gives (I-6), to the bit."""

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


def pairs() -> list[tuple[str, str, int]]:
    """Each delivery with each policy, and with each number of drafts: what a policy plans does not depend on
    drafts, and equals the oracle's plan by the ops' property tests."""
    drafts = {policy: (0, 1, 3)[number % 3] for number, policy in enumerate(POLICIES)}
    rest = [n for n in (0, 1, 3) if n != drafts[DEFAULT_POLICY]]
    chosen = [*drafts.items(), *((DEFAULT_POLICY, n) for n in rest)]
    return [(delivery, policy, n) for delivery in DELIVERIES for policy, n in chosen]


@pytest.mark.parametrize(("delivery", "policy", "drafts"), pairs())
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


@pytest.mark.parametrize(("policy", "ways"), [("fifo", 16), ("rrip", 32)])
def test_compact_delivery_of_everything_else(lab, policy, ways):
    offload = {"topk_buffer_size": 128, "ways": ways, "delivery": "compact", "policy": policy}
    for workload in ("short", "long", "prefix", "abort", "churn"):
        result, difference = lab.compare(workload, offload=offload)
        assert difference == 0.0
        assert result.trace.stats["hits"] > 0


@pytest.mark.parametrize(("workload", "policy"), [("preempted", "rrip"), ("same_step", "fifo")])
def test_compact_delivery_under_pressure(lab, monkeypatch, workload, policy):
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "3:4")
    lab.close()  # streams read the variable when the engine starts
    offload = {"topk_buffer_size": 128, "delivery": "compact", "policy": policy}
    _, difference = lab.compare(workload, offload=offload)
    assert difference == 0.0
    lab.close()
