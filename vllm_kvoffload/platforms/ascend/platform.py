"""vllm-ascend's platform with the offload: selects worker, attention and connectors, and validates
options.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm_ascend.platform import NPUPlatform

from vllm_kvoffload.engine import EngineOptions
from vllm_kvoffload.platforms.ascend.checks import check_ascend
from vllm_kvoffload.platforms.ascend.connectors import name_modules
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SECTION

UPSTREAM_WORKER = "vllm_ascend.worker.worker.NPUWorker"
WORKER = "vllm_kvoffload.platforms.ascend.worker.KVOffloadNPUWorker"
SPARSE_BACKEND = "vllm_kvoffload.platforms.ascend.attention.KVOffloadSFABackend"
PREFILL_BACKEND = "vllm_kvoffload.platforms.ascend.prefill_attention.SharedBufferSFABackend"


class KVOffloadNPUPlatform(NPUPlatform):
    """Upstream's platform; engines that do not use this package's features run unchanged."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        # Before vLLM looks up the connector's class, which happens early for engines with graphs.
        name_modules(vllm_config.kv_transfer_config)
        super().apply_config_platform_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        if vllm_config.model_config is None:
            super().check_and_update_config(vllm_config)
            return
        super().check_and_update_config(vllm_config)
        try:
            cls._check(vllm_config)
        except ConfigError as error:
            refuse(error)

    @classmethod
    def _check(cls, vllm_config: Any) -> None:
        settings = check_ascend(vllm_config)
        if not settings.offload.enabled and not settings.uses_our_connector:
            return
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == UPSTREAM_WORKER:
            parallel.worker_cls = WORKER
        elif parallel.worker_cls != WORKER:
            rule = f"{SECTION} and its connector need a worker of their own"
            raise ConfigError("worker_cls", parallel.worker_cls, rule, "leave --worker-cls out")
        settings.choose_scheduler(vllm_config)
        if settings.shared_buffers is not None:
            # After a step, a block's KV exists only in the store, where prefixes are found.
            vllm_config.cache_config.enable_prefix_caching = False
        if settings.geometry is not None:
            # Normalised to the spelling that vLLM's model code reads.
            vllm_config.model_config.hf_text_config.index_topk_pattern = settings.geometry.index_topk_pattern

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        vllm_config = get_current_vllm_config_or_none()
        sparse = attn_selector_config.use_mla and attn_selector_config.use_sparse
        if not sparse or vllm_config is None:
            return path
        options = EngineOptions.of(vllm_config, "npu")
        if options.offload.enabled:
            return SPARSE_BACKEND
        # Not the buffer plan: a draft model's config has no geometry.
        store = options.store
        return PREFILL_BACKEND if store is not None and store.buffers.independent != "all" else path
