"""CPU model runner of DSA models: owns the main KV's location."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.utils import bind_kv_cache, clear_layer_kv_caches

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.cpu.attention import CPUSparseMLAImpl
from vllm_kvoffload.platforms.cpu.drafter import KVOffloadProposer
from vllm_kvoffload.platforms.cpu.indexer import CPUIndexerCache
from vllm_kvoffload.platforms.cpu.layer_loads import AwaitedKV
from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata
from vllm_kvoffload.platforms.cpu.offload import CPUOffload
from vllm_kvoffload.platforms.cpu.sampling import SoundCPUModelRunner
from vllm_kvoffload.platforms.parts import add_load_errors
from vllm_kvoffload.sparse.offloaded import OffloadedKV
from vllm_kvoffload.sparse.paged import PagedKV
from vllm_kvoffload.sparse.step import StepBatch

logger = get_logger(__name__)


class KVOffloadCPUModelRunner(SoundCPUModelRunner):
    """vLLM's CPU runner; binds a :class:`LayerKV` to every sparse attention layer.

    With offload, vLLM's cache tensors are only the indexers' key caches; the main KV tensor passed to vLLM
    and connectors is the host pool's.
    """

    offload: CPUOffload | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, settings: EngineSettings) -> None:
        super().__init__(vllm_config, device)
        self.settings = settings
        self._proposer: KVOffloadProposer | None = None
        if isinstance(getattr(self, "drafter", None), EagleProposer):
            self.drafter = self._proposer = KVOffloadProposer(self.vllm_config, self.device, self)

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        if self.compilation_config.mode != CompilationMode.NONE:
            for model in (self.model, getattr(getattr(self, "drafter", None), "model", None)):
                if isinstance(model, torch.nn.Module):
                    make_experts_opaque(model)

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> dict[str, torch.Tensor]:
        plan = self.settings.shared_buffers
        if not self.settings.offload.enabled:
            if plan is not None:
                with kv_cache_allocation_context or nullcontext():
                    caches = self._initialize_shared(plan, kv_cache_config)
            else:
                caches = super().initialize_kv_cache_tensors(
                    kv_cache_config, kernel_block_sizes, kv_cache_allocation_context
                )
            for layer in self._sparse_layers(caches):
                layer.impl.kv = AwaitedKV(layer.kv_cache, layer.layer_name)
            return caches
        with kv_cache_allocation_context or nullcontext():
            return self._initialize_offload(
                CPUOffload(self.vllm_config, self.settings, kv_cache_config.num_blocks), kv_cache_config
            )

    def _initialize_shared(self, plan: BufferPlan, kv_cache_config: KVCacheConfig) -> dict[str, torch.Tensor]:
        """Allocates the caches of layers that share memory: one tensor per buffer, under all its layers'
        names."""
        context = self.compilation_config.static_forward_context
        main_dtype = self.model_config.dtype
        assert isinstance(main_dtype, torch.dtype)
        slot_of = {layer.index: plan.slot_of[position] for position, layer in enumerate(plan.layers)}
        buffers: dict[tuple[int, bool], torch.Tensor] = {}
        caches: dict[str, torch.Tensor] = {}
        for name in (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names):
            layer = context[name]
            indexer = isinstance(layer, CPUIndexerCache)
            width = layer.head_dim if indexer else layer.head_size
            dtype = layer.dtype if indexer else main_dtype
            shape = (kv_cache_config.num_blocks, 1, self.cache_config.block_size, width)
            key = (slot_of[extract_layer_index(name)], indexer)
            if key not in buffers:
                buffers[key] = torch.zeros(shape, dtype=dtype)
            if buffers[key].shape != shape or buffers[key].dtype != dtype:
                raise RuntimeError(f"{name} differs from the cache it shares memory with: {shape}, {dtype}")
            caches[name] = buffers[key]
        logger.info("%s", plan.describe())
        bind_kv_cache(caches, context, self.kv_caches, kv_cache_groups=kv_cache_config.kv_cache_groups)
        return caches

    def _initialize_offload(
        self, offload: CPUOffload, kv_cache_config: KVCacheConfig
    ) -> dict[str, torch.Tensor]:
        self.offload = offload
        if self._proposer is not None:
            self._proposer.before_pass = self._begin_draft
        context = self.compilation_config.static_forward_context
        dtype, num_blocks = self.model_config.dtype, kv_cache_config.num_blocks
        assert isinstance(dtype, torch.dtype)
        block_size = self.cache_config.block_size
        caches: dict[str, torch.Tensor] = {}
        for name in (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names):
            layer = context[name]
            if isinstance(layer, CPUIndexerCache):
                caches[name] = torch.zeros((num_blocks, 1, block_size, layer.head_dim), dtype=layer.dtype)
            else:
                caches[name] = offload.host_cache(extract_layer_index(name), dtype)
        bind_kv_cache(caches, context, self.kv_caches, kv_cache_groups=kv_cache_config.kv_cache_groups)
        for layer in self._sparse_layers(caches):
            device = None
            if offload.keep_device:
                device = PagedKV(torch.zeros_like(layer.kv_cache))
            layer.impl.kv = OffloadedKV(offload.manager, extract_layer_index(layer.layer_name), device)
        return caches

    def _sparse_layers(self, caches: dict[str, torch.Tensor]) -> list[Any]:
        layers = (self.compilation_config.static_forward_context[name] for name in caches)
        return [layer for layer in layers if isinstance(getattr(layer, "impl", None), CPUSparseMLAImpl)]

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        if self.offload is not None:
            manager = self.offload.manager
            manager.release(scheduler_output.finished_req_ids)
            manager.release(scheduler_output.preempted_req_ids or ())
            if scheduler_output.kv_cache_block_copies:
                manager.host_rows.join()
            if getattr(scheduler_output.kv_connector_metadata, "receives", None):
                # These blocks are filled from outside now: no rank may still write for a former owner.
                manager.host_rows.join()
                manager.host_rows.await_ranks()
        return super()._update_states(scheduler_output)

    def _build_attention_metadata(self, num_tokens: int, num_reqs: int, *args: Any, **kwargs: Any) -> Any:
        built = super()._build_attention_metadata(num_tokens, num_reqs, *args, **kwargs)
        if self.offload is not None:
            per_layer = built[0]
            assert isinstance(per_layer, dict)  # a list only under dual-batch overlap, which CPU lacks
            metadata = next(m for m in per_layer.values() if isinstance(m, SparseMetadata))
            self.offload.manager.begin_step(metadata.batch.named(self.input_batch.req_ids[:num_reqs]))
        return built

    def _begin_draft(self, index: int, batch: StepBatch) -> None:
        assert self.offload is not None
        self.offload.manager.begin_draft(batch.named(self.input_batch.req_ids[: batch.num_requests]), index)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if self.offload is not None:
            self.offload.publish()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # vLLM decorates it
        output = super().sample_tokens(*args, **kwargs)  # drafts, too
        add_load_errors(output)
        if self.offload is not None:
            self.offload.publish()
        return output

    def shutdown(self) -> None:
        offload, self.offload = self.offload, None
        layers = list(self.compilation_config.static_forward_context.values())
        super().shutdown()
        # torch.compile keeps a compiled model for the rest of the process; it must not keep the pools alive.
        clear_layer_kv_caches(layers)
        for layer in layers:
            if isinstance(getattr(layer, "impl", None), CPUSparseMLAImpl):
                layer.impl.kv = None
        if self._proposer is not None:
            self._proposer.before_pass = None
        if offload is not None:
            offload.close()


def make_experts_opaque(model: torch.nn.Module) -> None:
    """Keeps the MoE layers of a compiled model out of the compiled graph.

    On CPU, vLLM lets Dynamo trace into them. With torch 2.13, Inductor then loses the order between the
    router's oneDNN matmul and the kernel that reads its result, and experts are chosen from uninitialised
    memory. vLLM's own opaque op, as used on other platforms, prevents this.
    """
    for module in model.modules():
        if isinstance(module, MoERunner):
            shared = module.shared_experts is not None
            module._forward_entry = (
                torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward
            )
