"""The settings of one engine: its options and all derived values, read once from vLLM's configuration.

Owns the extraction of options from a VllmConfig. Platforms, connectors and metrics receive the resulting
value, or a part of it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan, geometry_layers, plan_buffers
from vllm_kvoffload.settings.connectors import (
    REMOTE_D2H,
    ConnectorPart,
    connector_parts,
)
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import EngineFacts, SparseOffloadConfig, parse_sparse_offload
from vllm_kvoffload.settings.remote_d2h import RemoteD2HConfig, parse_remote_d2h
from vllm_kvoffload.settings.store import SCHEDULER, SHARED_BACKENDS, AscendStoreConfig, find_store_options
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.sparse.capacity import CapacityInputs, CapacityPlan, plan_capacity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Platform = Literal["cpu", "npu"]

OBJECT_ALIGNMENT = 4096
"""Stores round object sizes up to a multiple of this many bytes."""


@dataclass(frozen=True)
class EngineOptions:
    """Options of offload and connectors, as given by the user.

    platform: determines the cache layout and the registered connector classes. additional: vLLM's
    `additional_config`, including keys of other plugins. parts: all configured connectors, including those of
    other packages. offload: options of the sparse decode offload, enabled or not. remote, store: options of
    our connectors; None if not configured.
    """

    platform: Platform
    additional: Mapping[str, Any]
    parts: tuple[ConnectorPart, ...]
    offload: SparseOffloadConfig
    remote: RemoteD2HConfig | None
    store: AscendStoreConfig | None

    @classmethod
    def of(cls, vllm_config: VllmConfig, platform: Platform | None = None) -> EngineOptions:
        """Reads vLLM's configuration. platform: None for this process's own platform.

        Raises ConfigError: an option is invalid.
        """
        return cls(**_options(vllm_config, platform or _current_platform()))

    @property
    def uses_our_connector(self) -> bool:
        """Whether a connector of this package is configured."""
        return self.remote is not None or self.store is not None


@dataclass(frozen=True)
class EngineSettings(EngineOptions):
    """The options, and the values derived from them and the model.

    facts: from vLLM's own configuration. geometry: None for a model without sparse attention. max_blocks:
    `num_gpu_blocks_override`.
    """

    facts: EngineFacts
    geometry: KVGeometry | None
    max_model_len: int
    max_blocks: int | None

    @classmethod
    def of(cls, vllm_config: VllmConfig, platform: Platform | None = None) -> EngineSettings:
        """Reads vLLM's configuration. platform: None for this process's own platform.

        Raises ConfigError: an option or the model's config is invalid.
        """
        platform = platform or _current_platform()
        options = _options(vllm_config, platform)
        additional = options["additional"]
        facts = engine_facts(vllm_config, dsa_context_parallel=bool(additional.get("enable_dsa_cp")))
        return cls(
            **options,
            facts=facts,
            geometry=None if facts.index_topk is None else _geometry(vllm_config, platform, additional),
            max_model_len=vllm_config.model_config.max_model_len,
            max_blocks=getattr(vllm_config.cache_config, "num_gpu_blocks_override", None),
        )

    @property
    def model(self) -> KVGeometry:
        """The geometry; must only be used for a model with sparse attention."""
        assert self.geometry is not None
        return self.geometry

    @cached_property
    def buffers(self) -> BufferPlan | None:
        """The plan of layers that share device memory; None without our store connector or without sparse
        attention. Raises ConfigError."""
        if self.store is None or self.geometry is None:
            return None
        return plan_buffers(geometry_layers(self.geometry), self.store.buffers)

    @property
    def shared_buffers(self) -> BufferPlan | None:
        """The same plan if any layers share memory, else None."""
        return self.buffers if self.buffers is not None and self.buffers.has_reuse else None

    @property
    def prefill_buffers(self) -> int:
        """Number of buffers that prefill streams through; 0 if the KV stays on the device.

        A decode engine has buffers too: it recomputes requests that were preempted or failed to transfer.
        """
        return 0 if self.offload.keep_device_kv_cache else self.offload.prefill_buffers

    def choose_scheduler(self, vllm_config: VllmConfig) -> None:
        """Selects the scheduler that our store connector requires, if one is configured."""
        if self.store is not None:
            vllm_config.scheduler_config.scheduler_cls = SCHEDULER
            # With async scheduling, the next step would be scheduled before this step's failures are known.
            vllm_config.scheduler_config.async_scheduling = False

    def capacity_inputs(self, device_bytes: int) -> CapacityInputs:
        """Inputs of the capacity formula for a device budget."""
        return CapacityInputs.of(
            self.model,
            self.offload,
            block_size=self.facts.block_size,
            max_num_seqs=self.facts.max_num_seqs,
            max_model_len=self.max_model_len,
            device_bytes=device_bytes,
            prefill_buffers=self.prefill_buffers,
        )

    def capacity(self, device_bytes: int) -> CapacityPlan:
        """The capacity for a device budget.

        Raises:
            ConfigError: not even one request of max_model_len fits, or more blocks are requested than fit.
        """
        plan = plan_capacity(self.capacity_inputs(device_bytes))
        if self.max_blocks is not None and self.max_blocks > plan.num_blocks:
            rule = f"the {plan.limit} budget holds {plan.num_blocks} blocks"
            fix = f"set it to at most {plan.num_blocks}"
            raise ConfigError("num_gpu_blocks_override", self.max_blocks, rule, fix)
        return plan

    def store_object_bytes(self) -> int:
        """Size of a store object: the bytes of one KV block in all layers."""
        assert self.buffers is not None
        return self.buffers.logical_bytes * self.facts.block_size

    def shared_buffer_bytes(self, device_bytes: int) -> int:
        """Bytes to report for a device budget so that vLLM's division yields `shared_buffer_blocks`: vLLM
        divides by the pages of all layers, including those that share memory. Raises ConfigError."""
        return self.shared_buffer_blocks(device_bytes) * self.store_object_bytes()

    def shared_buffer_blocks(self, device_bytes: int) -> int:
        """Number of blocks for a device budget with our store connector.

        With shared buffers a request's KV exists only in the store. A store owned by this engine therefore
        limits the blocks too, so that every running request has room in it.

        Raises:
            ConfigError: not even one request of max_model_len fits, or more blocks are requested than fit.
        """
        plan, options, block_size = self.buffers, self.store, self.facts.block_size
        assert plan is not None
        assert options is not None
        blocks = device_bytes // (plan.physical_bytes * block_size)
        if not plan.has_reuse or options.backend in SHARED_BACKENDS:
            return blocks
        size = -(-self.store_object_bytes() // OBJECT_ALIGNMENT) * OBJECT_ALIGNMENT
        # Each request's last block may be stored twice: as it was before the step and after it.
        reserve = 2 * self.facts.max_num_seqs
        room = options.local_bytes // size - reserve
        longest = -(-self.max_model_len // block_size) + 1
        if room < longest:
            raise ConfigError(
                "kv_connector_extra_config.local_dram_size_GB",
                options.local_bytes / GIB,
                f"holds {max(room, 0)} blocks of running requests; a longest request has {longest}",
                f"set it to {(longest + reserve) * size / GIB:.2f} or more, or lower --max-model-len or "
                "--max-num-seqs",
            )
        if self.max_blocks is not None and self.max_blocks > room:
            rule = f"{options.local_bytes / GIB:g} GiB of store hold {room} blocks of running requests"
            fix = f"set it to at most {room}, or make local_dram_size_GB larger"
            raise ConfigError("num_gpu_blocks_override", self.max_blocks, rule, fix)
        return min(blocks, room)


def engine_facts(vllm_config: VllmConfig, *, dsa_context_parallel: bool = False) -> EngineFacts:
    """Facts about the engine that the option rules depend on."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    transfer, speculative = vllm_config.kv_transfer_config, vllm_config.speculative_config
    return EngineFacts(
        index_topk=getattr(model.hf_text_config, "index_topk", None),
        block_size=vllm_config.cache_config.block_size,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        has_compress_ratios=getattr(model.hf_text_config, "compress_ratios", None) is not None,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        draft_method=speculative.method if speculative else None,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        decode_context_parallel_size=parallel.decode_context_parallel_size,
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        dsa_context_parallel=dsa_context_parallel,
        micro_batches=uses_micro_batches(vllm_config),
        uses_v2_runner=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        kv_connector=transfer.kv_connector if transfer else None,
        kv_role=transfer.kv_role if transfer else None,
        sleep_mode=model.enable_sleep_mode,
        enforce_eager=bool(model.enforce_eager),
        scheduler_cls=getattr(vllm_config.scheduler_config, "scheduler_cls", None),
    )


