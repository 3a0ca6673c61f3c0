"""The trace suite: the two published models, and others that guard against overfitting to those two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vllm_kvoffload.trace.format import Ids, TraceHeader
from vllm_kvoffload.trace.generator import CANN, DRIFT, HISPARSE, DraftedStep, Model, stream_steps
from vllm_kvoffload.trace.writer import TraceWriter

TOPK = 2048
BLOCK_SIZE = 128
STEPS = 256


@dataclass(frozen=True)
class TraceSpec:
    """One synthetic trace.

    groups: model of each index group's scores.
    context: tokens before the first step.
    requests: independent requests, decoded together.
    query_len: query tokens of a step, 1 + drafts.
    """

    name: str
    about: str
    groups: tuple[Model, ...]
    context: int = 100_000
    requests: int = 2
    steps: int = STEPS
    query_len: int = 1
    topk: int = TOPK


def _index_share() -> tuple[Model, ...]:
    # Indexers that serve four layers each: top-k indices change fast in the first and slowly in the last.
    return (
        replace(HISPARSE, scale=0.7, noise=1.0),
        CANN,
        replace(HISPARSE, noise=0.6),
        replace(HISPARSE, scale=1.1, noise=0.3),
    )


SUITE: tuple[TraceSpec, ...] = (
    TraceSpec("hisparse", "GLM-5.1 on LongBench-V2, 100K", (HISPARSE,), requests=4),
    TraceSpec("cann", "GLM-5.2, 100K", (CANN,), requests=4),
    TraceSpec("short", "hisparse, 16K of context", (HISPARSE,), context=16_000),
    TraceSpec("long", "cann, 500K of context", (CANN,), context=500_000),
    TraceSpec("mtp", "cann, three drafts, 2.7 tokens a step accepted", (CANN,), query_len=4, steps=128),
    TraceSpec("groups", "four index groups of different restlessness", _index_share(), requests=1),
    TraceSpec("spans", "cann, scores shared by 16 neighbours", (replace(CANN, span=16),)),
    TraceSpec("shift", "hisparse, half of what matters changes every 64 tokens", (
        replace(HISPARSE, shift_tokens=64),
    )),
)  # fmt: skip

# Long to make (half a minute each) and to simulate: only made when they are named.
LONG_RUNS: tuple[TraceSpec, ...] = (
    TraceSpec("drift", "GLM-5.2's retention, 128K, a long decode", (DRIFT,), 131_072, requests=1, steps=2000),
)

# The steps of one (group, request).
Source: TypeAlias = Mapping[tuple[int, int], Iterable[DraftedStep]]


def sources(spec: TraceSpec, seed: int) -> dict[tuple[int, int], Iterator[DraftedStep]]:
    """Lazy steps of each (group, request), with separate random numbers for each."""
    made = {}
    for group, model in enumerate(spec.groups):
        for request in range(spec.requests):
            rng = np.random.default_rng([seed, group, request])
            made[group, request] = stream_steps(
                rng, spec.steps, spec.context, spec.topk, model, spec.query_len
            )
    return made


def write_trace(path: Path, spec: TraceSpec, seed: int = 0) -> None:
    """Makes a trace file. Raises TraceError if it already exists."""
    header = TraceHeader(
        model_name=f"synthetic {spec.name}",
        index_topk=spec.topk,
        num_groups=len(spec.groups),
        block_size=BLOCK_SIZE,
        source="synthetic",
        details={"spec": asdict(spec), "seed": seed},
    )
    steps = sources(spec, seed)
    names = [f"request-{request}" for request in range(spec.requests)]
    with TraceWriter(path, header) as writer:
        for step in range(spec.steps):
            for group in range(len(spec.groups)):
                parts = [next(steps[group, request]) for request in range(spec.requests)]
                writer.write(group, step, *_batch(parts), names)


def _batch(parts: list[DraftedStep]) -> tuple[Ids, Ids, Ids]:
    starts = np.cumsum([0, *(len(part.topk) for part in parts)]).astype(np.int32)
    lengths = np.array([part.seq_len for part in parts], np.int32)
    return np.concatenate([part.topk for part in parts]), starts, lengths


def write_suite(folder: Path, specs: Iterable[TraceSpec] = SUITE, seed: int = 0) -> Iterator[Path]:
    """Makes the suite's files in a folder, yielding each one's path when complete.

    Raises TraceError if a file already exists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for spec in specs:
        path = folder / f"{spec.name}.kvtrace"
        write_trace(path, spec, seed)
        yield path
