"""What a vLLM engine's configuration says to the offload, and the checks that every platform makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvoffload.config import (
    SECTION,
    ConfigError,
    EngineFacts,
    SparseOffloadConfig,
    parse_sparse_offload,
)
from vllm_kvoffload.connectors.ascend_store.config import nested_connectors
from vllm_kvoffload.connectors.sfa_remote_d2h.config import CONNECTOR, RemoteD2HConfig, parse_remote_d2h
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import check_ports
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.sparse.capacity import CapacityInputs, CapacityPlan, plan_capacity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DRAFT_METHODS = ("mtp", "ngram")  # those whose drafts need no KV cache that the offload doesn't know


def offload_options(vllm_config: VllmConfig) -> SparseOffloadConfig:
    """The engine's offload options, enabled or not. Raises ConfigError."""
    additional = vllm_config.additional_config
    return parse_sparse_offload(additional if isinstance(additional, dict) else None)


def offload_config(vllm_config: VllmConfig) -> SparseOffloadConfig | None:
    """The engine's offload options, None when it is off. Raises ConfigError."""
    config = offload_options(vllm_config)
    return config if config.enabled else None


def model_geometry(vllm_config: VllmConfig, layout: str, indexer_layout: str | None = None) -> KVGeometry:
    """Geometry of the served model in a platform's cache layout."""
    model_config, speculative = vllm_config.model_config, vllm_config.speculative_config
    return KVGeometry.from_hf_config(
        model_config.hf_text_config,
        layout=layout,
        dtype=model_config.dtype,
        indexer_layout=indexer_layout,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        mtp=speculative is not None and speculative.method == "mtp",
    )


def engine_facts(
    vllm_config: VllmConfig, index_topk: int | None, *, dsa_context_parallel: bool = False
) -> EngineFacts:
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
        dsa_context_parallel=dsa_context_parallel,
        uses_v2_runner=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        kv_role=transfer.kv_role if transfer else None,
        sleep_mode=model.enable_sleep_mode,
    )


def check_connector(
    vllm_config: VllmConfig, index_topk: int | None, config: SparseOffloadConfig, device: str
) -> None:
    """Refuses a configuration of our connector that can't work. device: "cpu" or "npu".

    Raises:
        ConfigError: naming the option.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    extra = transfer.kv_connector_extra_config
    for name, role, part in nested_connectors(transfer.kv_connector, transfer.kv_role, extra):
        if name == CONNECTOR:
            options = parse_remote_d2h(role, transfer.kv_port, part, device)
            _check_remote_d2h(vllm_config, index_topk, config, options)


def _check_remote_d2h(
    vllm_config: VllmConfig, index_topk: int | None, config: SparseOffloadConfig, options: RemoteD2HConfig
) -> None:
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


def check_partners(vllm_config: VllmConfig) -> None:
    """Refuses draft methods and connectors that the enabled offload doesn't know.

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


def capacity_of(
    vllm_config: VllmConfig, geometry: KVGeometry, config: SparseOffloadConfig, device_bytes: int
) -> CapacityPlan:
    """What fits into a device budget.

    Raises:
        ConfigError: not even one longest request fits, or more blocks are asked for than fit.
    """
    plan = plan_capacity(
        CapacityInputs(
            geometry=geometry,
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
