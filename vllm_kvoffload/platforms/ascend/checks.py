"""Configurations that can't work on Ascend, each refused at start-up in one line. No vllm-ascend needed
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.config import SECTION, ConfigError, SparseOffloadConfig, validate_sparse_offload
from vllm_kvoffload.connectors.ascend_store.config import nested_connectors
from vllm_kvoffload.connectors.sfa_remote_d2h.config import CONNECTOR, EXTRA
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms import engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BLOCK_SIZE = 128
INDEX_TOPK = 2048
STORE_CONNECTORS = ("AscendStoreConnector", "MooncakeConnectorStoreV1")
GRAPH_MODES = ("NONE", "PIECEWISE")
"""CUDA graph modes, as vLLM calls them, in which attention runs outside the graph."""


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
    mode = getattr(vllm_config.compilation_config.cudagraph_mode, "name", None)
    if vllm_config.model_config.enforce_eager or mode is None or mode in GRAPH_MODES:
        return
    rule = "the offload plans on the host between layers, which a full graph can't hold"
    fix = 'pass --enforce-eager, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
    raise ConfigError("compilation_config.cudagraph_mode", mode, rule, fix)


def check_options(vllm_config: VllmConfig, config: SparseOffloadConfig, index_topk: int | None) -> None:
    """Options of the offload, and of vLLM beside it, that only other platforms can do. Raises ConfigError."""
    if index_topk is not None and index_topk != INDEX_TOPK:
        rule = f"vllm-ascend's indexer always chooses {INDEX_TOPK} tokens"
        raise ConfigError("index_topk", index_topk, rule, "serve a model with index_topk 2048")
    if config.delivery != "in_place":
        rule = "on Ascend attention reads the hot pool itself"
        raise ConfigError(f"{SECTION}.delivery", config.delivery, rule, 'set it to "in_place"')
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
