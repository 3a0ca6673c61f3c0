"""The interface and the list of benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Protocol, cast

# Name -> module, imported on demand, so that one benchmark does not need another's dependencies.
BENCHMARKS = {
    "low_load": "benchmarks.low_load",
    "npu_cycles": "benchmarks.npu_cycles",
    "plan": "benchmarks.plan",
    "policy": "benchmarks.policy",
    "prefill": "benchmarks.prefill",
    "pull": "benchmarks.pull",
    "proxy": "benchmarks.proxy",
    "serve": "benchmarks.serve",
}


@dataclass(frozen=True)
class Row:
    """One figure. ``ratio`` compares it with ``baseline`` so that higher is better."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float

    def as_json(self) -> dict[str, float | str]:
        return asdict(self)


def lower_is_better(name: str, value: float, unit: str, baseline: float) -> Row:
    """A cost: the ratio is how many times less than the baseline's it is."""
    return Row(name, value, unit, baseline, baseline / value)


def higher_is_better(name: str, value: float, unit: str, baseline: float) -> Row:
    """A rate: the ratio is how many times the baseline's it is."""
    return Row(name, value, unit, baseline, value / baseline)


class Benchmark(Protocol):
    """A benchmark's module."""

    def run(self) -> Iterable[Row]: ...


def load(name: str) -> Benchmark:
    """The benchmark of that name. Raises ``KeyError`` when there is none."""
    return cast(Benchmark, import_module(BENCHMARKS[name]))
