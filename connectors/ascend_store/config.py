"""Options of ``AscendStoreConnector``, checked at start-up. Neither vLLM nor torch is needed here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.config import GIB, ConfigError, check_bool
from vllm_kvoffload.layerwise.buffer_plan import EXTRA, BufferOptions, parse_buffer_options
from vllm_kvoffload.store.registry import BACKENDS, DEFAULT_LOCAL_GB, OPTIONS

CONNECTOR = "AscendStoreConnector"
MULTI_CONNECTORS = ("MultiConnector", "KVOffloadMultiConnector")
MAX_PREFETCH = 8


@dataclass(frozen=True)
class AscendStoreConfig:
    """Options of one engine.

    backend: of the store. buffers: as given, without sharing if `use_layerwise` is false. prefetch_layers:
    how far ahead loads may begin. max_transfer_blocks, max_transfer_bytes: of one call of the store, 0 for
    any. save_decode_cache: also store what is computed after the prompt; always so with shared buffers.
    local_bytes: of the local backend's pool. namespace: keeps engines apart that share a store. extra: as
    given, for the store.
    """

    backend: str
    buffers: BufferOptions
    prefetch_layers: int
    max_transfer_blocks: int
    max_transfer_bytes: int
    save_decode_cache: bool
    local_bytes: int
    namespace: str
    extra: Mapping[str, Any]


def parse_ascend_store(kv_role: str | None, extra: Mapping[str, Any]) -> AscendStoreConfig:
    """Reads the options out of vLLM's kv-transfer config. Raises ConfigError naming the key."""
    for key in extra:
        if key not in _KEYS:
            raise _unknown_key(str(key), extra[key])
    if kv_role not in ("kv_producer", "kv_both"):
        rule = f"{CONNECTOR} runs on engines that prefill"
        raise ConfigError("kv_role", kv_role, rule, "set it to kv_producer")
    for key in ("consumer_is_to_load", "consumer_is_to_put", "load_async"):
        if _bool(extra, key, False):
            rule = "is for engines that decode, which get their KV by SfaRemoteD2HConnector"
            if key == "load_async":
                rule = "is not available: loads are awaited layer by layer"
            raise ConfigError(f"{EXTRA}.{key}", True, rule, "set it to false, or remove it")
    layerwise = _bool(extra, "use_layerwise", False)
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
        save_decode_cache=_bool(extra, "save_decode_cache", False),
        local_bytes=int(_gib(extra) * GIB),
        namespace=_text(extra, "namespace"),
        extra=dict(extra),
    )


_KEYS = (
    "backend", "use_layerwise", "layerwise_num_shared_buffers", "layerwise_independent_layers",
    "layerwise_prefetch_layers", "layerwise_max_transfer_blocks", "layerwise_max_transfer_bytes",
    "save_decode_cache", "consumer_is_to_load", "consumer_is_to_put", "load_async", "namespace", *OPTIONS,
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
"""Keys of vLLM-Ascend's connector of the same name that mean nothing here, and why."""


def _unknown_key(key: str, value: object) -> ConfigError:
    name = f"{EXTRA}.{key}"
    if key in _KNOWN_ELSEWHERE:
        return ConfigError(name, value, _KNOWN_ELSEWHERE[key], "remove it")
    close = difflib.get_close_matches(key, _KEYS, n=1)
    if close:
        return ConfigError(
            name, value, f"no such key; did you mean {close[0]!r}?", f"rename it to {close[0]}"
        )
    return ConfigError(name, value, "no such key", f"remove it; the keys are {', '.join(_KEYS)}")


def _backend(value: object) -> str:
    key = f"{EXTRA}.backend"
    name = value.lower() if isinstance(value, str) else value
    if name in ("mooncake", "yuanrong"):
        raise ConfigError(key, value, "this backend is not supported", 'set it to "memcache" or "local"')
    if name not in BACKENDS:
        rule = "required" if value is None else f"must be one of {', '.join(BACKENDS)}"
        raise ConfigError(key, value, rule, 'set it to "memcache" for a pool of many engines, or to "local"')
    return str(name)


def _bool(extra: Mapping[str, Any], key: str, default: bool) -> bool:
    return check_bool(f"{EXTRA}.{key}", extra.get(key, default))


def _int(extra: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    value = extra.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        rule = f"must be a whole number, at least {least}"
        raise ConfigError(f"{EXTRA}.{key}", value, rule, f"set it to {default}")
    return value


def _gib(extra: Mapping[str, Any]) -> float:
    key = "local_dram_size_GB"
    value = extra.get(key, DEFAULT_LOCAL_GB)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 20:
        raise ConfigError(f"{EXTRA}.{key}", value, "must be a number above 0", "write GiB without quotes")
    return float(value)


def _text(extra: Mapping[str, Any], key: str) -> str:
    value = extra.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"{EXTRA}.{key}", value, "must be a string", "write it in quotes")
    return value


def find_store_options(
    kv_connector: str | None, kv_role: str | None, extra: Mapping[str, Any]
) -> AscendStoreConfig | None:
    """The options of an engine's store connector, alone or in a multi connector; None without one.

    Raises ConfigError.
    """
    found = [
        parse_ascend_store(role, options)
        for name, role, options in nested_connectors(kv_connector, kv_role, extra)
        if name == CONNECTOR
    ]
    if len(found) > 1:
        rule = f"only one {CONNECTOR} can own an engine's layer buffers"
        raise ConfigError(f"{EXTRA}.connectors", None, rule, "remove the others")
    return found[0] if found else None


def nested_connectors(
    kv_connector: str | None, kv_role: str | None, extra: Mapping[str, Any]
) -> list[tuple[str | None, str | None, Mapping[str, Any]]]:
    """(connector, role, extra config) of what is configured, a multi connector's parts in its place."""
    if kv_connector not in MULTI_CONNECTORS:
        return [(kv_connector, kv_role, extra)]
    parts = extra.get("connectors")
    key = f"{EXTRA}.connectors"
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(p, Mapping) for p in parts):
        raise ConfigError(key, parts, "must be a list of kv-transfer configs", "see docs/prefill.md")
    names = {part.get("kv_connector") for part in parts}
    for part in parts if names & {CONNECTOR, "SfaRemoteD2HConnector"} else ():
        if part.get("kv_role") != kv_role:
            rule = f"its parts have the role of the engine, {kv_role}"
            raise ConfigError(f"{key}.kv_role", part.get("kv_role"), rule, f"set it to {kv_role}")
    return [
        (p.get("kv_connector"), p.get("kv_role"), p.get("kv_connector_extra_config") or {}) for p in parts
    ]
