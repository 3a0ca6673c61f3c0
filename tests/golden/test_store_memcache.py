"""Prefill through shared buffers over real MemCache: tokens and logprobs equal no offload, cold and warm.

Real control plane, stand-in copy: see tests/hostsim.
"""

from __future__ import annotations

import hostsim
import pytest
from hostsim.cluster import MetaCluster
from store_lab import store_engine, transfer_config

MISSING = hostsim.missing()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"real MemCache: {MISSING}")]

TOLERANCE = 1e-4


def test_same_results_cold_and_warm(lab, tmp_path, monkeypatch):
    with MetaCluster(tmp_path, dram_size="128MB") as cluster:
        for name, value in cluster.environ.items():
            monkeypatch.setenv(name, value)
        hostsim.activate()
        transfer = transfer_config(2, [0], backend="memcache")
        del transfer["kv_connector_extra_config"]["local_dram_size_GB"]
        try:
            with store_engine(lab, transfer, workloads=("mixed", "prefix")) as runs:
                for workload in ("mixed", "prefix", "prefix"):
                    _, difference, did = runs.run(workload)
                    assert difference <= (TOLERANCE if workload == "prefix" else 0.0), workload
                    assert did["failed_requests"] == 0
                    assert did["loaded_bytes"] == did["needed_load_bytes"] > 0
                    if workload == "mixed":
                        assert did["saved_bytes"] > 0
                assert did["hit_tokens"] > 2000, "the second run of the same prompts loads them"
        finally:
            lab.close()  # the library's end waits for its MetaService
