"""torch.compile: offload equals no offload there too, and both equal the eager engine up to rounding."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.golden.engine import worst_difference

pytestmark = pytest.mark.slow

COMPILED = {"enforce_eager": False, "compilation_config": {"mode": 3}}
WORKLOADS = ["short", "mixed", "prefix"]


def test_compiled_model(lab):
    eager = {workload: lab.reference(workload) for workload in WORKLOADS}
    compared = lab.compare_all(WORKLOADS, "glm-tiny", **COMPILED)
    model = lab.engine("glm-tiny", **COMPILED, offload={"topk_buffer_size": 128}).runner.get_model().model
    assert model.compiled
    assert not model.do_not_compile
    for workload, (result, difference) in compared.items():
        assert difference == 0.0
        assert result.trace.stats["fetched_bytes"] > 0
        rounding = worst_difference(result.outcomes, eager[workload].outcomes)
        assert 0 < rounding < 1e-4  # 0 would mean that nothing was compiled
    lab.close()
    gc.collect()
    # torch keeps the compiled model; the host pool must be gone all the same
    assert "/dev/shm/#" not in Path("/proc/self/maps").read_text(encoding="utf-8")
