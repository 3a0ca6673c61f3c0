"""Parts of a worker's offload that are the same on every platform."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from vllm_kvoffload.config import SparseOffloadConfig
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.sparse.capacity import CapacityPlan
from vllm_kvoffload.sparse.manager import DEADLINE_S
from vllm_kvoffload.trace import TraceHeader, TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)


def log_capacity(plan: CapacityPlan) -> None:
    """The start-up line that says what the offload buys."""
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


def rank_barrier(group: torch.distributed.ProcessGroup) -> Callable[[], None]:
    """A barrier of the TP ranks that ends: a rank that doesn't come is an error after the deadline."""
    timeout = timedelta(seconds=DEADLINE_S)

    def barrier() -> None:
        torch.distributed.monitored_barrier(group, timeout=timeout)

    return barrier


def open_recorder(
    vllm_config: VllmConfig, config: SparseOffloadConfig, geometry: KVGeometry
) -> TraceRecorder | None:
    """The recorder of `trace_path`, None without one. Raises TraceError: the file can't be made."""
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
