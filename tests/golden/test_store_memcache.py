"""The same results with the real MemCache as store, which runs without an NPU over stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT, hostsim
from tests.golden.engine import Outcome, worst_difference
from tests.golden.lab import TINY
from tests.golden.store_lab import DEEP
from tests.hostsim.cluster import MetaCluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(hostsim.missing()), reason=hostsim.missing())]

PLANS = {
    "3-first": (DEEP, 3, [0], 4 * 384 + 2 * 256, ("mixed", "prefix", "prefix")),
    "1-last": (TINY, 1, [-1], 2 * 384 + 1 * 256, ("prefix", "prefix")),
    "all": (DEEP, None, "all", 7 * 384 + 3 * 256, ("prefix", "prefix")),
}
"""Model, buffers, independent layers, bytes of a token on the device, workloads. test_store.py runs more
plans, with the embedded store."""
CHILD_S = 400


@pytest.fixture(scope="module")
def runs(_lab, tmp_path_factory):
    """Results of each plan's engine. One process runs all and prints each plan's results when ready."""
    for model, *_, workloads in PLANS.values():
        for workload in workloads:
            _lab.reference(workload, model)
    _lab.close()
    plans = {
        name: (str(_lab.checkpoint(model)), shared, independent, workloads)
        for name, (model, shared, independent, _, workloads) in PLANS.items()
    }
    command = [sys.executable, "-m", "tests.golden.memcache_child", json.dumps(plans)]
    with MetaCluster(tmp_path_factory.mktemp("memcache"), dram_size="128MB") as cluster:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | cluster.environ,
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            check=False,
        )
    lines = [
        line.removeprefix("RESULTS ") for line in done.stdout.splitlines() if line.startswith("RESULTS ")
    ]
    found = {line["name"]: line for line in map(json.loads, lines)}
    assert found, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("plan", PLANS)
def test_same_results_cold_and_warm(lab, runs, plan):
    model, _, _, row_bytes, workloads = PLANS[plan]
    assert plan in runs, f"only {list(runs)} came to their end"
    assert runs[plan]["num_blocks"] == (32 << 20) // (64 * row_bytes)
    results = runs[plan]["results"]
    outcomes = [[Outcome(**outcome) for outcome in result["outcomes"]] for result in results]
    for workload, got in zip(workloads, outcomes, strict=True):
        difference = worst_difference(got, lab.reference(workload, model).outcomes)
        assert difference <= (1e-4 if workload == "prefix" else 0.0), workload
    # Whole blocks, and never the last token: all of it loaded, on every layer.
    assert [outcome.cached_tokens for outcome in outcomes[-1]] == [640, 704, 639, 640, 576, 192, 192]
    cold, warm = (result["stats"] for result in results[-2:])
    hit_tokens = warm["hit_tokens"] - cold["hit_tokens"]
    cached_tokens = sum(outcome.cached_tokens for outcome in outcomes[-1])
    assert hit_tokens == cached_tokens or (plan == "all" and 0 < hit_tokens < cached_tokens)
    assert warm["loaded_bytes"] > cold["loaded_bytes"]
    assert warm["loaded_bytes"] == warm["needed_load_bytes"]
    assert warm["failed_requests"] == warm["pins"] == 0
