"""Assembles the sparse decode offload of one NPU worker: host pool, runtime, manager, counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
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
from vllm_kvoffload.platforms.parts import (
    ForwardPass,
    RankGroup,
    WorkerOffload,
    open_recorder,
    open_segment,
)
from vllm_kvoffload.runtime.npu import NPURuntime
from vllm_kvoffload.runtime.ranks import rank_barrier
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.host_pool import HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.step import PoolSlots, StepBatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

HOST_PLANS = (
    "The AscendC kernels (%s) are not there: plans are made on the host, which waits for the device once in "
    "each index group. Build them with kvoffload build-ops."
)


@dataclass(frozen=True)
class AscendPass(ForwardPass):
    """causal_ends: int32 [T] on the device, causal limit (exclusive) of every query token."""

    causal_ends: torch.Tensor


class AscendOffload(WorkerOffload[AscendPass]):
    """One worker's offload: everything it owns is freed by :meth:`close`.

    Args:
        settings: the engine's, with the offload enabled.
        num_blocks: KV blocks the scheduler hands out. device: this worker's NPU.
        npu: torch.npu; scatter: torch_npu.npu_scatter_nd_update_.
    """

    _memory: HostMemory
    pool_view: tuple[PoolSlots, Any] | None = None
    """The last plan's top-k rows and slots, and attention's view of them."""
    graphs: DecodeGraphs | None = None
    """None if no step can run in a full graph."""
    _drafts: Sequence[AscendPass] = ()
    """The current step's draft passes."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: EngineSettings,
        num_blocks: int,
        device: torch.device,
        npu: Any,
        scatter: Any,
    ) -> None:
        geometry = settings.model
        config, block_size = settings.offload, settings.facts.block_size
        group = get_tp_group()
        barrier = rank_barrier(group.cpu_group) if group.world_size > 1 else None
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
        self._runtime = NPURuntime(npu, device.index or 0)
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

    def describe(self, attn_metadata: Mapping[str, Any]) -> AscendPass:
        return describe_pass(next(iter(attn_metadata.values())))

    def describe_draft(self, context: Any, index: int) -> AscendPass:
        """Upstream has the metadata of all draft passes before the first one runs, and lists them in the
        context. All are read then: later the host would wait for the pass before."""
        if index == 0:
            self._drafts = describe_passes([next(iter(one.values())) for one in context.draft_attn_metadatas])
        return self._drafts[index]

    @contextmanager
    def target_pass(self, context: Any, req_ids: Sequence[str]) -> Iterator[None]:
        with super().target_pass(context, req_ids):
            if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
                yield
                return
            with self._in_graph(context):
                yield

    @contextmanager
    def dummy_pass(self, context: Any) -> Iterator[None]:
        """Wraps a capture, a dummy replay, or the same layers uncaptured, which upstream runs first so that
        capture finds everything initialised."""
        if self.graphs is not None:
            self.manager.begin_dummy_step()
        with self._in_graph(context, dummy=True):
            yield

    @contextmanager
    def _in_graph(self, context: Any, dummy: bool = False) -> Iterator[None]:
        """Prepares a step that is to run in a full graph, and accounts for it afterwards.

        A step that needs the host between layers is made to run layer by layer instead.
        """
        metadata = next(iter(context.attn_metadata.values()))
        if self.graphs is None or not self.graphs.can_run(metadata.num_input_tokens):
            if context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
                context.cudagraph_runtime_mode = CUDAGraphMode.NONE
            yield
            return
        opened = self._open(describe_pass(metadata)) if dummy else nullcontext()
        with opened, self.graphs.step(metadata.num_input_tokens):
            yield

    def current(self) -> AscendPass | None:
        """Returns the pass that is open, None in a dummy run that has nothing to attend to.

        Raises RuntimeError if attention runs outside of any.
        """
        if self.running is None and not self.dummy:
            raise RuntimeError("attention runs, but the runner has begun neither a step nor a draft pass")
        return self.running


def describe_pass(metadata: Any) -> AscendPass:
    """:func:`describe_passes` of one."""
    return describe_passes([metadata])[0]


def describe_passes(metadatas: Sequence[Any]) -> list[AscendPass]:
    """Derives passes, without padding, each from a layer's ``KVOffloadSFAMetadata``.

    Lengths come from the device: with drafts, upstream's host copy may be too high. The host needs them,
    so it waits for the passes' input tensors, once for all of them.
    """
    there: list[torch.Tensor] = []
    for metadata in metadatas:
        requests = _num_requests(metadata)
        there += [
            metadata.seq_lens[:requests],
            metadata.block_table[:requests],
            metadata.slot_mapping[: int(metadata.num_actual_tokens)],
        ]
    here = read_together(there)
    return [
        _pass_of(metadata, *here[3 * i : 3 * i + 3])  # lengths, blocks, slots
        for i, metadata in enumerate(metadatas)
    ]


def read_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies integer tensors of a device to the host by one blocking copy. Shapes stay; types may widen."""
    kinds = {tensor.dtype for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else torch.int64
    packed = torch.cat([tensor.reshape(-1).to(kind) for tensor in tensors]).cpu()
    pieces = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _num_requests(metadata: Any) -> int:
    """Requests that have tokens; the rest is padding."""
    starts = metadata.query_start_loc.numpy()
    return int(np.searchsorted(starts[:-1], int(metadata.num_actual_tokens), side="left"))


def _pass_of(
    metadata: Any, lengths: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor
) -> AscendPass:
    batch = StepBatch(
        query_start_loc=metadata.query_start_loc.numpy()[: len(lengths) + 1].astype(np.int32),
        seq_lens=lengths.numpy().astype(np.int32),
        block_table=block_table.to(metadata.block_table.dtype),
        slot_mapping=slots.long(),
        block_size=metadata.block_size,
    )
    ends = np.repeat(batch.computed - batch.query_start_loc[:-1] + 1, batch.query_lens)
    ends += np.arange(len(ends), dtype=ends.dtype)
    device, causal_ends = metadata.slot_mapping.device, torch.from_numpy(ends.astype(np.int32))
    if device.type != "cpu":  # from pageable memory the host would wait for the copy
        causal_ends = causal_ends.pin_memory()
    return AscendPass(batch, causal_ends.to(device, non_blocking=True))


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
