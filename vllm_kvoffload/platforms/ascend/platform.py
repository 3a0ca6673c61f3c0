"""vllm-ascend's platform with the offload: selects worker, attention and connectors, and validates
options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm_ascend.platform import NPUPlatform

from vllm_kvoffload.engine import EngineOptions, uses_micro_batches
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.ascend.checks import check_ascend
from vllm_kvoffload.platforms.ascend.connectors import name_modules
from vllm_kvoffload.platforms.built_model import check_checkpoint, checkpoint_indexers
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.platforms.requested import request_of
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SECTION, refuse_micro_batches

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
        micro_batches = uses_micro_batches(vllm_config)  # upstream switches them off, with a warning
        super().check_and_update_config(vllm_config)
        try:
            asked = request_of(vllm_config, store_is_shared=True)
            if asked and micro_batches:
                refuse_micro_batches(asked)
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
            name_indexers(vllm_config.model_config, settings.geometry)

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


def name_indexers(model_config: Any, geometry: KVGeometry) -> None:
    """Completes a model's config by the two spellings that upstream reads, so that it builds what the
    geometry says: layers that reuse another one's choice by `index_topk_pattern`, and those of them that
    get no indexer by `indexer_types`.

    Raises ConfigError: the checkpoint has indexers in such layers.
    """
    indexers = checkpoint_indexers(Path(model_config.model))
    if indexers is not None:
        check_checkpoint(geometry, indexers)
    config = model_config.hf_text_config
    config.index_topk_pattern = geometry.index_topk_pattern
    if indexers is not None and "shared" in geometry.indexer_types:
        config.indexer_types = list(geometry.indexer_types)
