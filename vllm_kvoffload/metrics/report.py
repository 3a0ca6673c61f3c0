"""The periodic log lines: activity of a server's workers since the previous lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_kvoffload.metrics.fields import (
    DECODE,
    FIELD_SETS,
    OFFLOAD,
    PREFILL,
    RECEIVE_PHASES,
    STORE,
    ReceiveFailure,
    TransferEnd,
)
from vllm_kvoffload.metrics.reader import WorkerStats


class IntervalReport:
    """Turns totals into rates. `start_s` is when the first interval begins, on the clock of `lines`."""

    def __init__(self, start_s: float) -> None:
        self._last_s = start_s
        self._totals: dict[tuple[int, int, str, int], Mapping[str, int]] = {}

    def lines(self, workers: Iterable[WorkerStats], now_s: float) -> list[str]:
        """One line for each engine and part whose counters moved since the last call, over all ranks."""
        elapsed_s, self._last_s = max(now_s - self._last_s, 1e-3), now_s
        totals: dict[tuple[int, int, str, int], Mapping[str, int]] = {}
        engines: dict[tuple[int, str], tuple[dict[str, int], dict[str, int]]] = {}
        for worker in workers:
            # The creation time in the key makes a replaced worker start from zero.
            key = (worker.dp_rank, worker.tp_rank, worker.part, worker.created_ns)
            totals[key], before = worker.values, self._totals.get(key, {})
            delta, gauges = engines.setdefault((worker.dp_rank, worker.part), ({}, {}))
            for field in FIELD_SETS[worker.part].fields:
                value = worker.values[field.key]
                if field.kind == "gauge":
                    gauges[field.key] = max(gauges.get(field.key, 0), value)
                    continue
                value -= before.get(field.key, 0)
                # Every rank takes part in each transfer, but transfers its own bytes.
                one = worker.part != OFFLOAD.name and not field.name.endswith("_bytes")
                known = delta.get(field.key, 0)
                delta[field.key] = max(known, value) if one else known + value
        self._totals = totals
        return [
            f"Engine {engine:03d}: {_LINES[part](delta, gauges, elapsed_s)}"
            for (engine, part), (delta, gauges) in engines.items()
            if any(delta.values())
        ]


def _offload(delta: Mapping[str, int], gauges: Mapping[str, int], elapsed_s: float) -> str:
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
    counts = f"{delta['displaced']} rows displaced, {gauges['live_rows']} requests in the hot pool"
    return f"KV offload: {hits}, {rates}, {counts}"


def _prefill(delta: Mapping[str, int], gauges: Mapping[str, int], _elapsed_s: float) -> str:
    closed = {end.value: delta[f"transfers_closed.{end.value}"] for end in TransferEnd}
    ends = ", ".join(f"{count} {end}" for end, count in closed.items() if count or end == "finished")
    return f"KV transfers to decode: {ends}; {gauges['open_transfers']} open, {gauges['kept_requests']} kept"


def _decode(delta: Mapping[str, int], gauges: Mapping[str, int], elapsed_s: float) -> str:
    failed = {why.value: delta[f"receives_failed.{why.value}"] for why in ReceiveFailure}
    parts = [f"{delta['receives_done']} requests received"]
    parts += [f"{count} failed ({reason})" for reason, count in failed.items() if count]
    waiting = sum(gauges[f"receives.{phase}"] for phase in RECEIVE_PHASES)
    rate = f"{delta['pulled_bytes'] / elapsed_s / 1e6:.1f} MB/s"
    return f"KV transfers from prefill: {', '.join(parts)}; {waiting} to come, {rate}"


def _store(delta: Mapping[str, int], gauges: Mapping[str, int], elapsed_s: float) -> str:
    tokens, needed = delta["store_prompt_tokens"], delta["store_needed_bytes"]
    moved = delta["store_loaded_bytes"] + delta["store_saved_bytes"]
    rates = ", ".join(
        f"{verb} {delta[f'store_{verb}_bytes'] / elapsed_s / 1e6:.1f} MB/s" for verb in ("loaded", "saved")
    )
    per_token = f"{moved / tokens:.0f} bytes a token, " if tokens else ""
    ratio = f"{moved / needed:.2f} times the least possible" if needed else "nothing needed"
    counts = f"{delta['store_hit_tokens']} tokens found, {delta['store_lost_requests']} requests lost"
    return f"KV store: {rates}, {per_token}{ratio}; {counts}, {gauges['store_pinned_objects']} objects kept"


_LINES = {OFFLOAD.name: _offload, PREFILL.name: _prefill, DECODE.name: _decode, STORE.name: _store}
