"""What both halves derive from vLLM's configuration, so that they can't disagree."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from vllm_kvoffload.config import ConfigError
from vllm_kvoffload.connectors.ascend_store.config import (
    CONNECTOR,
    MULTI_CONNECTORS,
    AscendStoreConfig,
    find_store_options,
)
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan, geometry_layers, plan_buffers
from vllm_kvoffload.platforms.ascend.checks import ascend_geometry
from vllm_kvoffload.platforms.engine import model_geometry
from vllm_kvoffload.store import SHARED_BACKENDS, KeySpace, require_hash_seed

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

OBJECT_ALIGNMENT = 4096
"""Stores give objects multiples of this many bytes."""

SCHEDULER = "vllm_kvoffload.connectors.ascend_store.lost_steps.LostStepScheduler"


def store_options(vllm_config: VllmConfig) -> AscendStoreConfig | None:
    """The engine's options, None without the connector. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    return find_store_options(transfer.kv_connector, transfer.kv_role, transfer.kv_connector_extra_config)


def buffer_plan(vllm_config: VllmConfig) -> BufferPlan | None:
    """Which layers share memory, None for an engine without the connector. Raises ConfigError."""
    options = store_options(vllm_config)
    if options is None:
        return None
    geometry = (
        model_geometry(vllm_config, "cpu") if current_platform.is_cpu() else ascend_geometry(vllm_config)
    )
    return plan_buffers(geometry_layers(geometry), options.buffers)


def object_bytes(plan: BufferPlan, block_size: int) -> int:
    """Bytes of a block in all layers."""
    return plan.logical_bytes * block_size


def num_blocks(vllm_config: VllmConfig, plan: BufferPlan, device_bytes: int) -> int:
    """Blocks for a device budget. With shared buffers a request's KV is in the store only, so a store of the
    engine's own limits them, too: what runs always finds room there.

    Raises ConfigError: not one longest request fits, or more blocks are asked for than find room.
    """
    block_size = vllm_config.cache_config.block_size
    blocks = device_bytes // (plan.physical_bytes * block_size)
    options = store_options(vllm_config)
    assert options is not None
    if not plan.has_reuse or options.backend in SHARED_BACKENDS:
        return blocks
    size = -(-object_bytes(plan, block_size) // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT
    # Of each request the last block may be there twice, as it was before the step and after.
    room = options.local_bytes // size - 2 * vllm_config.scheduler_config.max_num_seqs
    longest = -(-vllm_config.model_config.max_model_len // block_size) + 1
    if room < longest:
        needed = (longest + 2 * vllm_config.scheduler_config.max_num_seqs) * size / 2**30
        rule = f"holds {max(room, 0)} blocks of running requests; a longest request has {longest}"
        raise ConfigError(
            "kv_connector_extra_config.local_dram_size_GB",
            options.local_bytes / 2**30,
            rule,
            f"set it to {needed:.2f} or more, or lower --max-model-len or --max-num-seqs",
        )
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is not None and override > room:
        rule = f"{options.local_bytes / 2**30:g} GiB of store hold {room} blocks of running requests"
        fix = f"set it to at most {room}, or make local_dram_size_GB larger"
        raise ConfigError("num_gpu_blocks_override", override, rule, fix)
    return min(blocks, room)


def key_space(vllm_config: VllmConfig) -> KeySpace:
    """All that must agree for a block to be shared. Raises ConfigError: hashes are not reproducible."""
    options, plan = store_options(vllm_config), buffer_plan(vllm_config)
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
    """Equal for engines whose block hashes are, "private" where those of every process are others."""
    hash_fn, seed = get_hash_fn_by_name(algorithm), os.environ.get("PYTHONHASHSEED")
    # Until vLLM 0.23 hashes began at random without that variable, whatever the algorithm.
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if seed is None and (resolve is None or "xxhash" in algorithm):
        return "private"
    return bytes(hash_fn(resolve(hash_fn) if resolve is not None else seed)).hex()[:32]


def refuse_unless_possible(vllm_config: VllmConfig, index_topk: int | None) -> None:
    """Refuses a configuration of the store connector that can't work. Raises ConfigError."""
    plan = buffer_plan(vllm_config) if index_topk is not None else None
    options = store_options(vllm_config)
    if options is None:
        return
    if plan is None:
        rule = "the model has no sparse attention indexer"
        raise ConfigError("kv_transfer_config.kv_connector", CONNECTOR, rule, "serve a DSA model")
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ConfigError(name, size, f"must be 1 with {CONNECTOR}", f"set --{name.replace('_', '-')} 1")
    if plan.has_reuse and not vllm_config.model_config.enforce_eager:
        rule = "layers that share buffers are loaded between kernels, which a compiled graph has no place for"
        fix = 'pass --enforce-eager, or set layerwise_independent_layers to "all"'
        raise ConfigError("enforce_eager", False, rule, fix)
    chosen = vllm_config.scheduler_config.scheduler_cls
    if chosen not in (None, SCHEDULER):
        rule = f"{CONNECTOR} needs a scheduler that drops what a step computed over lost KV"
        raise ConfigError("scheduler_cls", chosen, rule, "leave --scheduler-cls out")
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector in MULTI_CONNECTORS:
        _check_multi(transfer)
    key_space(vllm_config)


def use_scheduler(vllm_config: VllmConfig) -> None:
    """Gives an engine with the connector its scheduler; after `refuse_unless_possible`."""
    if store_options(vllm_config) is None:
        return
    vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    # The next step would be on its way before it is known what this one lost.
    vllm_config.scheduler_config.async_scheduling = False


def _check_multi(transfer: KVTransferConfig) -> None:
    """vLLM's own multi connector would let decode have what the store has lost, or overwrites."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_kvoffload.connectors.multi import KVOffloadMultiConnector

    if not issubclass(KVConnectorFactory.get_connector_class(transfer), KVOffloadMultiConnector):
        rule = "this class does not know what the store loses, nor when a layer buffer may be used again"
        fix = "use KVOffloadMultiConnector"
        raise ConfigError("kv_transfer_config.kv_connector", transfer.kv_connector, rule, fix)
