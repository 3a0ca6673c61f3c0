"""Engines whose KV lives in a store, and what their connectors did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tests.golden.engine import EngineUnderTest, worst_difference
from tests.golden.lab import TINY, Lab
from tests.golden.workloads import WORKLOADS

DEEP = f"{TINY}+FFSSFSS"
"""With layers enough for four buffers to be shared."""


def transfer_config(shared: int | None, independent: Any = None, **options: Any) -> dict[str, Any]:
    """A `--kv-transfer-config` of AscendStoreConnector with the embedded store."""
    extra = {"backend": "local", "use_layerwise": True, "local_dram_size_GB": 0.125, **options}
    if shared is not None:
        extra["layerwise_num_shared_buffers"] = shared
    if independent is not None:
        extra["layerwise_independent_layers"] = independent
    policy = extra.pop("kv_load_failure_policy", "fail")
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def store_worker() -> Any:
    """The worker's half in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def stats() -> dict[str, float]:
    """Totals of the connector in this process."""
    worker = store_worker()
    return {**asdict(worker.pipeline.stats), "hit_tokens": worker.hit_tokens, "pins": worker.num_pins}


class StoreRuns:
    """Workloads on one engine with a store: `cold` and then `warm`, against no offload."""

    def __init__(self, lab: Lab, model: str, under_test: EngineUnderTest) -> None:
        self.lab, self.model, self.engine = lab, model, under_test

    def run(self, workload: str, **hooks: Any) -> tuple[Any, float, dict[str, float]]:
        """Outcomes, the worst difference from no offload, and what the connector did."""
        before = stats()
        outcomes = self.engine.run(WORKLOADS[workload].jobs, **hooks)
        # vLLM tells the connector with the next step who is done; check_idle made one.
        grown = {name: number - before[name] for name, number in stats().items()}
        assert stats()["pins"] == 0, "objects are still open"
        reference = self.lab.reference(workload, self.model).outcomes
        return outcomes, worst_difference(outcomes, reference), grown


@contextmanager
def store_engine(
    lab: Lab, transfer: dict[str, Any], model: str = TINY, workloads: tuple[str, ...] = (), **options: Any
) -> Iterator[StoreRuns]:
    """An engine with a store. `workloads` that will run on it; their references are made first."""
    for workload in workloads:
        lab.reference(workload, model)
    yield StoreRuns(lab, model, lab.engine(model, kv_transfer_config=transfer, **options))
