"""The periodic log line: what the offload did since the last one."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_kvoffload.metrics.fields import COUNTERS
from vllm_kvoffload.metrics.reader import WorkerStats


class IntervalReport:
    """Turns totals into rates. `start_s` is when the first interval begins, on the clock of `lines`."""

    def __init__(self, start_s: float) -> None:
        self._last_s = start_s
        self._totals: dict[tuple[int, int, int], dict[str, int]] = {}

    def lines(self, workers: Iterable[WorkerStats], now_s: float) -> list[str]:
        """One line for each engine whose counters moved since the last call, summed over its ranks."""
        workers = list(workers)
        elapsed_s, self._last_s = max(now_s - self._last_s, 1e-3), now_s
        # With the creation time in the key, a worker that was replaced starts from nothing again.
        totals = {(worker.dp_rank, worker.tp_rank, worker.created_ns): worker.values for worker in workers}
        moved: dict[int, dict[str, int]] = {}
        for key, values in totals.items():
            before = self._totals.get(key, {})
            engine = moved.setdefault(key[0], dict.fromkeys(COUNTERS, 0))
            for name in COUNTERS:
                engine[name] += values[name] - before.get(name, 0)
        self._totals = totals
        live = {worker.dp_rank: worker.values["live_rows"] for worker in workers}
        return [
            _line(engine, delta, live[engine], elapsed_s)
            for engine, delta in moved.items()
            if any(delta.values())
        ]


def _line(engine: int, delta: dict[str, int], live_rows: int, elapsed_s: float) -> str:
    looked_up = delta["hits"] + delta["misses"]
    hits = f"hit ratio {delta['hits'] / looked_up:.1%}" if looked_up else "no row looked up"
    rates = ", ".join(
        f"{verb} {delta[name] / elapsed_s / 1e6:.1f} MB/s"
        for verb, name in (
            ("fetched", "fetched_bytes"),
            ("streamed", "prefill_bytes"),
            ("written", "written_bytes"),
        )
    )
    counts = f"{delta['displaced']} rows displaced, {live_rows} requests in the hot pool"
    return f"Engine {engine:03d}: KV offload: {hits}, {rates}, {counts}"
