"""The same results with the real MemCache as store, which runs without an NPU over stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import Outcome, worst_difference

sys.path.insert(0, str(Path(__file__).parents[1]))

import hostsim
from hostsim.cluster import MetaCluster

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(hostsim.missing()), reason=hostsim.missing())]

WORKLOADS = ("long", "prefix", "prefix")
CHILD_S = 300


def test_same_results_cold_and_warm(lab, tmp_path):
    references = [lab.reference(name).outcomes for name in WORKLOADS]
    lab.close()
    child = Path(__file__).with_name("memcache_child.py")
    command = [sys.executable, str(child), str(lab.checkpoint("glm-tiny")), *WORKLOADS]
    with MetaCluster(tmp_path, dram_size="64MB") as cluster:
        environ = os.environ | cluster.environ
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=CHILD_S, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULTS ")]
    assert lines, done.stderr[-3000:]
    results = json.loads(lines[0].removeprefix("RESULTS "))
    outcomes = [[Outcome(**outcome) for outcome in result["outcomes"]] for result in results]
    differences = [worst_difference(a, b) for a, b in zip(outcomes, references, strict=True)]
    assert differences[0] == 0.0
    assert max(differences) < 1e-4
    assert [outcome.cached_tokens for outcome in outcomes[2]] == [640, 704, 639, 640, 576, 192, 192]
    assert results[2]["stats"]["hit_tokens"] > results[1]["stats"]["hit_tokens"] > 0
    assert results[2]["stats"]["failed_requests"] == 0
    assert results[2]["stats"]["pins"] == 0
