"""Run inside the Ascend environment by test_ascend.py: the adapter on the simulated NPU.

Steps of prefill chunks, decodes and mixtures go through upstream's forward, with the offload and without.
What attention was given and what it returned is written to a file, with which test_ascend.py feeds the CPU
platform.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from adapter_model import BLOCK, STEPS, TYPES, Adapter, common_metadata, make_step, patch_tables
from simulated_npu import install

from vllm_kvoffload.platforms.ascend.attention import step_batch

MOVEMENTS = ("portable", "sparse_copy", "kernels")


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Queries and weights that the indexer was asked with."""
    log: list[Any] = []
    install(monkeypatch, 32, log)
    patch_tables(monkeypatch)
    return log


@pytest.fixture
def without(indexed: list[Any]) -> list[list[torch.Tensor]]:
    adapter = Adapter(None)
    outputs = list(adapter.run_all())
    indexed.clear()
    return outputs


@pytest.mark.parametrize("movement", MOVEMENTS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_same_outputs_as_upstream_without_offload(
    movement: str, seed: int | None, without: list[list[torch.Tensor]]
) -> None:
    adapter = Adapter(movement, seed)
    for number, (found, expected) in enumerate(zip(adapter.run_all(), without, strict=True)):
        for layer, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(ours, theirs), f"step {number}, layer {layer}"
    stats = adapter.offload.manager.stats  # type: ignore[union-attr]
    assert stats.hits > 0
    assert stats.misses > 0
    adapter.close()


@pytest.mark.parametrize("movement", MOVEMENTS)
def test_control_a_wrong_host_row(movement: str, without: list[list[torch.Tensor]]) -> None:
    adapter = Adapter(movement)
    different = False
    for found, expected in zip(adapter.run_all(), without, strict=True):
        adapter.offload.manager.store.join()  # type: ignore[union-attr]
        adapter.caches[1][1].view(-1)[:] += 1.0  # rope parts of layer 1, in host memory
        different |= not all(map(torch.equal, found, expected))
    assert different
    adapter.close()


def test_control_a_wait_that_does_not_happen(
    without: list[list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the join of host writes a decode reads rows that aren't there yet."""
    monkeypatch.setattr("vllm_kvoffload.sparse.host_store.HostStore.join", lambda _: None)
    monkeypatch.setattr("vllm_kvoffload.runtime.delay.DelayPlan.delay_s", lambda *_: 0.05)
    adapter = Adapter("portable", seed=3)
    found = list(adapter.run_all(6))
    assert not all(all(map(torch.equal, f, e)) for f, e in zip(found, without, strict=False))
    adapter.close()


def test_a_batch_is_read_off_real_metadata() -> None:
    step = make_step({"a": (5, 3), "b": (0, 2)})
    common = common_metadata(step, pad=3)
    padded = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)  # two requests that are padding
    common.query_start_loc_cpu, common.num_reqs = padded, 4
    common.seq_lens = torch.tensor([8, 2, 0, 0], dtype=torch.int32)
    common.block_table_tensor = torch.cat([step["blocks"], step["blocks"]])
    batch = step_batch(common, BLOCK)
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert batch.seq_lens.tolist() == [8, 2]
    assert torch.equal(batch.slot_mapping, step["slots"])
    assert torch.equal(batch.block_table, step["blocks"])


@pytest.fixture
def recorded(indexed: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """All that attention is given by the layers, to be given to the CPU platform."""
    records: list[dict[str, Any]] = []
    adapter = Adapter("portable", seed=5)
    keys: list[torch.Tensor] = []
    for impl in adapter.impls:
        attend, before, kv = (
            impl._execute_sparse_flash_attention_process,
            impl.indexer_select_pre_process,
            impl.kv,
        )

        def watched_attend(q: torch.Tensor, rope: torch.Tensor, *rest: Any, attend: Any = attend) -> Any:
            out = attend(q, rope, *rest)
            records[-1]["layers"][-1].update(q=torch.cat([q, rope], -1), out=out.clone())
            return out

        def watched_before(*args: Any, before: Any = before, **kwargs: Any) -> Any:
            keys.append(before(*args, **kwargs)[0])
            return keys[-1], None

        class WatchedKV:
            def __init__(self, inner: Any) -> None:
                self.append_inner, self.parts = inner.append, inner.parts

            def append(self, rows: Any, slots: torch.Tensor) -> None:
                records[-1]["layers"].append({"rows": torch.cat([p.clone() for p in rows.parts], -1)})
                self.append_inner(rows, slots)

        impl._execute_sparse_flash_attention_process = watched_attend
        impl.indexer_select_pre_process, impl.kv = watched_before, WatchedKV(kv)
    for step in STEPS:
        made = make_step(step)
        records.append(
            {"starts": np.array(made["starts"]), "lengths": np.array(made["lengths"]), "layers": []}
        )
        records[-1].update(blocks=made["blocks"], slots=made["slots"])
        keys.clear()
        indexed.clear()
        adapter.run(made)
        owners = [layer for layer, kind in enumerate(TYPES) if kind == "full"]
        for layer, key, (query, weights) in zip(owners, keys, indexed, strict=True):
            records[-1]["layers"][layer].update(key=key.squeeze(1), index_q=query, weights=weights)
    yield records
    adapter.close()


def test_records_for_the_cpu_platform(recorded: list[dict[str, Any]]) -> None:
    assert [len(record["layers"]) for record in recorded] == [len(TYPES)] * len(STEPS)
    torch.save(recorded, os.environ["KVOFFLOAD_RECORDS"])
