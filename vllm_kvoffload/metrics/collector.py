"""What Prometheus asks at every scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics.fields import FIELDS
from vllm_kvoffload.metrics.reader import StatsFinder, WorkerStats

logger = get_logger(__name__)

PREFIX = "vllm:kvoffload_"
LABELS = ("model_name", "engine", "rank")
WARN_EVERY_S = 300.0

Family = CounterMetricFamily | GaugeMetricFamily


class OffloadCollector:
    """A prometheus_client collector over the workers that a finder finds. Never raises.

    Args:
        finder: of this server's workers.
        model_name: label value, as in vLLM's own series.
    """

    def __init__(self, finder: StatsFinder, model_name: str) -> None:
        self._finder = finder
        self._model_name = model_name
        self._quiet_until_s = time.monotonic()

    def describe(self) -> Iterable[Family]:
        """The series without samples; the registry checks their names when it takes the collector."""
        return [_family(index) for index in range(len(FIELDS))]

    def collect(self) -> Iterable[Family]:
        """The series with one sample for each worker; none for workers that are gone."""
        workers = self.read()
        families = []
        for index, field in enumerate(FIELDS):
            family = _family(index)
            for worker in workers:
                labels = (self._model_name, str(worker.dp_rank), str(worker.tp_rank))
                family.add_metric(labels, worker.values[field.name])
            families.append(family)
        return families

    def read(self) -> list[WorkerStats]:
        """The workers' values; on any failure a warning, at most every WARN_EVERY_S, and an empty list."""
        try:
            workers = self._finder.read()
            if not workers:
                self._warn("no worker of this server publishes counters that it may read in /proc")
            return workers
        except Exception as error:  # a scrape is no reason for an exception in the API server
            self._warn(repr(error))
            return []

    def _warn(self, reason: str) -> None:
        now = time.monotonic()
        if now >= self._quiet_until_s:
            self._quiet_until_s = now + WARN_EVERY_S
            logger.warning("KV offload: no metrics: %s", reason)


def _family(index: int) -> Family:
    field = FIELDS[index]
    kind = CounterMetricFamily if field.kind == "counter" else GaugeMetricFamily
    return kind(PREFIX + field.name, field.help, labels=LABELS)
