"""CPU worker of DSA models: our model runner, and KV memory counted by the capacity formula."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvoffload.connectors.ascend_store.planning import buffer_plan, num_blocks
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.cpu.platform import model_geometry
from vllm_kvoffload.platforms.cpu.runner import KVOffloadCPUModelRunner
from vllm_kvoffload.platforms.engine import capacity_of, offload_config
from vllm_kvoffload.platforms.parts import log_capacity

logger = get_logger(__name__)


class KVOffloadCPUWorker(CPUWorker):
    """vLLM's CPU worker with our model runner.

    vLLM divides what a worker reports as available by the page bytes of *all* caches. Under offload the
    capacity formula says how many blocks fit, with shared layer buffers the buffer plan does; the worker
    reports just the bytes that make vLLM's division come out there, so the scheduler sees exactly that number
    (invariant I-8).
    """

    def init_device(self) -> None:
        super().init_device()  # type: ignore[no-untyped-call]
        if self.rank == 0:
            logger.info("%s", model_geometry(self.vllm_config).describe())
        # vLLM's worker has no hook for the class, so its own runner, still without a model, is replaced.
        self.model_runner = KVOffloadCPUModelRunner(self.vllm_config, torch.device("cpu"))

    def determine_available_memory(self) -> int:
        device_bytes: int = super().determine_available_memory()
        plan = buffer_plan(self.vllm_config)
        if plan is not None and plan.has_reuse:
            block_size = self.vllm_config.cache_config.block_size
            return num_blocks(self.vllm_config, plan, device_bytes) * plan.logical_bytes * block_size
        config = offload_config(self.vllm_config)
        if config is None:
            return device_bytes
        capacity = capacity_of(self.vllm_config, model_geometry(self.vllm_config), config, device_bytes)
        log_capacity(capacity)
        return capacity.logical_bytes
