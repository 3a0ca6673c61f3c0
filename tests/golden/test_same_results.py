"""Offload changes nothing that a user can see: results equal those without offload, to the bit."""

from __future__ import annotations

import pytest

from tests.golden.engine import worst_difference
from tests.golden.lab import OFFLOAD
from tests.golden.store_lab import transfer_config
from tests.golden.workloads import WORKLOADS

pytestmark = pytest.mark.slow

POOLS = {
    "smallest": {"topk_buffer_size": 64},
    "128": {"topk_buffer_size": 128, "ways": 32, "policy": "fifo"},
    "holds-all": {"topk_buffer_size": 2048, "prefill_buffers": 5},
}
"""Pool sizes at which the offload behaves differently. Property tests show that every policy plans as the
oracle does, and test_deliveries.py runs each policy."""
RUNS = [
    *(("smallest", name) for name in ("short", "long", "mixed", "prefix", "abort", "churn")),
    *(("128", name) for name in ("long", "abort", "churn")),
    *(("holds-all", name) for name in ("short", "mixed", "prefix")),
]


@pytest.mark.parametrize(("pool", "workload"), RUNS)
def test_pool_sizes(lab, pool, workload):
    result, difference = lab.compare(workload, offload=POOLS[pool])
    assert difference == 0.0
    stats = result.trace.stats
    assert stats["hits"] > 0
    assert stats["fetched_bytes"] > 0
    assert stats["written_bytes"] > 0
    if pool == "smallest" and workload != "short":
        assert stats["displaced"] > 0
    if pool == "holds-all":
        assert stats["displaced"] == 0


def test_the_workloads_are_what_they_are_called(lab):
    assert lab.reference("mixed").trace.mixed_steps > 5
    chunks = [step["job-2"] for step in lab.reference("long").trace.schedule if "job-2" in step]
    assert sum(count > 1 for count in chunks) > 5
    cached = [outcome.cached_tokens for outcome in lab.reference("prefix").outcomes]
    assert cached[1:5] == [640, 576, 640, 320]
    assert cached[6] >= 192
    aborted = [outcome.finished for outcome in lab.reference("abort").outcomes]
    assert aborted == [True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("model", "topk", "workloads"),
    [
        ("glm", 256, ["mixed", "prefix"]),
        ("dsv32-tiny", 64, ["mixed", "prefix", "abort"]),
        ("dsv32", 256, ["brief"]),
        ("glm-576", 512, ["brief"]),
        ("glm-tiny-bf16", 64, ["mixed", "prefix"]),
    ],
)
def test_models_with_and_without_index_sharing(lab, model, topk, workloads):
    for result, difference in lab.compare_all(workloads, model, {"topk_buffer_size": topk}).values():
        assert difference == 0.0
        assert result.trace.stats["hits"] > 0
        assert result.trace.stats["fetched_bytes"] > 0


@pytest.mark.parametrize(
    "options", [{"block_size": 16}, {"block_size": 128, "max_num_batched_tokens": 100}], ids=str
)
def test_block_and_chunk_sizes(lab, options):
    _, difference = lab.compare("mixed", **options)
    assert difference == 0.0


def idle(worker):
    worker.execute_dummy_batch()


@pytest.mark.parametrize(
    "options",
    [{}, {"offload": OFFLOAD}, {"kv_transfer_config": transfer_config(1, [])}],
    ids=["plain", "offload", "store"],
)
def test_dummy_batches_change_nothing(lab, options):
    """A rank of a data parallel group runs them while others have requests, also before its own first one."""
    reference = lab.reference("mixed").outcomes
    lab.close()
    under_test = lab.engine(**options)
    under_test.on_workers(idle)
    outcomes = under_test.run(WORKLOADS["mixed"].jobs, lambda *_: under_test.on_workers(idle))
    assert worst_difference(outcomes, reference) == 0.0
