"""Platform-independent parts of a worker's offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.capacity import CapacityPlan
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.trace import TraceHeader, TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)


class RankGroup(Protocol):
    """The methods used of vLLM's TP group."""

    rank_in_group: int
    world_size: int

    def broadcast_object(self, obj: Any, src: int) -> Any: ...


class Closable(Protocol):
    """Memory that can be released."""

    def close(self) -> None: ...


class WorkerOffload:
    """One worker's offload. A platform's subclass creates the parts; :meth:`close` releases all of them."""

    manager: SparseKVManager
    _memory: Closable
    _runtime: Runtime
    _channel: StatsChannel
    _recorder: TraceRecorder | None

    def publish(self) -> None:
        """Publishes the counters to vLLM's metrics."""
        manager = self.manager
        self._channel.publish(manager.stats, live_rows=manager.rows.num_rows - manager.rows.num_free)

    def close(self) -> None:
        """Finishes outstanding work, stops the threads, frees the pool."""
        self._channel.close()
        if self._recorder is not None:
            self._recorder.close()
        try:
            self._runtime.shutdown()
        finally:
            self._memory.close()


def open_segment(
    layout: HostPoolLayout,
    config: SparseOffloadConfig,
    group: RankGroup,
    barrier: Callable[[], None] | None,
    *,
    spread: bool = False,
) -> HostPool:
    """Creates the TP ranks' pool as a shared-memory segment. Collective.

    barrier: None for one rank. spread: over the machine's NUMA nodes.
    """
    owner = group.rank_in_group == 0
    pool = HostPool.create(layout, config.dram_bytes, spread=spread) if owner else None
    if barrier is None:
        assert pool is not None
        pool.seal()
        return pool
    name = group.broadcast_object(pool.name if pool is not None else "", src=0)
    if pool is None:
        pool = HostPool.attach(name, layout)
    barrier()
    if pool.is_owner:
        pool.seal()  # from here on even SIGKILL cannot leave it behind
    return pool


def log_capacity(plan: CapacityPlan) -> None:
    """Logs the start-up line with the offload's capacity."""
    logger.info(
        "Sparse KV offload: %d KV tokens in %d blocks (%.1fx the %d tokens without offload; limit: %s). "
        "Device: hot pools %s, residency %s, prefill buffers %s, indexer %s; host pool %s.",
        plan.tokens,
        plan.num_blocks,
        plan.factor,
        plan.baseline_tokens,
        plan.limit,
        _mib(plan.hot_bytes),
        _mib(plan.residency_bytes + plan.plan_bytes),
        _mib(plan.staging_bytes),
        _mib(plan.indexer_bytes_per_block * plan.num_blocks),
        _mib(plan.host_bytes),
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def add_late_losses(output: Any) -> None:
    """Adds the blocks lost in a step to its result, after a step that made drafts.

    In that case vLLM asks the connector for lost blocks before it ends the step, which is when they become
    known: they would be reported with the next step, after a token that was computed from them.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    told = getattr(output, "kv_connector_output", None)
    if told is not None and has_kv_transfer_group():
        late = get_kv_transfer_group().get_block_ids_with_load_errors()
        told.invalid_block_ids = told.invalid_block_ids | late


def open_recorder(
    vllm_config: VllmConfig, config: SparseOffloadConfig, geometry: KVGeometry
) -> TraceRecorder | None:
    """Creates the recorder for `trace_path`, None without one. Raises TraceError if the file cannot be
    created."""
    if not config.trace_path:
        return None
    rank = vllm_config.parallel_config.data_parallel_index
    header = TraceHeader(
        model_name=vllm_config.model_config.model,
        index_topk=geometry.index_topk,
        num_groups=len(geometry.groups),
        block_size=vllm_config.cache_config.block_size,
    )
    return TraceRecorder.open(config.trace_path + (f".dp{rank}" if rank else ""), header)
