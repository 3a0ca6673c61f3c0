"""NPU worker: our model runner, and KV memory counted by the capacity formula."""

from __future__ import annotations

from typing import Any

import torch
from vllm_ascend.worker.worker import NPUWorker

from vllm_kvoffload.config import ConfigError
from vllm_kvoffload.connectors.ascend_store.planning import num_blocks
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.platforms.ascend.checks import ascend_geometry, shared_plan
from vllm_kvoffload.platforms.ascend.hooks import runner_class
from vllm_kvoffload.platforms.ascend.runner import KVOffloadNPUModelRunner
from vllm_kvoffload.platforms.ascend.symbols import check_symbols
from vllm_kvoffload.platforms.engine import capacity_of, offload_config
from vllm_kvoffload.platforms.parts import log_capacity
from vllm_kvoffload.platforms.refusal import refuse

logger = get_logger(__name__)


class KVOffloadNPUWorker(NPUWorker):
    """vllm-ascend's worker with our model runner.

    Under offload it reports to vLLM just the bytes that make vLLM's division come out at the number of
    blocks that the capacity formula found. The hot pools are part of that formula, so nothing has to be
    held for them while activations are profiled, and `--kv-cache-memory-bytes` is treated alike. Where
    layers share prefill buffers, the buffer plan says how many blocks fit.
    """

    def init_device(self) -> None:
        check_symbols("worker")
        with runner_class(KVOffloadNPUModelRunner):
            super().init_device()
        if self.rank == 0 and offload_config(self.vllm_config) is not None:
            logger.info("%s", ascend_geometry(self.vllm_config).describe())

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        device_bytes: int = super().determine_available_memory()
        config, shared = offload_config(self.vllm_config), shared_plan(self.vllm_config)
        if config is None and shared is None:
            return device_bytes
        try:
            self._check_pages()
            if shared is not None:
                return shared_bytes(self.vllm_config, shared, device_bytes)
            assert config is not None
            geometry = ascend_geometry(self.vllm_config)
            plan = capacity_of(self.vllm_config, geometry, config, device_bytes)
        except ConfigError as error:
            refuse(error)
        log_capacity(plan)
        return plan.logical_bytes

    def _check_pages(self) -> None:
        """vLLM divides by upstream's page sizes: they must be what the geometry says. Raises ConfigError."""
        pages = sum(spec.page_size_bytes for spec in self.get_kv_cache_spec().values())
        block_size = self.vllm_config.cache_config.block_size
        expected = ascend_geometry(self.vllm_config).bytes_per_token * block_size
        if pages != expected:
            rule = f"a block has {expected} bytes by the model's config, and {pages} by vllm-ascend's specs"
            fix = "use one indexer cache type for all layers (additional_config.enable_sparse_li_c8)"
            raise ConfigError("KV cache", f"{pages} bytes a block", rule, fix)


def shared_bytes(vllm_config: Any, plan: BufferPlan, device_bytes: int) -> int:
    """What vLLM is to take for available where layers share memory: it divides by the pages of all layers.

    Raises ConfigError: not one longest request fits.
    """
    blocks = num_blocks(vllm_config, plan, device_bytes)
    return blocks * plan.logical_bytes * int(vllm_config.cache_config.block_size)
