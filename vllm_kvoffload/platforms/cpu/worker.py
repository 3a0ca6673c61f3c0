"""CPU worker of DSA models: our model runner, and KV memory counted by the capacity formula."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.built_model import check_runner
from vllm_kvoffload.platforms.cpu.mla import register_mla_layer
from vllm_kvoffload.platforms.cpu.runner import KVOffloadCPUModelRunner
from vllm_kvoffload.platforms.cpu.sampling import register_expand_kernel
from vllm_kvoffload.platforms.parts import log_capacity
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.settings.errors import ConfigError

logger = get_logger(__name__)


class KVOffloadCPUWorker(CPUWorker):
    """vLLM's CPU worker with our model runner.

    vLLM divides the bytes reported by a worker by the page bytes of *all* caches. Under offload the
    capacity formula gives the number of blocks, with shared layer buffers the buffer plan; the worker
    reports the bytes from which vLLM's division yields that number, so the scheduler sees it exactly
    (invariant I-8).
    """

    def init_device(self) -> None:
        register_mla_layer()
        register_expand_kernel()
        self.settings = EngineSettings.of(self.vllm_config, "cpu")
        super().init_device()  # type: ignore[no-untyped-call]
        if self.rank == 0:
            logger.info("%s", self.settings.model.describe())
        # vLLM's worker has no hook for the class, so its own runner, still without a model, is replaced.
        self.model_runner = KVOffloadCPUModelRunner(self.vllm_config, torch.device("cpu"), self.settings)

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        try:
            check_runner(self.model_runner, self.settings.model)
        except ConfigError as error:
            refuse(error)

    def determine_available_memory(self) -> int:
        device_bytes: int = super().determine_available_memory()
        settings = self.settings
        if settings.shared_buffers is not None:
            return settings.shared_buffer_bytes(device_bytes)
        if not settings.offload.enabled:
            return device_bytes
        capacity = settings.capacity(device_bytes)
        log_capacity(capacity, self.settings.offload.rounded)
        return capacity.logical_bytes
