"""The Prometheus collector, called at every scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics.fields import FIELD_SETS
from vllm_kvoffload.metrics.layout import Field
from vllm_kvoffload.metrics.reader import StatsFinder, WorkerStats

logger = get_logger(__name__)

PREFIX = "vllm:kvoffload_"
LABELS = ("model_name", "engine", "rank")
WARN_EVERY_S = 300.0


class OffloadCollector:
    """A prometheus_client collector of this server's workers. Never raises.

    Args:
        finder: finds this server's workers.
        model_name: label value, as in vLLM's own series.
    """

    def __init__(self, finder: StatsFinder, model_name: str) -> None:
        self._finder = finder
        self._model_name = model_name
        self._next_warning_s = time.monotonic()

    def describe(self) -> Iterable[Metric]:
        """The series without samples; the registry checks their names when the collector is registered."""
        return [_family(field) for field in _series().values()]

    def collect(self) -> Iterable[Metric]:
        """The series of this server's parts, with samples of each live worker."""
        workers = self.read()
        families: dict[str, Metric] = {}
        for worker in workers:
            fields = FIELD_SETS[worker.part].fields
            for name in dict.fromkeys(field.name for field in fields):
                family = families.get(name) or families.setdefault(name, _family(_series()[name]))
                labels = (self._model_name, str(worker.dp_rank), str(worker.tp_rank))
                _add(family, labels, [(f, worker.values[f.key]) for f in fields if f.name == name])
        return list(families.values())

    def read(self) -> list[WorkerStats]:
        """The workers' values; on failure logs a warning (at most every WARN_EVERY_S), returns none."""
        try:
            workers = self._finder.read()
            if not workers:
                self._warn("no worker of this server publishes counters that it may read in /proc")
            return workers
        except Exception as error:  # a scrape must not raise in the API server
            self._warn(repr(error))
            return []

    def _warn(self, reason: str) -> None:
        now = time.monotonic()
        if now >= self._next_warning_s:
            self._next_warning_s = now + WARN_EVERY_S
            logger.warning("KV offload: no metrics: %s", reason)


def _series() -> dict[str, Field]:
    """One field of each series, by name."""
    return {field.name: field for fields in FIELD_SETS.values() for field in fields.fields}


def _family(field: Field) -> Metric:
    if field.kind == "histogram":
        return HistogramMetricFamily(PREFIX + field.name, field.help, labels=LABELS)
    kind = CounterMetricFamily if field.kind == "counter" else GaugeMetricFamily
    own = (field.label[0],) if field.label else ()
    return kind(PREFIX + field.name, field.help, labels=(*LABELS, *own))


def _add(family: Metric, labels: tuple[str, ...], values: list[tuple[Field, int]]) -> None:
    """Adds a worker's samples of one series."""
    if isinstance(family, HistogramMetricFamily):
        counts = {field.label[1]: value for field, value in values if field.label}
        sum_s = counts.pop("sum") / 1e6
        family.add_metric(labels, list(zip(counts, accumulate(counts.values()), strict=True)), sum_s)
        return
    assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
    for field, value in values:
        own = (field.label[1],) if field.label else ()
        family.add_metric((*labels, *own), value)
