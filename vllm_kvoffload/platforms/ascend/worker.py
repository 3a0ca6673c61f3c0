"""NPU worker: our model runner, and KV memory counted by the capacity formula."""

from __future__ import annotations

import torch
from vllm_ascend.worker.worker import NPUWorker

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.ascend.hooks import runner_class
from vllm_kvoffload.platforms.ascend.runner import KVOffloadNPUModelRunner
from vllm_kvoffload.platforms.ascend.symbols import check_symbols
from vllm_kvoffload.platforms.built_model import check_runner
from vllm_kvoffload.platforms.parts import log_capacity
from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.settings.errors import ConfigError

logger = get_logger(__name__)


class KVOffloadNPUWorker(NPUWorker):
    """vllm-ascend's worker with our model runner.

    Under offload it reports to vLLM the bytes from which vLLM's division yields the block count of the
    capacity formula. The formula includes the hot pools, so they need not be reserved during profiling,
    and `--kv-cache-memory-bytes` is treated the same. With shared prefill buffers, the buffer plan gives
    the block count.
    """

    def init_device(self) -> None:
        check_symbols("worker")
        with runner_class(KVOffloadNPUModelRunner):
            super().init_device()
        self.settings = EngineSettings.of(self.vllm_config, "npu")
        if self.rank == 0 and self.settings.offload.enabled:
            logger.info("%s", self.settings.model.describe())

    def load_model(self) -> None:
        super().load_model()
        try:
            check_runner(self.model_runner, self.settings.model)
        except ConfigError as error:
            refuse(error)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        device_bytes: int = super().determine_available_memory()
        settings = self.settings
        if not settings.offload.enabled and settings.shared_buffers is None:
            return device_bytes
        try:
            self._check_pages()
            if settings.shared_buffers is not None:
                return settings.shared_buffer_bytes(device_bytes)
            plan = settings.capacity(device_bytes)
        except ConfigError as error:
            refuse(error)
        log_capacity(plan, settings.offload.rounded)
        return plan.logical_bytes

    def _check_pages(self) -> None:
        """Checks that upstream's page sizes, by which vLLM divides, equal the geometry's. Raises
        ConfigError."""
        pages = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        block_size = self.vllm_config.cache_config.block_size
        expected = self.settings.model.bytes_per_token * block_size
        if pages != expected:
            rule = f"a block has {expected} bytes by the model's config, and {pages} by vllm-ascend's specs"
            fix = "use one indexer cache type for all layers (additional_config.enable_sparse_li_c8)"
            raise ConfigError("KV cache", f"{pages} bytes a block", rule, fix)
