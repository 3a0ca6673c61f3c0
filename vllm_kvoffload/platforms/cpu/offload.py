"""Assembles the sparse decode offload of one CPU worker: capacity, host pool, runtime, manager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.metrics import OFFLOAD, StatsChannel
from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata
from vllm_kvoffload.platforms.parts import ForwardPass, WorkerOffload, open_recorder, open_segment
from vllm_kvoffload.runtime.cpu import CPURuntime
from vllm_kvoffload.runtime.ranks import rank_barrier
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CPUOffload(WorkerOffload[ForwardPass]):
    """One worker's offload: everything it owns is freed by :meth:`close`.

    Args:
        vllm_config: the engine's configuration.
        settings: the engine's, with the offload enabled.
        num_blocks: KV blocks the scheduler hands out.
    """

    def __init__(self, vllm_config: VllmConfig, settings: EngineSettings, num_blocks: int) -> None:
        geometry, config, block_size = settings.model, settings.offload, settings.facts.block_size
        group = get_tp_group()
        self.keep_device = config.keep_device_kv_cache
        self._recorder = open_recorder(vllm_config, config, geometry) if group.rank_in_group == 0 else None
        self._runtime = CPURuntime()
        components = tuple((c.name, c.row_bytes) for c in geometry.main_components)
        layout = HostPoolLayout(geometry.num_layers, num_blocks, block_size, components)
        barrier = rank_barrier(group.cpu_group) if group.world_size > 1 else None
        self._memory: HostPool = open_segment(layout, config, group, barrier)
        self.manager = SparseKVManager(
            geometry,
            config,
            max_num_seqs=settings.facts.max_num_seqs,
            max_model_len=settings.max_model_len,
            prefill_buffers=settings.prefill_buffers,
            host_layers=[self._host_layer(layer) for layer in range(geometry.num_layers)],
            runtime=self._runtime,
            writer=group.rank_in_group == 0,
            barrier=barrier,
            recorder=self._recorder,
        )
        dp_rank = vllm_config.parallel_config.data_parallel_index
        self._channel = StatsChannel(OFFLOAD, vllm_config.instance_id, dp_rank, group.rank_in_group)
        block_tokens = num_blocks * block_size
        indexer_bytes = block_tokens * geometry.indexer_bytes_per_token
        main_bytes = block_tokens * geometry.main_bytes_per_token
        kept_bytes = main_bytes if self.keep_device else 0
        self._channel.publish(
            {
                "device_bytes": self.manager.device_bytes + indexer_bytes + kept_bytes,
                "device_bytes_without_offload": indexer_bytes + main_bytes,
                "host_pool_bytes": self._memory.layout.total_bytes,
                "kv_blocks": num_blocks,
            }
        )

    def describe(self, attn_metadata: Mapping[str, Any]) -> ForwardPass:
        return ForwardPass(next(m.batch for m in attn_metadata.values() if isinstance(m, SparseMetadata)))

    def host_cache(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a layer's whole main KV in host memory, [num_blocks, 1, block_size, D]."""
        return self._host_layer(layer).view(dtype).unsqueeze(1)

    def _host_layer(self, layer: int) -> torch.Tensor:
        (rows,) = self._memory.layer(layer).values()  # this platform's rows have one component
        return rows
