"""Run inside the Ascend environment by test_ascend.py: prefill whose layers share memory, simulated.

The program of adapter_model (chunks, decodes, mixtures) runs through upstream's forward, with all KV in our
store and a few buffers on the device. Reference is upstream with whole caches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core import kv_cache_utils

from tests.ascend.adapter_model import BLOCK, STEPS, TYPES, Adapter, Setup, drafted, make_step, patch_tables
from tests.ascend.prefill_engine import (
    PrefillEngine,
    cache_config,
    cache_specs,
    engine_config,
    joint_transfer,
    prompt,
    step_queries,
    store_transfer,
)
from tests.ascend.runner_parts import make_runner
from tests.ascend.simulated_memfabric import HOST, Memmove, free_port
from tests.ascend.simulated_npu import SimulatedNPU, install
from vllm_kvoffload.connectors.ascend_store import connector as store_connector
from vllm_kvoffload.connectors.ascend_store.connector import AscendStoreConnector
from vllm_kvoffload.connectors.multi import KVOffloadMultiConnector
from vllm_kvoffload.connectors.sfa_remote_d2h import connector as remote_connector
from vllm_kvoffload.connectors.sfa_remote_d2h.connector import SfaRemoteD2HConnector
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import DecodeMetadata
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.pipeline import LayerPipeline, PipelineLimits
from vllm_kvoffload.layerwise.slot_gate import SlotGates
from vllm_kvoffload.platforms.ascend.prefill_attention import SharedBufferSFAImpl
from vllm_kvoffload.runtime.npu import NPURuntime
from vllm_kvoffload.store import staged_copies

Outputs = list[list[torch.Tensor]]
PLANS = [(1, [0]), (1, []), (3, []), (None, "all")]
SHARING = ["1 buffer", "1 buffer for all", "3 buffers", "all independent"]
BUFFERS = dict(zip(SHARING, (2, 1, 3, 4), strict=True))


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> SimulatedNPU:
    """One process on a simulated NPU."""
    made = SimulatedNPU()
    monkeypatch.setattr(torch, "npu", made)
    monkeypatch.setenv("VLLM_HOST_IP", HOST)
    return made


@pytest.fixture
def indexed(npu: SimulatedNPU, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: ARG001
    """Queries and weights that the indexer was asked with."""
    log: list[Any] = []
    install(monkeypatch, 32, log)
    patch_tables(monkeypatch)
    return log


@pytest.fixture
def whole(indexed: list[Any]) -> Adapter:  # noqa: ARG001
    """Upstream with caches of its own for each layer."""
    return Adapter(Setup())


@pytest.fixture
def expected(whole: Adapter, indexed: list[Any]) -> Outputs:
    outputs = list(whole.run_all())
    indexed.clear()
    return outputs


def run_all(engine: PrefillEngine, steps: int | None = None) -> Iterator[list[torch.Tensor]]:
    """Outputs of the program's steps."""
    for name in STEPS[0]:
        engine.add(name, prompt(name))
    for number in range(len(STEPS[:steps])):
        yield engine.step(step_queries(number), pad=number % 3)


def differences(engine: PrefillEngine, expected: Outputs, steps: int | None = None) -> list[str]:
    """Where outputs are others, or something was lost."""
    wrong = []
    for number, (found, wanted) in enumerate(zip(run_all(engine, steps), expected, strict=False)):
        wrong += [f"step {number} lost blocks {engine.lost}"] if engine.lost else []
        for layer, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            wrong += [] if torch.equal(ours, theirs) else [f"step {number}, layer {layer}"]
    return wrong


@pytest.fixture(params=[None, "1:3", "2:3"], ids=["no delays", "delays 1", "delays 2"])
def delays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", request.param)


@pytest.fixture
def device_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The store takes the caches for a device's memory. Directions in which pieces went there."""
    real = Layout.of

    def of(caches: Any, num_blocks: int) -> Layout:
        layout = real(caches, num_blocks)
        regions = tuple(type(region)(region.address, region.nbytes, "npu") for region in layout.regions)
        return replace(layout, regions=regions)

    moved: list[str] = []
    copy = staged_copies.StagedCopies._copy

    def watched(self: Any, stage: Any, spans: Any, direction: Any, ranges: Any) -> None:
        moved.append(direction)
        copy(self, stage, spans, direction, ranges)

    monkeypatch.setattr(Layout, "of", staticmethod(of))
    monkeypatch.setattr(staged_copies.StagedCopies, "_copy", watched)
    monkeypatch.setattr(staged_copies, "STAGE_BYTES", 20000)
    monkeypatch.setattr(staged_copies, "page_locked", lambda n: torch.empty(n, dtype=torch.uint8))
    return moved


