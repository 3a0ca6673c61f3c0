"""The stat logger that vLLM loads in its API server, from the entry points `vllm.stat_logger_plugins`.

vLLM makes one object per API process for all the engines it manages, before its own Prometheus series, and
calls `log` every VLLM_LOG_STATS_INTERVAL seconds. Any plugin in that group makes vLLM keep statistics despite
--disable-log-stats; a VLLM_PLUGINS list without `kvoffload_metrics` disables this one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_kvoffload.engine import EngineOptions
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics.collector import OffloadCollector
from vllm_kvoffload.metrics.fields import DECODE, OFFLOAD, PREFILL, STORE
from vllm_kvoffload.metrics.reader import StatsFinder
from vllm_kvoffload.metrics.report import IntervalReport
from vllm_kvoffload.settings.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = get_logger(__name__)

_registered: list[OffloadCollector] = []


class OffloadStatLogger(AggregateStatLoggerBase):
    """Exports the workers' counters to /metrics and the log. Does nothing for an engine without counters.

    Args:
        vllm_config: of the engine.
        engine_indexes: DP ranks that this API process manages.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        self._collector: OffloadCollector | None = None
        self._report = IntervalReport(time.monotonic())
        parts = counting_parts(vllm_config)
        if not parts:
            return
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            logger.warning(
                "KV offload: its counters don't appear in /metrics with more than one API process, or with "
                "PROMETHEUS_MULTIPROC_DIR set. Use --api-server-count 1 to see them."
            )
            return
        finder = StatsFinder(
            os.getpid(),
            vllm_config.instance_id,
            expected=len(engine_indexes) * vllm_config.parallel_config.tensor_parallel_size * len(parts),
        )
        self._collector = OffloadCollector(finder, str(vllm_config.model_config.served_model_name))
        _register(self._collector)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Ignores vLLM's own statistics of a step."""

    def log_engine_initialized(self) -> None:
        """Does nothing: the worker logs the start-up line."""

    def log(self) -> None:
        """Logs one line for each engine and part that was active since the last call."""
        if self._collector is None:
            return
        for line in self._report.lines(self._collector.read(), time.monotonic()):
            logger.info(line)


def counting_parts(vllm_config: VllmConfig) -> set[str]:
    """Names of the field sets that each worker of an engine publishes."""
    try:
        options = EngineOptions.of(vllm_config)
    except ConfigError:  # reported by the platform, if it reads this section
        return set()
    parts = {OFFLOAD.name} if options.offload.enabled else set()
    if options.remote is not None:
        parts.add(PREFILL.name if options.remote.producer else DECODE.name)
    if options.store is not None:
        parts.add(STORE.name)
    return parts


def _register(collector: OffloadCollector) -> None:
    """Replaces the series of this process's earlier engine, as vLLM does with its own."""
    while _registered:
        REGISTRY.unregister(_registered.pop())
    REGISTRY.register(collector)
    _registered.append(collector)
