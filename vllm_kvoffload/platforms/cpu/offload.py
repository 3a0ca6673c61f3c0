"""Puts the sparse decode offload together for one CPU worker: capacity, host pool, runtime, manager."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed import get_tp_group

from vllm_kvoffload.config import SparseOffloadConfig
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.metrics import OFFLOAD, StatsChannel
from vllm_kvoffload.platforms.cpu.platform import model_geometry
from vllm_kvoffload.platforms.engine import prefill_buffers
from vllm_kvoffload.platforms.parts import open_recorder, rank_barrier
from vllm_kvoffload.runtime.cpu import CpuRuntime
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout
from vllm_kvoffload.sparse.manager import SparseKVManager

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CPUOffload:
    """One worker's offload: everything it owns is freed by :meth:`close`.

    Args:
        vllm_config: the engine's configuration.
        config: its offload options.
        num_blocks: KV blocks the scheduler hands out.
    """

    def __init__(self, vllm_config: VllmConfig, config: SparseOffloadConfig, num_blocks: int) -> None:
        geometry = model_geometry(vllm_config)
        block_size = vllm_config.cache_config.block_size
        group = get_tp_group()
        self.keep_device = config.keep_device_kv_cache
        self._recorder = open_recorder(vllm_config, config, geometry) if group.rank_in_group == 0 else None
        self._runtime = CpuRuntime()
        self._pool = self._open_pool(geometry, config, block_size, num_blocks)
        self.manager = SparseKVManager(
            geometry,
            config,
            max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            prefill_buffers=prefill_buffers(config),
            host_layers=[self._host_layer(layer) for layer in range(geometry.num_layers)],
            runtime=self._runtime,
            writer=group.rank_in_group == 0,
            barrier=rank_barrier(group.cpu_group) if group.world_size > 1 else None,
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
                "host_pool_bytes": self._pool.layout.total_bytes,
                "kv_blocks": num_blocks,
            }
        )

    @staticmethod
    def _open_pool(
        geometry: KVGeometry, config: SparseOffloadConfig, block_size: int, num_blocks: int
    ) -> HostPool:
        layout = HostPoolLayout(
            num_layers=geometry.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            components=tuple((c.name, c.row_bytes) for c in geometry.main_components),
        )
        group = get_tp_group()
        if group.rank_in_group == 0:
            pool = HostPool.create(layout, dram_limit_bytes=config.dram_bytes)
            name = pool.name
        else:
            pool, name = None, ""
        name = group.broadcast_object(name, src=0) if group.world_size > 1 else name
        if pool is None:
            pool = HostPool.attach(name, layout)
        if group.world_size > 1:
            rank_barrier(group.cpu_group)()
        if pool.is_owner:
            pool.seal()  # from here on not even SIGKILL can leave it behind
        return pool

    def host_cache(self, layer: int, dtype: torch.dtype) -> torch.Tensor:
        """The whole main KV of a layer in host memory, [num_blocks, 1, block_size, D]."""
        return self._host_layer(layer).view(dtype).unsqueeze(1)

    def _host_layer(self, layer: int) -> torch.Tensor:
        (rows,) = self._pool.layer(layer).values()  # this platform's rows have one component
        return rows

    def publish(self) -> None:
        """Makes the counters so far visible in vLLM's metrics."""
        manager = self.manager
        self._channel.publish(manager.stats, live_rows=manager.rows.num_rows - manager.rows.num_free)

    def close(self) -> None:
        """Finishes what is in flight, stops the threads, frees the pool."""
        self._channel.close()
        if self._recorder is not None:
            self._recorder.close()
        try:
            self._runtime.shutdown()
        finally:
            self._pool.close()
