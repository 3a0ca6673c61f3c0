"""Derives from vLLM's configuration the facts that both halves must agree on."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.settings.connectors import MULTI_CONNECTORS
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.store import SHARED_BACKENDS, validate_store
from vllm_kvoffload.store import KeySpace, require_hash_seed

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


def key_space(vllm_config: VllmConfig, settings: EngineSettings) -> KeySpace:
    """Builds the store's key space: everything that must match for a block to be shared.

    Raises ConfigError if block hashes are not reproducible."""
    options, plan = settings.store, settings.buffers
    assert options is not None
    assert plan is not None
    require_hash_seed(os.environ, shared=options.backend in SHARED_BACKENDS)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layout = [(layer.index, str(layer.main), layer.main_bytes, layer.indexer_bytes) for layer in plan.layers]
    return KeySpace(
        model=str(model.model),
        revision=str(model.revision or ""),
        dtype=str(model.dtype),
        block_size=cache.block_size,
        layout_digest=hashlib.sha256(json.dumps(layout).encode()).hexdigest()[:32],
        shard="0of1",  # MLA caches are the same on every rank
        hash_probe=_hash_probe(cache.prefix_caching_hash_algo),
        namespace=options.namespace,
    )


def _hash_probe(algorithm: str) -> str:
    """Returns equal text for engines with equal block hashes, "private" if hashes differ in every process."""
    hash_fn, seed = get_hash_fn_by_name(algorithm), os.environ.get("PYTHONHASHSEED")
    # Up to vLLM 0.23, hashes were seeded at random unless this variable was set, whatever the algorithm.
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if seed is None and (resolve is None or "xxhash" in algorithm):
        return "private"
    return bytes(hash_fn(resolve(hash_fn) if resolve is not None else seed)).hex()[:32]


def check_engine(vllm_config: VllmConfig, settings: EngineSettings) -> None:
    """Checks the engine's configuration for the store connector. Raises ConfigError."""
    if settings.store is None:
        return
    validate_store(settings.facts, shares_buffers=settings.shared_buffers is not None)
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector in MULTI_CONNECTORS:
        _check_multi(transfer)
    key_space(vllm_config, settings)


def _check_multi(transfer: KVTransferConfig) -> None:
    """Rejects vLLM's own multi connector, which would hand decode KV that the store has lost or
    overwritten."""
    if not getattr(KVConnectorFactory.get_connector_class(transfer), "joins_store_and_decode", False):
        rule = "this class does not know what the store loses, nor when a layer buffer may be used again"
        fix = "use KVOffloadMultiConnector"
        raise ConfigError("kv_transfer_config.kv_connector", transfer.kv_connector, rule, fix)
