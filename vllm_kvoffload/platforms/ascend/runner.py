"""NPU model runner: owns the main KV's location."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch_npu
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.utils import bind_kv_cache
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.ascend.attention import KVOffloadSFAImpl
from vllm_kvoffload.platforms.ascend.caches import (
    IndexerLayout,
    LayerCache,
    bound_entries,
    connector_entries,
    indexer_layouts,
    layer_caches,
)
from vllm_kvoffload.platforms.ascend.offload import AscendOffload
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.platforms.runner import OffloadRunnerMixin
from vllm_kvoffload.platforms.shared_caches import shared_caches
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.sparse.offloaded import OffloadedKV

logger = get_logger(__name__)

ALIGNMENT = 2 << 20


class KVOffloadNPUModelRunner(OffloadRunnerMixin, NPUModelRunner):
    """vllm-ascend's runner. With offload, the device holds only the indexers' cache tensors."""

    offload: AscendOffload | None = None

    @cached_property
    def settings(self) -> EngineSettings:
        """The engine's settings. Not an argument, because upstream's worker creates the runner."""
        return EngineSettings.of(self.vllm_config, "npu")

    def initialize_kv_cache_tensors(self, kv_cache_config: Any) -> dict[str, Any]:
        """Allocates and binds the caches; returns them in the form for connectors."""
        if self.settings.offload.enabled:
            return connector_entries(self._initialize_offload(kv_cache_config))
        plan = self.settings.shared_buffers
        if plan is not None:
            return connector_entries(self._initialize_shared(plan, kv_cache_config))
        caches: dict[str, Any] = super().initialize_kv_cache_tensors(kv_cache_config)
        if self.settings.uses_our_connector:
            return dict(connector_entries(layer_caches(caches)))
        return caches

    def _initialize_shared(self, plan: BufferPlan, kv_cache_config: Any) -> dict[str, LayerCache]:
        """Allocates the caches of a prefill engine whose layers share memory."""
        num_blocks = kv_cache_config.num_blocks
        specs = self._get_layer_kv_cache_specs(kv_cache_config)
        layouts = indexer_layouts(specs)
        mains = shared_caches(plan, dict.fromkeys(layouts), lambda _: self._main_cache(num_blocks))
        with_indexer = {name: layout for name, layout in layouts.items() if layout is not None}
        indexers = shared_caches(plan, with_indexer, lambda layout: self._indexer_cache(layout, num_blocks))
        caches = {name: LayerCache(main, indexers.get(name, ())) for name, main in mains.items()}
        context = self.compilation_config.static_forward_context
        for name in caches:
            if context[name].impl.enable_mlapo:
                raise RuntimeError(f"{name}: MLAPO writes a layer's rows before it waits for its memory")
        bound: dict[str, Any] = dict(bound_entries(caches, specs))
        bind_kv_cache(bound, context, self.kv_caches)
        logger.info("%s", plan.describe())
        return caches

    def _main_cache(self, num_blocks: int) -> tuple[torch.Tensor, ...]:
        """Allocates latent and rope cache, [num_blocks, block_size, 1, D] each."""
        dtype, block_size = self.model_config.dtype, self.cache_config.block_size
        parts = []
        for component in self.settings.model.main_components:
            raw = self._allocate_int8_cache_tensor(num_blocks * block_size * component.row_bytes, ALIGNMENT)
            parts.append(raw.view(dtype).view(num_blocks, block_size, 1, -1))
        return tuple(parts)

    def _initialize_offload(self, kv_cache_config: Any) -> dict[str, LayerCache]:
        if len(kv_cache_config.kv_cache_groups) != 1:
            rule = "a hybrid KV cache is not supported by the offload"
            groups = f"{len(kv_cache_config.kv_cache_groups)} groups"
            refuse(ConfigError("KV cache", groups, rule, "serve this model without the offload"))
        try:
            self.offload = offload = AscendOffload(
                self.vllm_config,
                self.settings,
                kv_cache_config.num_blocks,
                self.device,
                getattr(torch, "npu"),  # noqa: B009  # torch_npu adds it
                torch_npu.npu_scatter_nd_update_,
            )
        except ConfigError as error:
            refuse(error)
        specs = self._get_layer_kv_cache_specs(kv_cache_config)
        caches = {
            name: LayerCache(
                offload.host_cache(extract_layer_index(name)),
                self._indexer_cache(layout, kv_cache_config.num_blocks),
            )
            for name, layout in indexer_layouts(specs).items()
        }
        context = self.compilation_config.static_forward_context
        bound: dict[str, Any] = dict(bound_entries(caches, specs))
        bind_kv_cache(bound, context, self.kv_caches)
        for name in caches:
            bind_offload(context[name].impl, offload, extract_layer_index(name))
        self.watch_drafter()
        return caches

    def _indexer_cache(self, layout: IndexerLayout | None, num_blocks: int) -> tuple[torch.Tensor, ...]:
        """Allocates the key cache, and scales for quantised keys, [num_blocks, block_size, 1, D]; ()
        without indexer.
        """
        if layout is None:
            return ()
        shape = (num_blocks, layout.block_size, layout.heads)
        count = num_blocks * layout.block_size * layout.heads
        nbytes = count * layout.width * layout.dtype.itemsize
        if layout.scale_dtype is None:
            keys = self._allocate_int8_cache_tensor(nbytes, ALIGNMENT)
            return (keys.view(layout.dtype).view(*shape, layout.width),)
        keys, scales = self._allocate_sparse_c8_indexer_tensors(
            dsa_k_tensor_size=nbytes,
            dsa_k_scale_tensor_size=count * layout.scale_dtype.itemsize,
            alignment=ALIGNMENT,
            scale_dtype=layout.scale_dtype,
        )
        quantised = keys.view(layout.dtype).view(*shape, layout.width)
        return quantised, scales.view(layout.scale_dtype).view(*shape, 1)

    def _unbind(self, layers: list[Any]) -> None:
        for layer in layers:
            impl = getattr(layer, "impl", None)
            if isinstance(impl, KVOffloadSFAImpl):
                impl.kv = impl.offload = None


def bind_offload(impl: Any, offload: AscendOffload, layer: int) -> None:
    """Binds the offload to a layer's attention.

    Raises TypeError if the layer was built with another backend.
    """
    if not isinstance(impl, KVOffloadSFAImpl):
        raise TypeError(f"layer {layer} has attention of {type(impl).__name__}, expected KVOffloadSFAImpl")
    impl.kv = OffloadedKV(offload.manager, layer)
    impl.offload = offload
    impl.layer_index = layer
