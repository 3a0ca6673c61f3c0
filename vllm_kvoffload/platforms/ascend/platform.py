"""vllm-ascend's platform, which knows of the offload: its worker, its attention, its connectors, its
refusals.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm_ascend.platform import NPUPlatform

from vllm_kvoffload.config import SECTION, ConfigError
from vllm_kvoffload.platforms.ascend.checks import (
    ascend_geometry,
    check_ascend,
    may_share_buffers,
    shared_plan,
    uses_our_connector,
    uses_our_store,
)
from vllm_kvoffload.platforms.ascend.connectors import name_modules
from vllm_kvoffload.platforms.engine import offload_config
from vllm_kvoffload.platforms.refusal import refuse

UPSTREAM_WORKER = "vllm_ascend.worker.worker.NPUWorker"
WORKER = "vllm_kvoffload.platforms.ascend.worker.KVOffloadNPUWorker"
SPARSE_BACKEND = "vllm_kvoffload.platforms.ascend.attention.KVOffloadSFABackend"
PREFILL_BACKEND = "vllm_kvoffload.platforms.ascend.prefill_attention.SharedBufferSFABackend"


class KVOffloadNPUPlatform(NPUPlatform):
    """Upstream's platform; engines that use nothing of ours run exactly as without this package."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        # Before vLLM asks for the connector's class, which it does early for engines with graphs.
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
        index_topk = getattr(vllm_config.model_config.hf_text_config, "index_topk", None)
        config = check_ascend(vllm_config, index_topk)
        if not config.enabled and not uses_our_connector(vllm_config):
            return
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == UPSTREAM_WORKER:
            parallel.worker_cls = WORKER
        elif parallel.worker_cls != WORKER:
            rule = f"{SECTION} and its connector need a worker of their own"
            raise ConfigError("worker_cls", parallel.worker_cls, rule, "leave --worker-cls out")
        if uses_our_store(vllm_config):
            from vllm_kvoffload.connectors.ascend_store.planning import use_scheduler

            use_scheduler(vllm_config)
        if shared_plan(vllm_config) is not None:
            # A block's KV outlives its step in the store only, where prefixes are found.
            vllm_config.cache_config.enable_prefix_caching = False
        if index_topk is not None:
            # In the one spelling that vLLM's model code reads.
            pattern = ascend_geometry(vllm_config).index_topk_pattern
            vllm_config.model_config.hf_text_config.index_topk_pattern = pattern

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        vllm_config = get_current_vllm_config_or_none()
        sparse = attn_selector_config.use_mla and attn_selector_config.use_sparse
        if not sparse or vllm_config is None:
            return path
        if offload_config(vllm_config) is not None:
            return SPARSE_BACKEND
        return PREFILL_BACKEND if may_share_buffers(vllm_config) else path
