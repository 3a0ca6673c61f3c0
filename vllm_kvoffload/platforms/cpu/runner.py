"""CPU model runner of DSA models: owns the main KV's location."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.utils import bind_kv_cache, clear_layer_kv_caches

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.cpu.attention import CPUSparseMLAImpl
from vllm_kvoffload.platforms.cpu.indexer import CPUIndexerCache
from vllm_kvoffload.platforms.cpu.layer_loads import AwaitedKV
from vllm_kvoffload.platforms.cpu.offload import CPUOffload
from vllm_kvoffload.platforms.cpu.sampling import SoundCPUModelRunner
from vllm_kvoffload.platforms.runner import OffloadRunnerMixin
from vllm_kvoffload.platforms.shared_caches import shared_caches
from vllm_kvoffload.sparse.offloaded import OffloadedKV
from vllm_kvoffload.sparse.paged import PagedKV

logger = get_logger(__name__)

Layout = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of a cache."""


# vLLM decorates sample_tokens, for which mypy misses parameters in the mixin's.
class KVOffloadCPUModelRunner(OffloadRunnerMixin, SoundCPUModelRunner):  # type: ignore[misc]
    """vLLM's CPU runner; binds a :class:`LayerKV` to every sparse attention layer.

    With offload, vLLM's cache tensors are only the indexers' key caches; the main KV tensor passed to vLLM
    and connectors is the host pool's.
    """

    offload: CPUOffload | None = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device, settings: EngineSettings) -> None:
        super().__init__(vllm_config, device)
        self.settings = settings

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
        num_blocks, block_size = kv_cache_config.num_blocks, self.cache_config.block_size
        mains: dict[str, Layout] = {}
        indexers: dict[str, Layout] = {}
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        for name in names:
            layer = context[name]
            if isinstance(layer, CPUIndexerCache):
                indexers[name] = (num_blocks, 1, block_size, layer.head_dim), layer.dtype
            else:
                mains[name] = (num_blocks, 1, block_size, layer.head_size), main_dtype
        made = shared_caches(plan, mains, make_cache) | shared_caches(plan, indexers, make_cache)
        caches = {name: made[name] for name in names}
        logger.info("%s", plan.describe())
        bind_kv_cache(caches, context, self.kv_caches, kv_cache_groups=kv_cache_config.kv_cache_groups)
        return caches

    def _initialize_offload(
        self, offload: CPUOffload, kv_cache_config: KVCacheConfig
    ) -> dict[str, torch.Tensor]:
        self.offload = offload
        self.watch_drafter()
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

    def _unbind(self, layers: list[Any]) -> None:
        # torch.compile keeps a compiled model for the rest of the process; it must not keep the pools alive.
        clear_layer_kv_caches(layers)
        for layer in layers:
            if isinstance(getattr(layer, "impl", None), CPUSparseMLAImpl):
                layer.impl.kv = None


def make_cache(layout: Layout) -> torch.Tensor:
    """Allocates a cache in plain memory."""
    shape, dtype = layout
    return torch.zeros(shape, dtype=dtype)


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