# --------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.usefixtures("delays")
def test_same_outputs_as_upstream_with_whole_caches(
    sharing: str, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PrefillEngine(monkeypatch, store_transfer(*PLANS[SHARING.index(sharing)]))
    assert isinstance(engine.worker, AscendStoreConnector)
    assert isinstance(engine.worker._runtime, NPURuntime)
    assert len({cache[0].data_ptr() for cache in engine.adapter.caches}) == BUFFERS[sharing]
    assert differences(engine, expected) == []
    stats = engine.worker.worker.pipeline.stats
    assert (stats.loaded_bytes > 0) == (sharing != "all independent")
    assert stats.loaded_bytes == stats.needed_load_bytes
    engine.close()


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("plan", [(1, []), (2, [0])], ids=str)
def test_same_outputs_with_drafts(
    plan: tuple[int, list[int]], drafts: int, indexed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MTP layer shares memory with the others; a step's later draft passes run behind its save."""
    expected = list(Adapter(Setup(drafts=drafts)).run_drafting())
    indexed.clear()
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", f"{drafts}:3")
    engine = PrefillEngine(monkeypatch, store_transfer(*plan), drafts)
    assert len({cache[0].data_ptr() for cache in engine.adapter.caches}) == sum((plan[0], len(plan[1])))
    for name, tokens in (("a", 40), ("b", 25)):
        engine.add(name, prompt(name)[:tokens])
    wrong = []
    for number, (step, rejected) in enumerate(drafted(drafts)):
        queries = {name: count for name, (_, count) in step.items()}
        found = engine.step(queries, number % 3, rejected)
        pairs = zip(found, expected[number], strict=True)
        wrong += [f"step {number}, pass {n}" for n, (f, e) in enumerate(pairs) if not torch.equal(f, e)]
        assert engine.lost == set()
    assert wrong == []
    assert engine.worker.worker.pipeline.stats.loaded_bytes > 0
    engine.close()


def test_same_outputs_through_page_locked_memory(
    device_memory: list[str], expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "3:2")
    engine = PrefillEngine(monkeypatch, store_transfer(1, [0]))
    assert differences(engine, expected) == []
    assert {"load", "save"} == set(device_memory)
    engine.close()


@pytest.mark.parametrize("plan", PLANS, ids=SHARING)
def test_a_prefix_comes_out_of_the_store(
    plan: tuple[Any, Any], whole: Adapter, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows exist nowhere else: the caches' previous contents are overwritten first."""
    engine = PrefillEngine(monkeypatch, store_transfer(*plan))
    assert differences(engine, expected) == []
    tokens = prompt("a")
    for name in ("a", "b"):
        engine.finish(name)
    for cache in engine.adapter.caches:
        for tensor in cache:
            tensor.fill_(7.0)
    found = engine.add("a", [*tokens, *range(20)], req_id="again")
    assert found == len(tokens) // BLOCK * BLOCK
    outputs = engine.step({"a": 20})
    wanted = whole.run(make_step({"a": (found, 20)}))
    assert all(map(torch.equal, outputs, wanted))
    assert engine.lost == set()
    engine.close()


def test_lost_blocks_are_reported(expected: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk's prefix is gone: its request loses its blocks, its neighbour nothing."""
    engine = PrefillEngine(monkeypatch, store_transfer(1, [0]))
    steps = run_all(engine)
    next(steps)
    held = engine.worker.worker._requests
    real = engine.worker._store.open_read
    gone = engine.worker.worker._names(held["b"], 0)
    monkeypatch.setattr(
        engine.worker._store, "open_read",
        lambda keys, lease: [None if k in gone else o for k, o in zip(keys, real(keys, lease), strict=True)],
    )  # fmt: skip
    blocks = list(held["b"].blocks)
    outputs = engine.step(step_queries(1), pad=1)
    assert engine.lost == set(blocks[: -(-25 // BLOCK)])
    count = step_queries(1)["a"]
    for ours, theirs in zip(outputs, expected[1], strict=True):
        assert torch.equal(ours[:count], theirs[:count])
    engine.close()


# ------------------------------------------------------------------------------------------------- controls


def _no_wait_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPipeline, "_join_load", lambda *_: None)


def _no_wait_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AscendStoreConnector, "wait_for_layer_load", lambda *_: None)


def _no_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerPipeline, "_acquire", lambda self, position: self.gates.occupy(position))


@pytest.mark.parametrize("plant", [_no_wait_for_loads, _no_wait_of_attention, _no_gates])
def test_control_a_wait_that_does_not_happen(
    plant: Any, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With side streams that are slow as a whole."""
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", "1:5")
    monkeypatch.setattr("vllm_kvoffload.runtime.delay.DelayPlan.delay_s", lambda *_: 0.02)
    monkeypatch.setattr(store_connector, "PipelineLimits", partial(PipelineLimits, deadline_s=0.5))
    engine = PrefillEngine(monkeypatch, store_transfer(1, []))
    plant(monkeypatch)
    assert any("layer" in wrong for wrong in differences(engine, expected, 3))
    engine.close()


@pytest.mark.usefixtures("indexed")
def test_nothing_is_saved_before_the_device_has_computed_it(
    npu: SimulatedNPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PrefillEngine(monkeypatch, store_transfer(None, [0]))  # no layer's memory is waited for
    pipeline = engine.worker.worker.pipeline
    saved: list[int] = []
    real = LayerPipeline.finish

    def finish(self: LayerPipeline) -> dict[str, str]:
        time.sleep(0.2)
        saved.append(pipeline.stats.saved_bytes)
        npu.busy = False
        return real(self)

    monkeypatch.setattr(LayerPipeline, "finish", finish)
    npu.busy = True
    next(run_all(engine))
    assert saved == [0]
    assert pipeline.stats.saved_bytes > 0
    engine.close()


def test_a_step_ends_when_the_device_has_computed_it(
    npu: SimulatedNPU, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft passes may go on after the last layer's save; the next step's loads must not meet them."""
    engine = PrefillEngine(monkeypatch, store_transfer(1, [0]))
    real = LayerPipeline.finish
    busy_after: list[bool] = []

    def finish(self: LayerPipeline) -> dict[str, str]:
        npu.busy = True
        timer = threading.Timer(0.3, lambda: setattr(npu, "busy", False))
        timer.start()
        lost = real(self)
        busy_after.append(npu.busy)
        timer.join()
        return lost

    monkeypatch.setattr(LayerPipeline, "finish", finish)
    assert differences(engine, expected, 2) == []
    assert busy_after == [False, False]
    engine.close()


# --------------------------------------------------------------------------------------------- beside decode


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemFabric's transfer engine, in this process."""
    monkeypatch.setattr(remote_connector, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(remote_connector, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(remote_connector, "make_engine", lambda _, **options: Memmove(**options))


def decode_rank(engine: PrefillEngine, port: int) -> tuple[SfaRemoteD2HConnector, dict[str, Any]]:
    """A decode engine's connector with plain tensors for caches."""
    transfer = KVTransferConfig(
        kv_connector="SfaRemoteD2HConnector", kv_role="kv_consumer", kv_port=port, engine_id="decode",
        kv_connector_extra_config={"transfer_backend": "memfabric"},
    )  # fmt: skip
    config = SimpleNamespace(**{**vars(engine.config), "kv_transfer_config": transfer, "instance_id": "d"})
    groups = SimpleNamespace(num_blocks=engine.adapter.caches[0][0].shape[0], kv_cache_groups=[None])
    made = SfaRemoteD2HConnector(config, KVConnectorRole.WORKER, groups)
    entries = {name: tuple(map(torch.zeros_like, entry)) for name, entry in engine.entries.items()}
    made.register_kv_caches(entries)
    return made, entries


def hand_over(engine: PrefillEngine) -> tuple[Outputs, dict[str, Any]]:
    """Request "a" is computed in two chunks and pulled: outputs, and decode's caches."""
    port = free_port()
    decode, entries = decode_rank(engine, port)
    tokens = prompt("a")
    params = {
        "do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "decode",
        "remote_host": HOST, "remote_port": port, "remote_tp_size": 1, "remote_pcp_size": 1,
        "remote_dcp_size": 1, "remote_cached_tokens": 0, "remote_secret": "ab",
    }  # fmt: skip
    table = make_step({"a": (0, len(tokens))})["blocks"][0].tolist()[: -(-len(tokens) // BLOCK)]
    receive = Receive("a", "a", prompt_digest(tokens), tuple(table), 0)
    decode.bind_connector_metadata(DecodeMetadata([receive], secret="ab"))
    decode.start_load_kv(SimpleNamespace(attn_metadata=object()))
    engine.add("a", tokens, params=params)
    outputs = [engine.step({"a": 40}), engine.step({"a": 23})]
    done: set[str] = set()
    end = time.monotonic() + 30
    while not done and time.monotonic() < end:
        done |= decode.get_finished(set())[1] or set()
        time.sleep(0.01)
    failed = decode.get_block_ids_with_load_errors()
    decode.shutdown()
    assert done == {"a"}
    assert failed == set()
    return outputs, entries


def wrong_rows(whole: Adapter, entries: dict[str, Any]) -> list[str]:
    """Caches of decode whose rows of request "a" are not those of upstream with whole caches."""
    slots = make_step({"a": (0, len(prompt("a")))})["slots"]
    names = [name for name in entries if "indexer" not in name]
    wrong = []
    for name, cache in zip(names, whole.caches, strict=True):
        found = [*entries[name], *entries.get(name.rsplit(".", 1)[0] + ".indexer.k_cache", ())]
        for number, (ours, theirs) in enumerate(zip(found, cache, strict=True)):
            rows = [t.view(-1, t.shape[-1])[slots] for t in (ours, theirs)]
            if not torch.equal(*rows):
                wrong.append(f"{name}, tensor {number}")
    return wrong


@pytest.fixture
def handed_over(whole: Adapter) -> Outputs:
    """Computes the request with upstream's code."""
    return [whole.run(make_step({"a": step})) for step in ((0, 40), (40, 23))]


@pytest.mark.parametrize(("shared", "independent"), [(1, []), (2, [0])])
@pytest.mark.usefixtures("remote")
def test_decode_reads_buffers_before_they_are_used_again(
    shared: int, independent: list[int], whole: Adapter, handed_over: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    slow_reads(monkeypatch, 0.02)
    engine = PrefillEngine(monkeypatch, joint_transfer(shared, independent))
    assert type(engine.worker) is KVOffloadMultiConnector
    outputs, entries = hand_over(engine)
    for found, wanted in zip(outputs, handed_over, strict=True):
        assert all(map(torch.equal, found, wanted))
    assert wrong_rows(whole, entries) == []
    engine.close()


@pytest.mark.usefixtures("remote", "handed_over")
def test_control_decode_is_not_waited_for(whole: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_reads(monkeypatch, 0.05)
    monkeypatch.setattr(SlotGates, "use_guard", lambda *_: None)
    engine = PrefillEngine(monkeypatch, joint_transfer(1, []))
    _, entries = hand_over(engine)
    assert wrong_rows(whole, entries) != []
    engine.close()


def slow_reads(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    read = Memmove.read

    def slowly(self: Memmove, peer: Any, spans: Any) -> Any:
        time.sleep(seconds)
        return read(self, peer, spans)

    monkeypatch.setattr(Memmove, "read", slowly)


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    "types", [("full", "shared", "full", "shared"), ("full",) * 4], ids=["shared", "full"]
)
def test_the_scheduler_sees_what_fits(types: tuple[str, ...]) -> None:
    """vLLM divides the worker's reported bytes by the pages of all layers."""
    config = engine_config(store_transfer(1, [0]))
    config.model_config.hf_text_config.indexer_types = list(types)
    config.cache_config.num_gpu_blocks_override = None
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    settings = EngineSettings.of(config, "npu")
    plan = settings.shared_buffers
    assert plan is not None
    device_bytes = 123 * plan.physical_bytes * BLOCK + 5
    reported = settings.shared_buffer_bytes(device_bytes)
    specs = cache_specs(types)
    assert sum(spec.page_size_bytes for spec in specs.values()) == plan.logical_bytes * BLOCK
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    made = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, reported)
    assert made.num_blocks == 123


@pytest.mark.usefixtures("npu")
def test_quantised_indexer_caches_are_shared() -> None:
    config = engine_config(store_transfer(1, []))
    config.additional_config["enable_sparse_li_c8"] = True
    caches = cache_config(quantised=True)
    runner = make_runner(config, caches)
    for layer in config.compilation_config.static_forward_context.values():
        layer.impl.enable_mlapo = False
    entries = list(runner.initialize_kv_cache_tensors(caches).values())
    assert [len(entry) for entry in entries] == [2, 2, 2, 2, 2, 2]
    assert [entry[1].dtype for entry in entries[1::3]] == [torch.float16] * 2
    addresses = {tuple(tensor.data_ptr() for tensor in entry) for entry in entries}
    assert len(addresses) == 2  # one main cache, one of the indexers


@pytest.mark.usefixtures("npu")
def test_mlapo_is_off_where_layers_share_memory() -> None:
    """It writes a layer's rows before it waits; in upstream's forward everything else waits first."""
    seen: list[bool] = []
    impl = object.__new__(SharedBufferSFAImpl)
    impl.enable_mlapo = True
    with pytest.MonkeyPatch.context() as patch:
        base = SharedBufferSFAImpl.__mro__[1]
        patch.setattr(base, "process_weights_after_loading", lambda self, _: seen.append(self.enable_mlapo))
        impl.process_weights_after_loading(torch.bfloat16)
    assert seen == [False]
    caches = cache_config()
    config = engine_config(store_transfer(1, []))
    runner = make_runner(config, caches)
    for layer in config.compilation_config.static_forward_context.values():
        layer.impl.enable_mlapo = True
    with pytest.raises(RuntimeError, match="MLAPO"):
        runner.initialize_kv_cache_tensors(caches)


# --------------------------------------------------------------------------------------- for the CPU platform


def test_records_for_the_cpu_platform(indexed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All that attention was given by layers that share one buffer, to be given to the CPU platform."""
    engine = PrefillEngine(monkeypatch, store_transfer(1, [0]))
    records: list[dict[str, Any]] = []
    keys: list[torch.Tensor] = []
    watch(engine, records, keys)
    for name in STEPS[0]:
        engine.add(name, prompt(name))
    for number, step in enumerate(STEPS):
        made = make_step(step)
        records.append(
            {"starts": np.array(made["starts"]), "lengths": np.array(made["lengths"]), "layers": []}
        )
        records[-1].update(blocks=made["blocks"], slots=made["slots"])
        keys.clear()
        indexed.clear()
        engine.step(step_queries(number))
        owners = [layer for layer, kind in enumerate(TYPES) if kind == "full"]
        for layer, key, (query, weights) in zip(owners, keys, indexed, strict=True):
            records[-1]["layers"][layer].update(key=key.squeeze(1), index_q=query, weights=weights)
    assert [len(record["layers"]) for record in records] == [len(TYPES)] * len(STEPS)
    torch.save(records, Path(os.environ["KVOFFLOAD_RECORDS"]) / "shared buffers.pt")
    engine.close()


def watch(engine: PrefillEngine, records: list[dict[str, Any]], keys: list[torch.Tensor]) -> None:
    """Notes rows, queries and results of each layer's attention."""
    for layer, impl in enumerate(engine.adapter.impls):
        attend, before, write = (
            impl._execute_sparse_flash_attention_process,
            impl.indexer_select_pre_process,
            impl.exec_kv,
        )

        def watched_attend(q: torch.Tensor, rope: torch.Tensor, *rest: Any, attend: Any = attend) -> Any:
            out = attend(q, rope, *rest)
            records[-1]["layers"][-1].update(q=torch.cat([q, rope], -1), out=out.clone())
            return out

        def watched_before(*args: Any, before: Any = before, **kwargs: Any) -> Any:
            keys.append(before(*args, **kwargs)[0])
            return keys[-1], None

        def watched_write(
            rows: Any, cos: Any, sin: Any, cache: Any, slots: Any, metadata: Any, write: Any = write,
            layer: int = layer,
        ) -> Any:  # fmt: skip
            result = write(rows, cos, sin, cache, slots, metadata)
            parts = [part.view(-1, part.shape[-1])[slots.long()].clone() for part in cache[:2]]
            records[-1]["layers"].append({"layer": layer, "rows": torch.cat(parts, -1)})
            return result

        impl._execute_sparse_flash_attention_process = watched_attend
        impl.indexer_select_pre_process, impl.exec_kv = watched_before, watched_write
