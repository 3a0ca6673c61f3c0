"""Options of ``AscendStoreConnector``: `kv_connector_extra_config` of a prefill engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from vllm_kvoffload.settings.connectors import EXTRA, STORE, ConnectorPart
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import EngineFacts, check_parallelism
from vllm_kvoffload.settings.values import (
    GIB,
    check_bool,
    check_int,
    check_number,
    check_text,
    refuse_unknown_keys,
)

BACKENDS = ("local", "memcache")
SHARED_BACKENDS = ("memcache",)
"""Backends shared by several engines, which require equal block hashes in all processes."""

SCHEDULER = "vllm_kvoffload.connectors.ascend_store.lost_steps.LostStepScheduler"
"""The scheduler of engines with the store, which drops results computed from failed KV loads."""

DEFAULT_LOCAL_GB = 4.0
MAX_PREFETCH = 8
QOS = "qos_priority"
HIGHEST_QOS = 4
NUM_SHARED = f"{EXTRA}.layerwise_num_shared_buffers"
INDEPENDENT = f"{EXTRA}.layerwise_independent_layers"

Independent: TypeAlias = tuple[int, ...] | Literal["all"]


@dataclass(frozen=True)
class BufferOptions:
    """num_shared_buffers: slots of each bucket, None for one per layer. independent: positions of layers with
    memory of their own, negative ones counted from the end, or "all"."""

    num_shared_buffers: int | None = None
    independent: Independent = (0,)


@dataclass(frozen=True)
class AscendStoreConfig:
    """Options of one engine.

    backend: of the store. buffers: as given, without sharing if `use_layerwise` is false. prefetch_layers:
    number of layers that loads may run ahead. max_transfer_blocks, max_transfer_bytes: per call of the store,
    0 for no limit. save_decode_cache: also store KV computed after the prompt; always true with shared
    buffers. local_bytes: of the local backend's pool. namespace: separates engines that share a store.
    qos_priority: of MemCache's transfers, 0 to 4, None for its default.
    """

    backend: str
    buffers: BufferOptions
    prefetch_layers: int
    max_transfer_blocks: int
    max_transfer_bytes: int
    save_decode_cache: bool
    local_bytes: int
    namespace: str
    qos_priority: int | None = None


def parse_ascend_store(kv_role: str | None, extra: Mapping[str, Any]) -> AscendStoreConfig:
    """Reads the options out of vLLM's kv-transfer config. Raises ConfigError naming the key."""
    refuse_unknown_keys(EXTRA, extra, _KEYS, _KNOWN_ELSEWHERE)
    if kv_role not in ("kv_producer", "kv_both"):
        rule = f"{STORE} runs on engines that prefill"
        raise ConfigError("kv_role", kv_role, rule, "set it to kv_producer")
    for key in ("consumer_is_to_load", "consumer_is_to_put", "load_async"):
        if _bool(extra, key):
            rule = "is for engines that decode, which get their KV by SfaRemoteD2HConnector"
            if key == "load_async":
                rule = "is not available: loads are awaited layer by layer"
            raise ConfigError(f"{EXTRA}.{key}", True, rule, "set it to false, or remove it")
    layerwise = _bool(extra, "use_layerwise")
    shared, independent = (
        extra.get(f"layerwise_{key}") for key in ("num_shared_buffers", "independent_layers")
    )
    buffers = parse_buffer_options(shared, independent)
    if not layerwise:
        rule, fix = "is without effect unless use_layerwise is true", "set use_layerwise to true"
        if shared is not None:
            raise ConfigError(f"{EXTRA}.layerwise_num_shared_buffers", shared, rule, fix)
        if independent not in (None, "all"):
            raise ConfigError(f"{EXTRA}.layerwise_independent_layers", independent, rule, fix)
        buffers = BufferOptions(None, "all")
    default_prefetch = min(buffers.num_shared_buffers or MAX_PREFETCH, MAX_PREFETCH)
    return AscendStoreConfig(
        backend=_backend(extra.get("backend")),
        buffers=buffers,
        prefetch_layers=_int(extra, "layerwise_prefetch_layers", default_prefetch, least=1),
        max_transfer_blocks=_int(extra, "layerwise_max_transfer_blocks", 0),
        max_transfer_bytes=_int(extra, "layerwise_max_transfer_bytes", 0),
        save_decode_cache=_bool(extra, "save_decode_cache"),
        local_bytes=_local_bytes(extra),
        namespace=check_text(f"{EXTRA}.namespace", extra.get("namespace", "")),
        qos_priority=_qos(extra),
    )


def _qos(extra: Mapping[str, Any]) -> int | None:
    check_bool(f"{EXTRA}.memcache_dp_init_barrier", extra.get("memcache_dp_init_barrier", True))
    if QOS not in extra:
        return None
    key, value = f"{EXTRA}.{QOS}", extra[QOS]
    if _backend(extra.get("backend")) != "memcache":
        raise ConfigError(
            key, value, "is for MemCache's transfers", 'leave it out, or set backend to "memcache"'
        )
    return check_int(key, value, 0, HIGHEST_QOS)


