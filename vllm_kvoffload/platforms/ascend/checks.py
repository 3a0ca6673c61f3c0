"""Configurations that can't work on Ascend, each refused at start-up in one line. No vllm-ascend needed
here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.config import SECTION, ConfigError, SparseOffloadConfig, validate_sparse_offload
from vllm_kvoffload.connectors.ascend_store.config import nested_connectors
from vllm_kvoffload.connectors.sfa_remote_d2h.config import CONNECTOR, EXTRA
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms import engine
from vllm_kvoffload.platforms.ascend.kernels import KERNELS_ENV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZE = 128
INDEX_TOPK = 2048
STORE_CONNECTORS = ("AscendStoreConnector", "MooncakeConnectorStoreV1")
ATTENTION_OP = "vllm::mla_forward"
"""The operator that holds a layer's attention, by which vllm-ascend splits piecewise graphs."""


def additional(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """vLLM's `--additional-config`, empty when there is none."""
    given = vllm_config.additional_config
    return given if isinstance(given, dict) else {}


def ascend_geometry(vllm_config: VllmConfig) -> KVGeometry:
    """Geometry of the served model in vllm-ascend's cache layout."""
    quantised = bool(additional(vllm_config).get("enable_sparse_li_c8", False))
    return engine.model_geometry(vllm_config, "ascend", "int8" if quantised else "model")


def check_ascend(vllm_config: VllmConfig, index_topk: int | None) -> SparseOffloadConfig:
    """The offload's options, after everything that can be wrong with this engine was looked for.

    Raises:
        ConfigError: key, value, rule and fix.
    """
    config = engine.offload_options(vllm_config)
    facts = engine.engine_facts(
        vllm_config, index_topk, dsa_context_parallel=bool(additional(vllm_config).get("enable_dsa_cp"))
    )
    validate_sparse_offload(config, facts)
    engine.check_connector(vllm_config, index_topk, config, "npu")
    check_reused_buffers(vllm_config)
    if config.enabled:
        engine.check_partners(vllm_config)
        check_caches(vllm_config)
        check_graphs(vllm_config)
        check_options(vllm_config, config, index_topk)
    return config


def check_caches(vllm_config: VllmConfig) -> None:
    """Cache formats that have no rows of their own for each token. Raises ConfigError."""
    if additional(vllm_config).get("enable_sparse_sfa_c8"):
        rule = "the offload moves rows of the main cache in the model's 16 bit type"
        raise ConfigError(
            "additional_config.enable_sparse_sfa_c8",
            True,
            rule,
            "set it to false; enable_sparse_li_c8 is fine",
        )
    if getattr(vllm_config.model_config, "is_hybrid", False):
        rule = "a hybrid KV cache is not supported by the offload"
        raise ConfigError(f"{SECTION}.enabled", True, rule, f"set {SECTION}.enabled to false for this model")
    if vllm_config.cache_config.block_size != BLOCK_SIZE:
        rule = f"vllm-ascend's sparse attention reads pages of {BLOCK_SIZE} tokens"
        raise ConfigError("block_size", vllm_config.cache_config.block_size, rule, "set --block-size 128")


def check_graphs(vllm_config: VllmConfig) -> None:
    """Graph modes that would capture the offload's work on the host. Raises ConfigError."""
    compilation = vllm_config.compilation_config
    mode = getattr(compilation.cudagraph_mode, "name", "NONE")
    if vllm_config.model_config.enforce_eager or mode == "NONE":
        return
    if mode != "PIECEWISE":
        rule = "in every layer host threads take new rows to host memory, which a full graph can't hold"
        fix = 'pass --enforce-eager, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        raise ConfigError("compilation_config.cudagraph_mode", mode, rule, fix)
    if ATTENTION_OP not in (compilation.splitting_ops or ()):
        rule = f"attention, {ATTENTION_OP}, would be captured in a graph with the step it was captured in"
        fix = "leave splitting_ops out, or pass --enforce-eager"
        raise ConfigError("compilation_config.splitting_ops", compilation.splitting_ops, rule, fix)


def check_options(vllm_config: VllmConfig, config: SparseOffloadConfig, index_topk: int | None) -> None:
    """Options of the offload, and of vLLM beside it, that only other platforms can do. Raises ConfigError."""
    if index_topk is not None and index_topk != INDEX_TOPK:
        rule = f"vllm-ascend's indexer always chooses {INDEX_TOPK} tokens"
        raise ConfigError("index_topk", index_topk, rule, "serve a model with index_topk 2048")
    if config.delivery == "compact":
        check_compact(config)
    if config.keep_device_kv_cache:
        rule = "there is no device cache to compare with on Ascend"
        raise ConfigError(f"{SECTION}.keep_device_kv_cache", True, rule, "set it to false")
    speculative = vllm_config.speculative_config
    if speculative is not None and ascend_geometry(vllm_config).mtp_index_share:
        rule = "draft steps that share one choice of tokens were not tried with the offload on Ascend"
        fix = "leave --speculative-config out for this model"
        raise ConfigError("index_share_for_mtp_iteration", True, rule, fix)
    if additional(vllm_config).get("xlite_graph_config", {}).get("enabled"):
        rule = "xlite has a worker of its own"
        raise ConfigError("additional_config.xlite_graph_config.enabled", True, rule, "set it to false")


def check_compact(config: SparseOffloadConfig) -> None:
    """Compact delivery, which takes the AscendC kernels and has their plan only. Raises ConfigError."""
    key = f"{SECTION}.delivery"
    if not os.environ.get(KERNELS_ENV):
        rule = f"on Ascend it is done by the AscendC kernels, and {KERNELS_ENV} is not set"
        raise ConfigError(key, config.delivery, rule, 'set that (docs/ascend-build.md), or use "in_place"')
    if config.plans_as_published:
        rule = "with fifo and 16 ways it plans as published, for which there is no AscendC kernel"
        raise ConfigError(key, config.delivery, rule, f'set {SECTION}.policy to "rrip", or use "in_place"')


def check_reused_buffers(vllm_config: VllmConfig) -> None:
    """Prefill buffers that layers share. Raises ConfigError."""
    key = f"{EXTRA}.layerwise_num_shared_buffers"
    for name, _, extra in connectors(vllm_config):
        shared = extra.get("layerwise_num_shared_buffers") if name in STORE_CONNECTORS else None
        if shared is None or not extra.get("use_layerwise"):
            continue
        if not vllm_config.model_config.enforce_eager:
            rule = "layers that share prefill buffers can't be captured in a graph"
            raise ConfigError(key, shared, rule, "pass --enforce-eager, or leave the key out")
        rule = "vllm-ascend 0.23 can't let layers share prefill buffers, and this package can't on Ascend yet"
        raise ConfigError(key, shared, rule, "leave the key out")


def connectors(vllm_config: VllmConfig) -> list[tuple[str | None, str | None, Mapping[str, Any]]]:
    """(name, role, extra options) of the connector, or of each one within a MultiConnector.

    Raises ConfigError.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return []
    return nested_connectors(
        transfer.kv_connector, transfer.kv_role, transfer.kv_connector_extra_config or {}
    )


def uses_our_connector(vllm_config: VllmConfig) -> bool:
    """Whether one of the connectors is ours."""
    return any(name == CONNECTOR for name, _, _ in connectors(vllm_config))
