"""Prometheus metrics of one proxy. Updated per request, never per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_kvoffload.proxy.balance import Instance, Pool
from vllm_kvoffload.proxy.budget import ByteBudget

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PREFIX = "kvoffload_proxy"
POST_RESULTS = ("started", "repeated", "unknown", "refused")


class _Instances(Collector):
    """The balancer's state, read at scrape time."""

    def __init__(self, pools: tuple[Pool, ...], now: Callable[[], float]) -> None:
        self._pools = pools
        self._now = now

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "instance"]
        columns: list[tuple[Metric, Callable[[Instance], float]]] = [
            (
                GaugeMetricFamily(
                    f"{PREFIX}_load_tokens", "Weight of the requests on an engine", labels=labels
                ),
                lambda i: i.load_tokens,
            ),
            (
                GaugeMetricFamily(f"{PREFIX}_instance_requests", "Requests on an engine", labels=labels),
                lambda i: i.requests,
            ),
            (
                GaugeMetricFamily(
                    f"{PREFIX}_instance_available", "1 if an engine gets requests", labels=labels
                ),
                lambda i: i.health.available(self._now()) and not i.draining,
            ),
            (
                CounterMetricFamily(f"{PREFIX}_ejections", "Times an engine was taken out", labels=labels),
                lambda i: i.health.ejections,
            ),
        ]
        for metric, value in columns:
            for pool in self._pools:
                for instance in list(pool.instances.values()):
                    names = {"role": pool.role, "instance": str(instance.address)}
                    suffix = "_total" if metric.type == "counter" else ""
                    metric.add_sample(metric.name + suffix, names, float(value(instance)))
            yield metric


class Metrics:
    """The counters, on a registry of their own."""

    def __init__(self, pools: tuple[Pool, ...], now: Callable[[], float], held: ByteBudget) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Instances(pools, now))
        Gauge(f"{PREFIX}_held_bytes", "Bytes of requests held", registry=registry).set_function(
            lambda: held.used
        )
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests ended", ["endpoint", "status", "end"], registry=registry
        )
        self._ended: dict[tuple[str, int, str], Counter] = {}  # cached counter children: labels() is slow
        self.running = 0
        Gauge(f"{PREFIX}_requests_running", "Requests under way", registry=registry).set_function(
            lambda: self.running
        )
        self.seconds = Histogram(
            f"{PREFIX}_request_seconds", "From request to its end", registry=registry, buckets=SECONDS
        )
        self.first_output = Histogram(
            f"{PREFIX}_first_output_seconds",
            "From request to first output",
            registry=registry,
            buckets=SECONDS,
        )
        self.rendezvous = Histogram(
            f"{PREFIX}_rendezvous_seconds",
            "From dispatch until decode has room and posts",
            registry=registry,
            buckets=SECONDS,
        )
        self.prefill_seconds = Histogram(
            f"{PREFIX}_prefill_seconds", "A prefill request", registry=registry, buckets=SECONDS
        )
        self.bytes_out = Counter(f"{PREFIX}_bytes_sent", "Answer bytes sent to clients", registry=registry)
        self.retries = Counter(f"{PREFIX}_retries", "Dispatches repeated after a failure", registry=registry)
        self.recomputes = Counter(
            f"{PREFIX}_recomputes", "Dispatches for the rest of an answer", registry=registry
        )
        posts = Counter(f"{PREFIX}_metaserver_posts", "Rendezvous posts", ["result"], registry=registry)
        self.posts = {result: posts.labels(result) for result in POST_RESULTS}
        self.prefill_failures = Counter(
            f"{PREFIX}_prefill_failures", "Prefills that failed", registry=registry
        )

        self.receive_failures = Counter(
            f"{PREFIX}_receive_failures",
            "Requests that decode ended since it didn't get their KV",
            ["failure"],
            registry=registry,
        )
        self.cut_off = Counter(
            f"{PREFIX}_calls_cut_off",
            "Calls ended since their engine gave no sign of life",
            registry=registry,
        )
        self.loop_errors = Counter(
            f"{PREFIX}_loop_errors", "Exceptions in background loops, which went on", registry=registry
        )

    def ended(self, path: str, status: int, end: str) -> None:
        """Counts a finished request."""
        key = path, status, end
        counter = self._ended.get(key)
        if counter is None:
            counter = self._ended[key] = self._requests.labels(path, str(status), end)
        counter.inc()

    def page(self) -> bytes:
        """Returns the text for Prometheus."""
        return generate_latest(self._registry)
