"""Platform-independent parts of a worker's offload."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import StatsChannel
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.capacity import CapacityPlan
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.step import StepBatch
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


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of the target or draft model, as derived from vLLM's attention metadata."""

    batch: StepBatch


PassT = TypeVar("PassT", bound=ForwardPass)


class WorkerOffload(ABC, Generic[PassT]):
    """One worker's offload. A platform's subclass creates the parts; :meth:`close` releases all of them.

    The runner opens a pass around each forward pass of a model: :meth:`target_pass` and :meth:`draft_pass`
    are the only places where the manager's steps and draft passes begin.
    """

    manager: SparseKVManager
    running: PassT | None = None
    """The pass that is open. None between passes, and in dummy runs that have nothing to attend to."""
    dummy = False
    """Whether the current forward passes are dummy runs."""
    _drafts_begun = 0
    _memory: Closable
    _runtime: Runtime
    _channel: StatsChannel
    _recorder: TraceRecorder | None

    @abstractmethod
    def describe(self, attn_metadata: Mapping[str, Any]) -> PassT:
        """Derives a pass from vLLM's attention metadata by layer name; those of any layer will do."""

    def describe_draft(self, context: Any, index: int) -> PassT:  # for platforms that need it
        """Derives draft pass ``index`` from vLLM's forward context."""
        return self.describe(context.attn_metadata)

    @contextmanager
    def target_pass(self, context: Any, req_ids: Sequence[str]) -> Iterator[None]:
        """Begins a step; the target model's layers run inside.

        Args:
            context: vLLM's forward context. req_ids: the batch's request ids, in order.

        Raises:
            ValueError: the batch has more requests than ids. Otherwise as the manager's ``begin_step``.
        """
        made = self.describe(context.attn_metadata)
        self.manager.begin_step(made.batch.named(req_ids[: made.batch.num_requests]))
        self._drafts_begun = 0
        with self._open(made):
            yield

    @contextmanager
    def draft_pass(self, context: Any, req_ids: Sequence[str]) -> Iterator[None]:
        """Begins the step's next draft pass; the draft model's layers run inside. See :meth:`target_pass`."""
        index = self._drafts_begun
        made = self.describe_draft(context, index)
        self.manager.begin_draft(made.batch.named(req_ids[: made.batch.num_requests]), index)
        self._drafts_begun = index + 1
        with self._open(made):
            yield

    @contextmanager
    def dummy_pass(self, context: Any) -> Iterator[None]:  # for platforms with graphs
        """Wraps a dummy run of the target model that has attention metadata. It begins no step."""
        yield

    @contextmanager
    def _open(self, made: PassT) -> Iterator[None]:
        self.running = made
        try:
            yield
        finally:
            self.running = None

    @contextmanager
    def dummy_run(self) -> Iterator[None]:
        """Wraps forward passes without real requests."""
        self.dummy = True
        try:
            yield
        finally:
            self.dummy = False

    def settle(self) -> None:
        """Waits for device and ranks, which may still write to blocks that are about to be filled from
        outside. Collective over the TP ranks."""
        self._runtime.current_stream().synchronize()
        self.manager.host_rows.join()
        self.manager.host_rows.await_ranks()

    def publish(self) -> None:
        """Publishes the counters to vLLM's metrics."""
        manager = self.manager
        self._channel.publish(manager.stats, live_rows=manager.partitions.total - manager.partitions.num_free)

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


def log_capacity(plan: CapacityPlan, rounded: str = "") -> None:
    """Logs the offload's capacity. rounded: a line about an option that was rounded, or ""."""
    if rounded:
        logger.warning("%s", rounded)
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


def add_load_errors(output: Any) -> None:
    """Adds the blocks that failed to load in a step to its result, after a step that made drafts.

    After such a step, vLLM asks the connector for these blocks before it ends the connector's step, in which
    they become known. They would be reported with the next step, after a token that was computed from them.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    reported = getattr(output, "kv_connector_output", None)
    if reported is not None and has_kv_transfer_group():
        failed = get_kv_transfer_group().get_block_ids_with_load_errors()
        reported.invalid_block_ids = reported.invalid_block_ids | failed


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
