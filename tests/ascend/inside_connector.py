"""Run inside the Ascend environment by test_ascend.py: caches and connectors, from allocation to transfer.

Upstream's own code allocates prefill's caches, our runner decode's, in MemFabric's memory; both are
registered with our connector, which is a subclass of this vLLM's; then prefill saves layer by layer and
decode pulls. The NPU and MemFabric are simulated.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tests.ascend.runner_parts import make_runner
from tests.ascend.simulated_memfabric import HOST, FakeOffload, Memmove, free_port
from tests.ascend.simulated_npu import SimulatedNPU, scatter_nd_update
from vllm_kvoffload.connectors.sfa_remote_d2h import connector as connector_module
from vllm_kvoffload.connectors.sfa_remote_d2h.connector import SfaRemoteD2HConnector
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    PrefillStep,
    Target,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Receive
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.platforms.ascend import offload as offload_module
from vllm_kvoffload.platforms.ascend.rows import SparseCopyRows

TYPES = ("full", "shared", "full")
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(len(TYPES))]
BLOCKS, BLOCK = 6, 128
HF = SimpleNamespace(
    model_type="deepseek_v32", num_hidden_layers=3, indexer_types=list(TYPES), kv_lora_rank=512,
    qk_rope_head_dim=64, index_topk=2048, index_head_dim=128,
)  # fmt: skip


def cache_config(quantised: bool) -> KVCacheConfig:
    specs = {}
    for name, kind in zip(NAMES, TYPES, strict=True):
        dims = (512, 64, 128 if kind == "full" else 0)
        specs[name] = AscendMLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=sum(dims), sparse_head_dim=dims, dtype=torch.bfloat16,
            cache_sparse_li_c8=quantised and kind == "full",
        )  # fmt: skip
    tensors = [KVCacheTensor(size=spec.page_size_bytes * BLOCKS, shared_by=[n]) for n, spec in specs.items()]
    group = KVCacheGroupSpec(NAMES, UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])


def engine(role: str, port: int, quantised: bool) -> Any:
    """As much of an engine's configuration as runner, offload and connector look at."""
    options: dict[str, Any] = {"enable_sparse_li_c8": quantised}
    if role == "kv_consumer":
        options["sparse_kv_offload_config"] = {
            "enabled": True, "topk_buffer_size": 4096, "dram_size_per_dp_GB": 1, "prefill_buffers": 2,
        }  # fmt: skip
    transfer = KVTransferConfig(
        kv_connector="SfaRemoteD2HConnector", kv_role=role, kv_port=port, engine_id=role,
        kv_connector_extra_config={"transfer_backend": "memfabric"},
    )  # fmt: skip
    return SimpleNamespace(
        additional_config=options, kv_transfer_config=transfer, speculative_config=None, quant_config=None,
        instance_id=f"{role}-{port}",
        model_config=SimpleNamespace(
            hf_text_config=HF, dtype=torch.bfloat16, max_model_len=512, model="m", enforce_eager=True,
            enable_sleep_mode=False,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=1),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
        ),
    )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeOffload:
    """One process on a simulated NPU with MemFabric."""
    import torch_npu

    monkeypatch.setenv("VLLM_HOST_IP", HOST)
    monkeypatch.setattr(torch, "npu", SimulatedNPU())
    monkeypatch.setattr(torch_npu, "npu_scatter_nd_update_", scatter_nd_update)
    monkeypatch.setattr(GPUModelRunner, "shutdown", lambda _: None)  # it looks for a device
    fake = FakeOffload()
    monkeypatch.setattr(offload_module, "load_offload", lambda: fake)
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
    monkeypatch.setattr(offload_module, "get_tp_group", lambda: group)
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(connector_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(connector_module, "make_engine", lambda _, **options: Memmove(**options))
    return fake


@pytest.mark.parametrize("quantised", [False, True], ids=["model's type", "quantised indexer"])
def test_register_save_and_load(machine: FakeOffload, quantised: bool) -> None:
    port, caches = free_port(), cache_config(quantised)
    parts: dict[str, Any] = {}
    for role in ("kv_producer", "kv_consumer"):
        config = engine(role, port, quantised)
        runner = make_runner(config, caches)
        entries = runner.initialize_kv_cache_tensors(caches)
        connector = SfaRemoteD2HConnector(config, KVConnectorRole.WORKER, caches)
        assert isinstance(connector, KVConnectorBase_V1)
        connector.register_kv_caches(entries)
        parts[role] = SimpleNamespace(runner=runner, entries=entries, connector=connector)
    prefill, decode = parts["kv_producer"], parts["kv_consumer"]
    assert list(prefill.entries) == list(decode.entries)
    assert [len(e) for e in prefill.entries.values()] == [2, 1 + quantised, 2, 2, 1 + quantised]
    assert machine.config.alloc_size == machine.config.reserve_size == 1 << 30
    assert isinstance(decode.runner.offload.manager.host_rows.row_ops, SparseCopyRows)
    for entry in prefill.entries.values():
        for tensor in entry:
            assert tensor.shape[:2] == (BLOCKS, BLOCK)
            tensor.view(torch.uint8).random_(0, 255)
    transfer(prefill.connector, decode.connector, port, source=[4, 1], target=[2, 5])
    for name, entry in decode.entries.items():
        for ours, theirs in zip(entry, prefill.entries[name], strict=True):
            assert torch.equal(ours[[2, 5]].view(torch.uint8), theirs[[4, 1]].view(torch.uint8)), name
            assert not ours[[0, 1, 3, 4]].view(torch.uint8).any(), name
    for layer, name in enumerate(NAMES):  # attention, manager and connector share one memory
        context = decode.runner.compilation_config.static_forward_context
        bound = context[name].kv_cache
        assert bound[0].data_ptr() == decode.entries[name][0].data_ptr()
        assert bound[0].data_ptr() == decode.runner.offload.manager.host_rows.layers[layer].addresses[0]
        assert context[name].impl.layer_index == layer
        assert prefill.runner.compilation_config.static_forward_context[name].impl.offload is None
    for part in (prefill, decode):
        part.connector.shutdown()
    decode.runner.shutdown()
    assert machine.ended


def transfer(prefill: Any, decode: Any, port: int, source: list[int], target: list[int]) -> None:
    """One request, through the hooks in vLLM's order."""
    digest, context = prompt_digest([1]), SimpleNamespace(attn_metadata=object())
    decode.bind_connector_metadata(DecodeMetadata([Receive("r", "r", digest, tuple(target), 0)], secret="ab"))
    decode.start_load_kv(context)
    step = PrefillStep(
        "r", "r", Target(HOST, port, 1, "ab"), digest, len(source), True, 0, tuple(source), True
    )
    prefill.bind_connector_metadata(PrefillMetadata([step]))
    prefill.start_load_kv(context)
    torch.npu.busy = True
    for name in NAMES:
        prefill.wait_for_layer_load(name)
        prefill.on_kv_cache_written(name)
        prefill.save_kv_layer(name, [], None)
    prefill.wait_for_save()
    time.sleep(0.2)
    assert decode.connector_worker.bytes_read == 0  # the device is still writing
    torch.npu.busy = False
    done: set[str] = set()
    end = time.monotonic() + 20
    while not done:
        assert time.monotonic() < end
        done |= decode.get_finished(set())[1]
        time.sleep(0.01)
    assert done == {"r"}
    assert decode.get_block_ids_with_load_errors() == set()
    prefill.bind_connector_metadata(PrefillMetadata(held=["r"]))
    while not prefill.get_finished(set())[0]:
        assert time.monotonic() < end
        time.sleep(0.01)
