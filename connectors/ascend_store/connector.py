"""The connector class that vLLM instantiates: once in the scheduler, once in each worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata
from vllm_kvoffload.connectors.ascend_store.planning import key_space
from vllm_kvoffload.connectors.ascend_store.scheduler import StoreScheduler
from vllm_kvoffload.connectors.ascend_store.worker import Loss, StoreWorker
from vllm_kvoffload.connectors.device import current_npu, make_runtime
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout, layer_index
from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.layerwise.pipeline import LayerMemory, LayerPipeline, Part, PipelineLimits
from vllm_kvoffload.layerwise.slot_gate import ReadGuard
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import STORE, StatsChannel
from vllm_kvoffload.runtime import Runtime
from vllm_kvoffload.runtime.ranks import rank_barrier
from vllm_kvoffload.store import Role, Store, handshake, make_store

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = get_logger(__name__)

READ_MARGIN_S = 5.0
"""Margin after a remote read's lease: once it has passed, the buffer is free whether or not the lease was
renewed."""


def layer_memory(layout: Layout, block_size: int) -> list[LayerMemory]:
    """Describes where each layer's rows lie on the device and in a store object (layers one after
    another)."""
    offset, layers = 0, []
    for layer in layout.layers:
        parts = []
        for base, stride, nbytes in (*layer.main, *layer.indexer):
            parts.append(Part(base, stride, nbytes // block_size, offset))
            offset += nbytes
        layers.append(LayerMemory(layer.index, tuple(parts)))
    return layers


def check_aliases(plan: BufferPlan, layout: Layout) -> None:
    """Raises RuntimeError if the runner's cache layout differs from the plan, which would corrupt KV."""
    if [layer.index for layer in plan.layers] != [layer.index for layer in layout.layers]:
        raise RuntimeError("the layers with a KV cache are not those of the buffer plan")
    for position, layer in enumerate(layout.layers):
        for before, other in enumerate(layout.layers[:position]):
            planned = plan.slot_of[position] == plan.slot_of[before]
            # Of two layers' indexers one may be missing.
            pairs = [*zip(layer.main, other.main, strict=True), *zip(layer.indexer, other.indexer)]  # noqa: B905
            if any((mine[0] == theirs[0]) != planned for mine, theirs in pairs):
                found = "do not share" if planned else "share"
                raise RuntimeError(
                    f"layers {other.index} and {layer.index} {found} memory, against the buffer plan: this "
                    "platform's runner does not support layerwise_num_shared_buffers"
                )


class AscendStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill with KV in a store: every layer's prefix comes from it, every layer's new rows go to it."""

    loads_before_writes = True
    """A layer calls `wait_for_layer_load` before it writes rows or reads keys: vLLM's own hook runs too
    late."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = settings = EngineSettings.of(vllm_config)
        options, plan = settings.store, settings.buffers
        assert options is not None
        assert plan is not None
        if kv_cache_config is None or len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("AscendStoreConnector needs a model whose KV caches share one block table")
        self._options, self._plan = options, plan
        self._num_blocks = kv_cache_config.num_blocks
        self._block_size = vllm_config.cache_config.block_size
        self._scheduler: StoreScheduler | None = None
        self._worker: StoreWorker | None = None
        self._store: Store | None = None
        self._runtime: Runtime | None = None
        self._channel: StatsChannel | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._store = self._make_store("scheduler")
            speculative = vllm_config.speculative_config
            self._scheduler = StoreScheduler(
                self._store,
                key_space(vllm_config, settings),
                self._block_size,
                mtp=speculative is not None and speculative.method == "mtp",
                keeps_all=plan.has_reuse or options.save_decode_cache,
            )

    def _make_store(self, role: Role, caches: Sequence[torch.Tensor] = ()) -> Store:
        """Opens the store. caches: the tensors that the client copies to and from."""
        instance, npu = str(self._kv_transfer_config.engine_id), current_npu()
        options = self._options
        if npu is None or role == "scheduler":  # the scheduler process may not use a device
            return make_store(
                options.backend,
                local_bytes=options.local_bytes,
                role=role,
                instance=instance,
                qos_priority=options.qos_priority,
            )
        from vllm_kvoffload.store.staged_copies import StagedCopies

        return make_store(
            options.backend,
            local_bytes=options.local_bytes,
            role=role,
            instance=instance,
            device_id=npu.current_device(),
            devices=StagedCopies(npu, caches),
            qos_priority=options.qos_priority,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: the store is only a cache, so no request waits for what another one saves."""
        return False

    # ---------------------------------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = Layout.of(kv_caches, self._num_blocks)
        check_aliases(self._plan, layout)
        group = get_tp_group()
        owner = group.rank_in_group == 0
        keys = key_space(self._vllm_config, self._settings)
        caches = [t for cache in kv_caches.values() for t in ([cache] if torch.is_tensor(cache) else cache)]
        if owner:
            self._store = self._make_store("owner", caches)
        if group.world_size > 1:
            rank_barrier(group.cpu_group)()
        if self._store is None:
            self._store = self._make_store("rank", caches)
        self._store.register(layout.regions)
        if owner:
            handshake(self._store, keys)
        self._runtime = make_runtime()
        options = self._options
        limits = PipelineLimits(
            prefetch_layers=options.prefetch_layers,
            max_runs=options.max_transfer_blocks,
            max_bytes=options.max_transfer_bytes,
        )
        memory = layer_memory(layout, self._block_size)
        pipeline = LayerPipeline(self._plan, memory, self._num_blocks, self._store, self._runtime, limits)
        self._worker = StoreWorker(
            self._store,
            keys,
            pipeline,
            block_size=self._block_size,
            object_bytes=self._settings.store_object_bytes(),
            publishes=owner,
            shares=self._plan.has_reuse,
            agree=_agree_over_ranks,
        )
        tokens = self._num_blocks * self._block_size
        dp_rank = self._vllm_config.parallel_config.data_parallel_index
        self._channel = StatsChannel(STORE, self._vllm_config.instance_id, dp_rank, group.rank_in_group)
        self._channel.publish(
            {
                "layer_buffer_bytes": tokens * self._plan.physical_bytes,
                "layer_buffer_bytes_unshared": tokens * self._plan.logical_bytes,
            }
        )
        logger.info(
            "Store %s: %d blocks of %d bytes on the device, %d bytes in the store",
            options.backend,
            self._num_blocks,
            self._plan.physical_bytes * self._block_size,
            self._settings.store_object_bytes(),
        )

    def use_read_guard(self, guard: ReadGuard, lease_s: float) -> None:
        """Registers a connector whose remote engines read the same caches; a read lasts `lease_s` at most."""
        assert self._worker is not None
        # Without shared buffers nothing is overwritten, so no read has to be waited for.
        self._worker.pipeline.use_guard(guard, lease_s + READ_MARGIN_S if self.shares_buffers else 0.0)

    @property
    def worker(self) -> StoreWorker | None:
        """The worker half, available once the caches are registered."""
        return self._worker

    @property
    def shares_buffers(self) -> bool:
        """Whether layers share device buffers."""
        return self._plan.has_reuse

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, StoreMetadata):
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Does nothing: loads were started when the step's metadata arrived."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker is not None:
            self._worker.pipeline.wait_layer(layer_index(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.pipeline.layer_done(layer_index(layer_name))

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.end_step()
            self._publish(self._worker)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is not None:
            self._worker.release(finished_req_ids)
            if finished_req_ids:  # release their objects now: the next step may be far off
                self._publish(self._worker)
        return None, None

    def _publish(self, worker: StoreWorker) -> None:
        assert self._channel is not None
        self._channel.publish(worker.metrics())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid() if self._worker is not None else set()

    def shutdown(self) -> None:
        runtime, self._runtime = self._runtime, None
        store, self._store = self._store, None
        channel, self._channel = self._channel, None
        self._worker = None
        with ExitStack() as stack:  # also when a copy hangs, which the runtime reports
            for part in (channel, store):
                if part is not None:
                    stack.callback(part.close)
            if runtime is not None:
                stack.callback(runtime.shutdown)

    # ------------------------------------------------------------------------------------- scheduler side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._scheduler is not None
        return self._scheduler.matched_tokens(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        assert self._scheduler is not None
        self._scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        return self._scheduler.metadata(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        assert self._scheduler is not None
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Hides all stored KV from requests that begin later, because the weights may have changed.

        Runs on the scheduler. Returns False on the workers, which get the new generation with each
        request.
        """
        if self._scheduler is None:
            return False
        self._scheduler.reset()
        logger.info(
            "The store was reset: blocks stored so far are not found any more, and make room for new ones"
        )
        return True

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003
        return True  # a captured graph runs no hooks, so its layers would be loaded after it ran


def _agree_over_ranks(lost: dict[str, Loss]) -> dict[str, Loss]:
    group = get_tp_group()
    if group.world_size == 1:
        return lost
    gathered: list[dict[str, Loss]] = [{} for _ in range(group.world_size)]
    torch.distributed.all_gather_object(gathered, lost, group=group.cpu_group)
    found = [entry for part in gathered for entry in part.items()]
    return dict(sorted(found, key=lambda entry: entry[1][1]))  # the worst last
