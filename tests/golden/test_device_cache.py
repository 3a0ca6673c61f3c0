"""`keep_device_kv_cache`: the debugging aid compares every hot row, and notices a wrong one."""

from __future__ import annotations

import pytest

from tests.golden.engine import engine
from tests.golden.workloads import WORKLOADS
from vllm_kvoffload.sparse.offloaded import OffloadedKV

pytestmark = pytest.mark.slow

KEEP = {"topk_buffer_size": 64, "keep_device_kv_cache": True}


def test_results_are_the_same_and_every_decode_is_compared(lab, monkeypatch):
    lab.reference("mixed")
    compared = []
    original = OffloadedKV._compare

    def watched(self, *args):
        compared.append(self._layer)
        original(self, *args)

    monkeypatch.setattr(OffloadedKV, "_compare", watched)
    for workload in ("mixed", "prefix"):
        compared.clear()
        result, difference = lab.compare(workload, offload=KEEP)
        assert difference == 0.0
        decodes = sum(1 in step.values() for step in result.trace.schedule)
        assert len(compared) == decodes * 4
        assert set(compared) == {0, 1, 2, 3}
        assert result.trace.stats["prefill_bytes"] == 0


@pytest.mark.parametrize("layer", [0, 3])
def test_control_a_wrong_hot_row(lab, layer):
    lab.close()
    with engine(lab.checkpoint("glm-tiny"), KEEP) as under_test:

        def corrupt(_step, outcomes):
            if len(outcomes["job-1"].token_ids) == 8:
                under_test.manager.hot.layers[layer][under_test.row("job-1")].bitwise_xor_(1)

        with pytest.raises(RuntimeError, match=f"layer {layer}: a hot row differs"):
            under_test.run(WORKLOADS["mixed"].jobs, corrupt)