def parse_buffer_options(num_shared_buffers: Any, independent_layers: Any) -> BufferOptions:
    """Options as given in JSON, None for those left out. Raises ConfigError for a wrong type or range."""
    defaults = BufferOptions()
    return BufferOptions(
        None if num_shared_buffers is None else check_int(NUM_SHARED, num_shared_buffers, 1),
        defaults.independent if independent_layers is None else _independent(independent_layers),
    )


def _independent(value: Any) -> Independent:
    fix = 'write a list such as [0] or [0, -1], or "all" for no sharing'
    if isinstance(value, str):
        if value.lower() == "all":
            return "all"
        raise ConfigError(INDEPENDENT, value, 'must be a list of layers or "all"', fix)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(INDEPENDENT, value, f"must be a list, not a {type(value).__name__}", fix)
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ConfigError(INDEPENDENT, value, f"{item!r} is not a layer: must be integers", fix)
    return tuple(value)


_KEYS = (
    "backend", "use_layerwise", "layerwise_num_shared_buffers", "layerwise_independent_layers",
    "layerwise_prefetch_layers", "layerwise_max_transfer_blocks", "layerwise_max_transfer_bytes",
    "save_decode_cache", "consumer_is_to_load", "consumer_is_to_put", "load_async", "namespace",
    "local_dram_size_GB", QOS, "memcache_dp_init_barrier",
)  # fmt: skip

_KNOWN_ELSEWHERE: Mapping[str, str] = {
    "mooncake_rpc_port": "nothing listens on a port here",
    "lookup_rpc_port": "nothing listens on a port here",
    "prefill_tp_size": "the store's keys name no TP size: MLA caches are the same on every rank",
    "decode_tp_size": "the store's keys name no TP size: MLA caches are the same on every rank",
    "prefill_pp_size": "pipeline parallelism is not supported",
    "prefill_pp_layer_partition": "pipeline parallelism is not supported",
    "discard_partial_chunks": "a block that is not full is never shared",
    "h2d_stagger_us": "loads are spread by the layers' order",
}
"""Keys of vLLM-Ascend's connector of the same name that have no effect here, with the reason."""


def _backend(value: object) -> str:
    key = f"{EXTRA}.backend"
    name = value.lower() if isinstance(value, str) else value
    if name in ("mooncake", "yuanrong"):
        raise ConfigError(key, value, "this backend is not supported", 'set it to "memcache" or "local"')
    if name not in BACKENDS:
        rule = "required" if value is None else f"must be one of {', '.join(BACKENDS)}"
        raise ConfigError(key, value, rule, 'set it to "memcache" for a pool of many engines, or to "local"')
    return str(name)


def _bool(extra: Mapping[str, Any], key: str) -> bool:
    return check_bool(f"{EXTRA}.{key}", extra.get(key, False))


def _int(extra: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    return check_int(f"{EXTRA}.{key}", extra.get(key, default), least)


def _local_bytes(extra: Mapping[str, Any]) -> int:
    key = "local_dram_size_GB"
    rule, fix = "must be a number above 0", "write GiB without quotes"
    value = extra.get(key, DEFAULT_LOCAL_GB)
    gib = check_number(f"{EXTRA}.{key}", value, rule, low=0, high=1 << 20, fix=fix, open_low=True)
    return int(gib * GIB)


def find_store_options(parts: Iterable[ConnectorPart]) -> AscendStoreConfig | None:
    """The options of an engine's store connector; None without one. parts: of this package.

    Raises ConfigError.
    """
    found = [parse_ascend_store(part.role, part.options) for part in parts if part.name == STORE]
    if len(found) > 1:
        rule = f"only one {STORE} can own an engine's layer buffers"
        raise ConfigError(f"{EXTRA}.connectors", None, rule, "remove the others")
    return found[0] if found else None


def validate_store(facts: EngineFacts, *, shares_buffers: bool) -> None:
    """Checks an engine with the store connector. shares_buffers: its layers do. Raises ConfigError."""
    if facts.index_topk is None:
        rule = "the model has no sparse attention indexer"
        raise ConfigError("kv_transfer_config.kv_connector", STORE, rule, "serve a DSA model")
    check_parallelism(facts, STORE)
    if shares_buffers and not facts.enforce_eager:
        rule = "layers that share buffers are loaded between kernels, which a compiled graph has no place for"
        fix = 'pass --enforce-eager, or set layerwise_independent_layers to "all"'
        raise ConfigError("enforce_eager", False, rule, fix)
    if facts.scheduler_cls not in (None, SCHEDULER):
        rule = f"{STORE} needs a scheduler that drops tokens computed from KV that failed to load"
        raise ConfigError("scheduler_cls", facts.scheduler_cls, rule, "leave --scheduler-cls out")
