"""Assembles the sparse decode offload of one NPU worker: host pool, runtime, manager, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import OFFLOAD, StatsChannel
from vllm_kvoffload.platforms.ascend.delivery import device_planning
from vllm_kvoffload.platforms.ascend.graphs import DecodeGraphs, decode_graphs
from vllm_kvoffload.platforms.ascend.host_memory import (
    HostMemory,
    MemfabricMemory,
    SegmentMemory,
    load_offload,
)
from vllm_kvoffload.platforms.ascend.kernels import KernelRows, load_kernels
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV
from vllm_kvoffload.platforms.ascend.rows import PortableRows, SparseCopyRows
from vllm_kvoffload.platforms.parts import RankGroup, WorkerOffload, open_recorder, open_segment
from vllm_kvoffload.runtime.npu import NpuRuntime
from vllm_kvoffload.runtime.ranks import rank_barrier
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.host_pool import HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.step import PoolChoice

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

HOST_PLANS = (
    "The AscendC kernels (%s) are not there: plans are made on the host, which waits for the device once in "
    "each index group. Build them with kvoffload build-ops."
)


class AscendOffload(WorkerOffload):
    """One worker's offload: everything it owns is freed by :meth:`close`.

    Args:
        settings: the engine's, with the offload enabled.
        num_blocks: KV blocks the scheduler hands out. device: this worker's NPU.
        req_ids: returns the batch's request ids in order.
        npu: torch.npu; scatter: torch_npu.npu_scatter_nd_update_.
    """

    _memory: HostMemory
    pool_view: tuple[PoolChoice, Any] | None = None
    """The last plan's top-k rows and slots, and attention's view of them."""
    graphs: DecodeGraphs | None = None
    """None if no step can run in a full graph."""
    dummy = False
    """Whether the current forward passes are dummy runs."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: EngineSettings,
        num_blocks: int,
        device: torch.device,
        req_ids: Callable[[], Sequence[str]],
        npu: Any,
        scatter: Any,
    ) -> None:
        self.geometry = geometry = settings.model
        config, block_size = settings.offload, settings.facts.block_size
        group = get_tp_group()
        barrier = rank_barrier(group.cpu_group) if group.world_size > 1 else None
        self._req_ids = req_ids
        self._target: object = None
        self._draft: object = None
        self._drafts = 0
        dtype = vllm_config.model_config.dtype
        assert isinstance(dtype, torch.dtype)
        self._dtype = dtype
        components = tuple((c.name, c.row_bytes) for c in geometry.main_components)
        layout = HostPoolLayout(geometry.num_layers, num_blocks, block_size, components)
        self._memory, row_ops, kernels = open_parts(
            layout,
            config,
            group,
            barrier,
            device=device,
            dtype=self._dtype,
            scatter=scatter,
            pulls=vllm_config.kv_transfer_config is not None,
        )
        self._recorder = open_recorder(vllm_config, config, geometry) if group.rank_in_group == 0 else None
        self._runtime = NpuRuntime(npu, device.index or 0)
        max_model_len = settings.max_model_len
        planning = None
        if kernels is not None:
            planning = device_planning(kernels, device, geometry, config, -(-max_model_len // block_size))
        self.manager = SparseKVManager(
            geometry,
            config,
            max_num_seqs=settings.facts.max_num_seqs,
            max_model_len=max_model_len,
            prefill_buffers=settings.prefill_buffers,
            host_layers=list(self._memory.layers),
            block_size=block_size,
            runtime=self._runtime,
            writer=group.rank_in_group == 0,
            barrier=barrier,
            recorder=self._recorder,
            row_ops=row_ops,
            planning=planning,
        )
        self.graphs = decode_graphs(self.manager)
        dp_rank = vllm_config.parallel_config.data_parallel_index
        self._channel = StatsChannel(OFFLOAD, vllm_config.instance_id, dp_rank, group.rank_in_group)
        self._publish_sizes(geometry, num_blocks, block_size)

    def _publish_sizes(self, geometry: KVGeometry, num_blocks: int, block_size: int) -> None:
        tokens = num_blocks * block_size
        indexer_bytes = tokens * geometry.indexer_bytes_per_token
        self._channel.publish(
            {
                "device_bytes": self.manager.device_bytes + indexer_bytes,
                "device_bytes_without_offload": tokens * geometry.bytes_per_token,
                "host_pool_bytes": self._memory.total_bytes,
                "kv_blocks": num_blocks,
            }
        )

    def host_cache(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Returns a layer's whole main KV in host memory: latent and rope, [num_blocks, block_size, 1, D]."""
        return tuple(part.view(self._dtype).unsqueeze(2) for part in self._memory.layers[layer].parts)

    def enter(self, layer: int, metadata: Any) -> bool:
        """Begins the step or draft pass of these metadata when its first layer runs.

        A step's layers have several metadata objects but one batch. Draft passes are prepared long before
        they run, so only the layer can tell when one begins. Returns False for a dummy run, which has
        nothing to attend to.
        """
        if self.graphs is not None and self.graphs.on is not None:
            return True
        if self.dummy:
            return False
        batch = metadata.batch
        if batch is (self._target if layer < self.geometry.num_target_layers else self._draft):
            return True
        names = self._req_ids()[: batch.num_requests]
        if len(names) < batch.num_requests:
            return False
        if layer < self.geometry.num_target_layers:
            self.manager.begin_step(batch.named(names))
            self._target, self._draft, self._drafts = batch, None, 0
        else:
            self.manager.begin_draft(batch.named(names), self._drafts)
            self._draft = batch
            self._drafts += 1
        return True

    @contextmanager
    def graph(self, metadata: Any, count: int) -> Iterator[bool]:
        """Wraps a forward pass over ``count`` tokens that is to run in a full graph with these metadata.

        Yields False if it must run layer by layer, because another reader waits for the step's rows.
        """
        if self.dummy:
            self.manager.begin_dummy_step()
        begun = self.dummy or self.enter(0, metadata)
        if self.graphs is None or not begun or not self.graphs.can_run(count):
            yield False
            return
        with self.graphs.step(count):
            yield True

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
        outside."""
        self._runtime.current_stream().synchronize()
        self.manager.store.join()
        self.manager.store.await_ranks()


def open_parts(
    layout: HostPoolLayout,
    config: SparseOffloadConfig,
    group: RankGroup,
    barrier: Callable[[], None] | None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    scatter: Any,
    pulls: bool,
) -> tuple[HostMemory, PortableRows, Any]:
    """Opens host pool, row copies and AscendC kernels (or None): the best supported by this machine.

    pulls: KV comes from prefill engines through MemFabric.

    Raises:
        ConfigError: MemFabric is required but unusable, or the pool exceeds its limit.
    """
    kernels = load_kernels()
    row_bytes = tuple(n for _, n in layout.components)
    basics = (row_bytes, dtype, device, scatter)
    if layout.payload_bytes > config.dram_bytes:
        rule = f"{layout.num_blocks} blocks need {layout.payload_bytes} bytes of host memory"
        raise ConfigError(
            "sparse_kv_offload_config.dram_size_per_dp_GB", config.dram_size_per_dp_GB, rule, "raise it"
        )
    try:
        offload = load_offload()
    except ConfigError as error:
        if pulls:
            raise
        logger.warning("%s. Until then the host pool is a shared-memory segment.", error)
        offload = None
    except (ImportError, OSError) as error:
        if pulls:
            rule = (
                f"decode's host pool must be MemFabric's memory, and its offload module is missing: {error}"
            )
            raise ConfigError(
                "transfer_backend", "memfabric", rule, "install MemFabric Hybrid 1.3, see docs/ascend.md"
            ) from error
        offload = None
    if offload is not None:
        memory: HostMemory = MemfabricMemory(
            offload, layout, group, device.index or 0, barrier or (lambda: None)
        )
        if kernels is None:
            logger.warning(HOST_PLANS, KERNELS_ENV)
        return memory, SparseCopyRows(*basics, offload.sparse_copy), kernels
    pool = open_segment(layout, config, group, barrier, spread=True)
    if kernels is not None:
        memory = SegmentMemory(pool, kernels.host_register, kernels.host_unregister)
        return memory, KernelRows(*basics, kernels), kernels
    logger.warning(
        "Neither MemFabric's offload module nor the AscendC kernels (%s) are there: rows are moved by torch, "
        "slowly. See docs/ascend.md.",
        KERNELS_ENV,
    )
    return SegmentMemory(pool), PortableRows(*basics), None
