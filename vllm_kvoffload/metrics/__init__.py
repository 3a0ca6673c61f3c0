"""Exports the plugin's counters, which are kept in worker processes, through vLLM's own /metrics.

Owns: `fields` (the counters) and `layout` (their memory layout), `channel` (a worker publishes into an
anonymous memory file), `reader` (finds and reads those files of a running server), `report` (the periodic log
lines), `collector` and `stat_logger` (loaded by vLLM in its API server). Never touches pools or requests.

Series are `vllm:kvoffload_<field>`, counters with `_total`, labelled model_name, engine (DP rank) and rank
(TP rank), some with one more label; a server shows the series of its configured parts. The hit ratio is left
to the query, over any window: h / (h + m), where h is `rate(vllm:kvoffload_hits_total[1m])` and m the same
for misses.

Limits: prometheus_client omits custom collectors in its multiprocess mode, so a server with more than one
API process shows vLLM's series only, and logs this. vLLM starts one API process per DP rank by default;
`--api-server-count 1` restores the series. Workers on other nodes, under Ray or behind vLLM's Rust front end
are not found, nor are workers that elastic EP adds to a server after all expected ones were found.
"""

from vllm_kvoffload.metrics.channel import StatsChannel
from vllm_kvoffload.metrics.fields import DECODE, OFFLOAD, PREFILL, STORE
from vllm_kvoffload.metrics.reader import WorkerStats, find_stats

__all__ = ["DECODE", "OFFLOAD", "PREFILL", "STORE", "StatsChannel", "WorkerStats", "find_stats"]
