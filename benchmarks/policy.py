"""``policy``: misses of the policies on synthetic top-k streams that fit published hit rates.

Misses in per cent of the distinct old ids that a step asks for, of requests of 256 steps that begin with an
empty pool (``docs/policies.md`` has more). A ratio above 1 means fewer misses than the baseline's.

- ``policy/MODEL/8k/default``: the default policy and ways; baseline: exact LRU, fully associative.
- ``policy/MODEL/SIZE/POLICY/WAYS``: all policies of the plan, sizes of 4K, 8K and 16K; baseline: exact LRU.
  WAYS are ``2x8`` where an id has two sets of 8 ways each.
- ``policy/MODEL/SIZE/POLICY``: reference policies, likewise.
- ``policy/MODEL/8k/against_fifo_cann``: the default; baseline: the set-associative FIFO of CANN's offload.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.registry import Row, lower_is_better
from vllm_kvoffload import ops
from vllm_kvoffload.trace.simulator import POOLS, PlanPolicy, simulate
from vllm_kvoffload.trace.streams import stream_of
from vllm_kvoffload.trace.suite import SUITE, TraceSpec, sources

MODELS = ("hisparse", "cann")
DEFAULT = PlanPolicy(ops.DEFAULT_POLICY, ops.DEFAULT_WAYS).name


def run() -> Iterator[Row]:
    """All rows; about half a minute."""
    specs = {spec.name: spec for spec in SUITE}
    for model in MODELS:
        yield from of_model(specs[model])


def of_model(spec: TraceSpec) -> Iterator[Row]:
    streams = [stream_of(str(request), steps) for (_, request), steps in sources(spec, seed=0).items()]
    misses = {
        (result.policy, result.slots): result.miss_percent
        for result in simulate(spec.name, streams, spec.topk)
        if result.slots
    }
    for slots in POOLS:
        size, lru = f"policy/{spec.name}/{slots // 1024}k", misses["lru", slots]
        if slots == 8192:
            default = misses[DEFAULT, slots]
            yield lower_is_better(f"{size}/default", default, "% missed", lru)
            yield lower_is_better(
                f"{size}/against_fifo_cann", default, "% missed", misses["fifo_cann", slots]
            )
        for (policy, other), value in misses.items():
            if other == slots:
                yield lower_is_better(f"{size}/{policy}", value, "% missed", lru)
