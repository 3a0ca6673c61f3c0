"""The plugin's counters in vLLM's own /metrics, although they arise in worker processes.

Owns: `fields` (what is counted) and `layout` (how that lies in memory), `channel` (a part of a worker
publishes into an anonymous memory file), `reader` (finds and reads those files of a running server), `report`
(the periodic log lines), `collector` and `stat_logger` (the part vLLM loads in its API server). Never touches
pools, requests or the engine.

Series are `vllm:kvoffload_<field>`, counters with `_total`, labelled model_name, engine (DP rank) and rank
(TP rank), some with one label more; a server shows those of the parts it has. The hit ratio is left to the
query, which can have it over any window: h / (h + m), where h is `rate(vllm:kvoffload_hits_total[1m])` and m
the same of misses.

Limits: prometheus_client leaves custom collectors out in its multiprocess mode, so a server with more than
one API process shows vLLM's series only, and says so in its log. vLLM starts one API process per DP rank by
default; `--api-server-count 1` brings the series back. Workers on other nodes, under Ray or behind vLLM's
Rust front end are not seen, nor those that elastic EP adds to a server already complete.
"""

from vllm_kvoffload.metrics.channel import StatsChannel
from vllm_kvoffload.metrics.fields import DECODE, OFFLOAD, PREFILL, STORE
from vllm_kvoffload.metrics.reader import WorkerStats, find_stats

__all__ = ["DECODE", "OFFLOAD", "PREFILL", "STORE", "StatsChannel", "WorkerStats", "find_stats"]
