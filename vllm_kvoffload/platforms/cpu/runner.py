"""CPU model runner of DSA models: owns where the main KV lives."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_kvoffload.platforms.cpu.attention import CPUSparseMLAImpl
from vllm_kvoffload.platforms.cpu.paged import PagedKV


class KVOffloadCPUModelRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM's CPU runner; binds a :class:`LayerKV` to every sparse attention layer."""

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        caches: dict[str, torch.Tensor] = super().initialize_kv_cache_tensors(*args, **kwargs)
        for name in caches:
            layer = self.compilation_config.static_forward_context[name]
            impl = getattr(layer, "impl", None)
            if isinstance(impl, CPUSparseMLAImpl):
                impl.kv = PagedKV(layer.kv_cache)
        return caches
