"""CPU worker of DSA models: our model runner, and KV memory counted by the capacity formula."""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_kvoffload.platforms.cpu.runner import KVOffloadCPUModelRunner


class KVOffloadCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with our model runner."""

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise NotImplementedError("vllm-kvoffload needs Model Runner V1: unset VLLM_USE_V2_MODEL_RUNNER")
        self.model_runner = KVOffloadCPUModelRunner(self.vllm_config, torch.device("cpu"))