def uses_micro_batches(vllm_config: VllmConfig) -> bool:
    """Whether vLLM divides steps into micro-batches."""
    return bool(getattr(vllm_config.parallel_config, "use_ubatching", False))


def _geometry(vllm_config: VllmConfig, platform: Platform, additional: Mapping[str, Any]) -> KVGeometry:
    """Geometry of the served model in the platform's cache layout."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    indexer_layout = None
    if platform == "npu":
        indexer_layout = "int8" if additional.get("enable_sparse_li_c8") else "model"
    return KVGeometry.from_hf_config(
        model.hf_text_config,
        layout="cpu" if platform == "cpu" else "ascend",
        dtype=model.dtype,
        indexer_layout=indexer_layout,
        num_speculative_tokens=speculative.num_speculative_tokens if speculative else 0,
        mtp=speculative is not None and speculative.method == "mtp",
    )


def configured_hosts(vllm_config: VllmConfig) -> list[object]:
    """Hosts of the engine's own deployment, from vLLM's configuration; excludes loopback."""
    from vllm.utils.network_utils import get_ip

    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    return [
        get_ip(),
        socket.gethostname(),
        getattr(transfer, "kv_ip", None),
        getattr(parallel, "data_parallel_master_ip", None),
        getattr(parallel, "master_addr", None),
    ]


def _current_platform() -> Platform:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "npu"


def _options(vllm_config: VllmConfig, platform: Platform) -> dict[str, Any]:
    """Arguments of EngineOptions."""
    given, transfer = vllm_config.additional_config, vllm_config.kv_transfer_config
    additional: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    parts = connector_parts(transfer)
    ours = [part for part in parts if part.is_ours(registered=platform == "cpu")]
    remotes = [part for part in ours if part.name == REMOTE_D2H]
    remote = None
    if remotes and transfer is not None:
        part, hosts = remotes[0], configured_hosts(vllm_config)
        remote = parse_remote_d2h(part.role, transfer.kv_port, part.options, platform, hosts)
    return {
        "platform": platform,
        "additional": additional,
        "parts": parts,
        "offload": parse_sparse_offload(additional),
        "remote": remote,
        "store": find_store_options(ours),
    }
