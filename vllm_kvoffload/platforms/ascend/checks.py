"""Rejects configurations that cannot work on Ascend, each with one line at start-up. Does not need
vllm-ascend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.platforms.ascend.operators import BUILD, library_path
from vllm_kvoffload.settings.connectors import EXTRA, STORE
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import (
    SECTION,
    SparseOffloadConfig,
    validate_partners,
    validate_sparse_offload,
)
from vllm_kvoffload.settings.remote_d2h import validate_remote_d2h

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OTHER_MODES = 'pass --enforce-eager, or --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
BLOCK_SIZE = 128
INDEX_TOPK = 2048
LEGACY_STORE = "MooncakeConnectorStoreV1"
ATTENTION_OP = "vllm::mla_forward"
"""The operator that contains a layer's attention, at which vllm-ascend splits piecewise graphs."""


def check_ascend(vllm_config: VllmConfig) -> EngineSettings:
    """Validates the configuration and returns the engine's settings.

    Raises:
        ConfigError: key, value, rule and fix.
    """
    settings = EngineSettings.of(vllm_config, "npu")
    validate_sparse_offload(settings.offload, settings.facts)
    if settings.remote is not None:
        validate_remote_d2h(settings.remote, settings.offload, settings.facts)
    check_store(vllm_config, settings)
    if settings.offload.enabled:
        validate_partners(settings.facts)
        check_caches(vllm_config, settings, "the offload")
        check_decode_graphs(vllm_config, settings.offload)
        check_options(vllm_config, settings)
    return settings


def check_caches(vllm_config: VllmConfig, settings: EngineSettings, what: str) -> None:
    """Rejects cache formats without a separate row per token. Raises ConfigError."""
    if settings.additional.get("enable_sparse_sfa_c8"):
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
    """Returns the engine's graph mode, "NONE" without graphs."""
    if vllm_config.model_config.enforce_eager:
        return "NONE"
    return str(getattr(vllm_config.compilation_config.cudagraph_mode, "name", "NONE"))


def check_graphs(vllm_config: VllmConfig, what: str) -> None:
    """Rejects graph modes that would capture work done on the host. Raises ConfigError."""
    mode = graph_mode(vllm_config)
    if "FULL" in mode:
        rule = f"{what}, which a full graph can't hold"
        raise ConfigError("compilation_config.cudagraph_mode", mode, rule, OTHER_MODES)
    check_splitting(vllm_config)


def check_decode_graphs(vllm_config: VllmConfig, config: SparseOffloadConfig) -> None:
    """Rejects graph modes unsupported with the offload: full graphs run no Python in layers.

    Raises ConfigError.
    """
    mode, speculative = graph_mode(vllm_config), vllm_config.speculative_config
    obstacles = (
        (
            not library_path(),
            "without the AscendC kernels each layer's plan is made on the host",
            BUILD,
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
    """Rejects piecewise graphs that include attention. Raises ConfigError."""
    compilation = vllm_config.compilation_config
    if "PIECEWISE" in graph_mode(vllm_config) and ATTENTION_OP not in (compilation.splitting_ops or ()):
        rule = f"attention, {ATTENTION_OP}, would be captured in a graph with the step it was captured in"
        fix = "leave splitting_ops out, or pass --enforce-eager"
        raise ConfigError("compilation_config.splitting_ops", compilation.splitting_ops, rule, fix)


def check_options(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Rejects options of the offload and of vLLM that only other platforms support. Raises ConfigError."""
    config, index_topk = settings.offload, settings.facts.index_topk
    if index_topk is not None and index_topk != INDEX_TOPK:
        rule = f"vllm-ascend's indexer always chooses {INDEX_TOPK} tokens"
        raise ConfigError("index_topk", index_topk, rule, "serve a model with index_topk 2048")
    if config.placement != "one_set":
        rule = "the AscendC plan places a token in one set, and so does the offload on Ascend"
        raise ConfigError(f"{SECTION}.placement", config.placement, rule, 'set it to "one_set"')
    if config.delivery == "compact":
        check_compact(config)
    if config.keep_device_kv_cache:
        rule = "there is no device cache to compare with on Ascend"
        raise ConfigError(f"{SECTION}.keep_device_kv_cache", True, rule, "set it to false")
    speculative = vllm_config.speculative_config
    if speculative is not None and settings.model.mtp_index_share:
        rule = (
            "draft steps that share the first one's top-k indices were not tried with the offload on Ascend"
        )
        fix = "leave --speculative-config out for this model"
        raise ConfigError("index_share_for_mtp_iteration", True, rule, fix)
    if settings.additional.get("xlite_graph_config", {}).get("enabled"):
        rule = "xlite has a worker of its own"
        raise ConfigError("additional_config.xlite_graph_config.enabled", True, rule, "set it to false")


def check_compact(config: SparseOffloadConfig) -> None:
    """Rejects compact delivery without the AscendC kernels, or with another plan than theirs. Raises
    ConfigError."""
    key = f"{SECTION}.delivery"
    if not library_path():
        rule = "on Ascend it is done by the AscendC kernels, which are not built"
        raise ConfigError(key, config.delivery, rule, f'{BUILD}, or use "in_place"')
    if config.plans_as_published:
        rule = "with fifo and 16 ways it plans as published, for which there is no AscendC kernel"
        raise ConfigError(key, config.delivery, rule, f'set {SECTION}.policy to "rrip", or use "in_place"')


def check_store(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Validates a prefill engine with our store connector. Raises ConfigError."""
    if settings.store is None:
        check_legacy_store(settings)
        return
    from vllm_kvoffload.connectors.ascend_store import planning

    planning.check_engine(vllm_config, settings)
    if settings.facts.uses_v2_runner:
        rule = f"{STORE} lays out caches in Model Runner V1"
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", True, rule, "unset it")
    if settings.facts.dsa_context_parallel:
        rule = f"{STORE} does not support context parallelism"
        raise ConfigError("additional_config.enable_dsa_cp", True, rule, "set it to false")
    check_graphs(vllm_config, "the store's loads and saves are started between layers")
    if settings.shared_buffers is not None:
        check_caches(vllm_config, settings, "sharing of prefill buffers")


def check_legacy_store(settings: EngineSettings) -> None:
    """Rejects the name that vllm-ascend keeps for its own store, which cannot share buffers. Raises
    ConfigError."""
    option = "layerwise_num_shared_buffers"
    for part in settings.parts:
        if part.name == LEGACY_STORE and option in part.options:
            rule = f"{LEGACY_STORE} is vllm-ascend's own, which has no shared buffers"
            raise ConfigError(f"{EXTRA}.{option}", part.options[option], rule, f"name {STORE}")
