"""Configurations that can't work on Ascend, each refused at start-up in one line. No vllm-ascend needed
here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.config import SECTION, ConfigError, SparseOffloadConfig, validate_sparse_offload
from vllm_kvoffload.connectors.ascend_store.config import CONNECTOR as STORE
from vllm_kvoffload.connectors.ascend_store.config import nested_connectors
from vllm_kvoffload.connectors.sfa_remote_d2h.config import CONNECTOR as REMOTE
from vllm_kvoffload.connectors.sfa_remote_d2h.config import EXTRA
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms import engine
from vllm_kvoffload.platforms.ascend.connectors import uses
from vllm_kvoffload.platforms.ascend.kernels import KERNELS_ENV

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_kvoffload.layerwise.buffer_plan import BufferPlan

OTHER_MODES = 'pass --enforce-eager, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
BLOCK_SIZE = 128
INDEX_TOPK = 2048
LEGACY_STORE = "MooncakeConnectorStoreV1"
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
    check_store(vllm_config, index_topk)
    if config.enabled:
        engine.check_partners(vllm_config)
        check_caches(vllm_config, "the offload")
        check_decode_graphs(vllm_config, config)
        check_options(vllm_config, config, index_topk)
    return config


def check_caches(vllm_config: VllmConfig, what: str) -> None:
    """Cache formats that have no rows of their own for each token. Raises ConfigError."""
    if additional(vllm_config).get("enable_sparse_sfa_c8"):
        rule = f"{what} needs rows of the main cache in the model's 16 bit type"
        raise ConfigError(
            "additional_config.enable_sparse_sfa_c8",
            True,
            rule,
            "set it to false; enable_sparse_li_c8 is fine",
        )
    if getattr(vllm_config.model_config, "is_hybrid", False):
        rule = f"a hybrid KV cache doesn't go with {what}"
        raise ConfigError("KV cache", "hybrid", rule, "serve this model without it")
    if vllm_config.cache_config.block_size != BLOCK_SIZE:
        rule = f"vllm-ascend's sparse attention reads pages of {BLOCK_SIZE} tokens"
        raise ConfigError("block_size", vllm_config.cache_config.block_size, rule, "set --block-size 128")


def graph_mode(vllm_config: VllmConfig) -> str:
    """Name of the engine's graph mode, "NONE" without graphs."""
    if vllm_config.model_config.enforce_eager:
        return "NONE"
    return str(getattr(vllm_config.compilation_config.cudagraph_mode, "name", "NONE"))


def check_graphs(vllm_config: VllmConfig, what: str) -> None:
    """Graph modes that would capture what is done on the host. Raises ConfigError."""
    mode = graph_mode(vllm_config)
    if "FULL" in mode:
        rule = f"{what}, which a full graph can't hold"
        raise ConfigError("compilation_config.cudagraph_mode", mode, rule, OTHER_MODES)
    check_splitting(vllm_config)


def check_decode_graphs(vllm_config: VllmConfig, config: SparseOffloadConfig) -> None:
    """Graph modes of an engine with the offload, whose full graphs run no Python in layers.

    Raises ConfigError.
    """
    mode, speculative = graph_mode(vllm_config), vllm_config.speculative_config
    obstacles = (
        (
            not os.environ.get(KERNELS_ENV),
            "without the AscendC kernels each layer's plan is made on the host",
            f"set {KERNELS_ENV} (docs/ascend-build.md)",
        ),
        (
            speculative is not None and speculative.method == "mtp" and not speculative.enforce_eager,
            "draft passes would run in graphs that the offload doesn't know",
            'add "enforce_eager": true to --speculative-config',
        ),
        (
            config.delivery == "compact",
            "compact delivery fills the pools beyond a step's end",
            f'set {SECTION}.delivery to "in_place"',
        ),
        (bool(config.trace_path), "the trace is taken in each layer", f"leave {SECTION}.trace_path out"),
    )
    for found, rule, fix in obstacles:
        if found and "FULL" in mode:
            key, why = "compilation_config.cudagraph_mode", f"{rule}, which a full graph can't hold"
            raise ConfigError(key, mode, why, f"{fix}; or {OTHER_MODES}")
    check_splitting(vllm_config)


def check_splitting(vllm_config: VllmConfig) -> None:
    """Attention must not be a part of piecewise graphs. Raises ConfigError."""
    compilation = vllm_config.compilation_config
    if "PIECEWISE" in graph_mode(vllm_config) and ATTENTION_OP not in (compilation.splitting_ops or ()):
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


def check_store(vllm_config: VllmConfig, index_topk: int | None) -> None:
    """A prefill engine with our store connector. Raises ConfigError."""
    if not uses_our_store(vllm_config):
        check_legacy_store(vllm_config)
        return
    from vllm_kvoffload.connectors.ascend_store.planning import buffer_plan, refuse_unless_possible

    refuse_unless_possible(vllm_config, index_topk)
    if getattr(vllm_config, "use_v2_model_runner", False):
        rule = f"{STORE} lays out caches in Model Runner V1"
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", True, rule, "unset it")
    if additional(vllm_config).get("enable_dsa_cp"):
        rule = f"{STORE} does not support context parallelism"
        raise ConfigError("additional_config.enable_dsa_cp", True, rule, "set it to false")
    check_graphs(vllm_config, "the store's loads and saves are started between layers")
    plan = buffer_plan(vllm_config)
    if plan is not None and plan.has_reuse:
        check_caches(vllm_config, "sharing of prefill buffers")


def check_legacy_store(vllm_config: VllmConfig) -> None:
    """A name that vllm-ascend keeps for its own store, which can't share buffers. Raises ConfigError."""
    for name, _, extra in connectors(vllm_config):
        if name == LEGACY_STORE and "layerwise_num_shared_buffers" in extra:
            key, shared = f"{EXTRA}.layerwise_num_shared_buffers", extra["layerwise_num_shared_buffers"]
            rule = f"{LEGACY_STORE} is vllm-ascend's own, which has no shared buffers"
            raise ConfigError(key, shared, rule, f"name {STORE}")


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


def uses_our_store(vllm_config: VllmConfig) -> bool:
    """Whether the engine's store connector is ours, and not vllm-ascend's."""
    return uses(vllm_config.kv_transfer_config, STORE)


def uses_our_connector(vllm_config: VllmConfig) -> bool:
    """Whether one of the connectors is ours."""
    return uses_our_store(vllm_config) or uses(vllm_config.kv_transfer_config, REMOTE)


def may_share_buffers(vllm_config: VllmConfig) -> bool:
    """Whether the options let layers share memory; asks no geometry, which a draft model's config lacks.

    Raises ConfigError.
    """
    if not uses_our_store(vllm_config):
        return False
    from vllm_kvoffload.connectors.ascend_store.planning import store_options

    options = store_options(vllm_config)
    return options is not None and options.buffers.independent != "all"


def shared_plan(vllm_config: VllmConfig) -> BufferPlan | None:
    """Which layers share memory, None where none do. Raises ConfigError."""
    if not uses_our_store(vllm_config):
        return None
    from vllm_kvoffload.connectors.ascend_store.planning import buffer_plan

    plan = buffer_plan(vllm_config)
    return plan if plan is not None and plan.has_reuse else None
