"""A trace as input of a policy: each request's distinct ids, step by step, in each index group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from vllm_kvoffload.trace.format import Ids
from vllm_kvoffload.trace.generator import DraftedStep
from vllm_kvoffload.trace.reader import TraceStep


@dataclass(frozen=True)
class StreamStep:
    """One request's step in one index group.

    stable: number of tokens that existed before the step (I-2).
    tokens: of each query token its ids, ascending.
    old: the distinct ids below ``stable`` of all query tokens, by first occurrence: each is a hit or a miss.
    new: the other distinct ids, up to the last query token's own position. The step computes their rows
        itself, so they are neither.
    """

    stable: int
    tokens: tuple[Ids, ...]
    old: Ids
    new: Ids

    @property
    def seq_len(self) -> int:
        return self.stable + len(self.tokens)


@dataclass
class TopkStream:
    """One request in one index group.

    cut: the trace lacks some of its steps; the stream ends before them.
    """

    group: int
    name: str
    steps: list[StreamStep] = field(default_factory=list)
    cut: bool = False

    @property
    def length(self) -> int:
        """Ids are below this."""
        return max((step.seq_len for step in self.steps), default=0)

    @property
    def max_query_len(self) -> int:
        return max((len(step.tokens) for step in self.steps), default=0)

    @property
    def width(self) -> int:
        """Maximum number of ids of a query token."""
        return max((len(ids) for step in self.steps for ids in step.tokens), default=0)

    def append(self, seq_len: int, tokens: tuple[Ids, ...]) -> None:
        """Appends the next step. Ignored after a gap, because the pool's contents are unknown there."""
        stable = seq_len - len(tokens)
        if self.steps and stable > self.steps[-1].seq_len:
            self.cut = True
        if self.cut or not tokens:
            return
        old, new = _distinct(tokens, stable)
        self.steps.append(StreamStep(stable, tokens, old, new))


def _distinct(tokens: tuple[Ids, ...], stable: int) -> tuple[Ids, Ids]:
    """Distinct valid ids by first occurrence: below ``stable``, and the others."""
    valid = [ids[: np.searchsorted(ids, stable + t + 1)] for t, ids in enumerate(tokens)]
    if len(valid) == 1:
        (ids,) = valid
        first_new = int(np.searchsorted(ids, stable))
        return ids[:first_new], ids[first_new:]
    chained = np.concatenate(valid)
    _, first = np.unique(chained, return_index=True)
    ids = chained[np.sort(first)]
    old = ids < stable
    return ids[old], ids[~old]


def streams_of_trace(
    steps: Iterable[TraceStep], *, groups: Collection[int] = (), max_requests: int | None = None
) -> list[TopkStream]:
    """The requests of a trace in its index groups, in order of first appearance.

    Args:
        groups: only these; empty: all.
        max_requests: limit per group; keeps the first ones. 2048 ids of a query token take 8 KiB of memory.
    """
    found: dict[tuple[int, str], TopkStream] = {}
    counts: Counter[int] = Counter()
    for step in steps:
        if groups and step.group not in groups:
            continue
        for request in step.requests:
            key = (step.group, request.name)
            if key not in found:
                if counts[step.group] == max_requests:
                    continue
                counts[step.group] += 1
                found[key] = TopkStream(*key)
            found[key].append(request.seq_len, request.ids)
    return list(found.values())


def stream_of(name: str, steps: Iterable[DraftedStep], group: int = 0) -> TopkStream:
    """The stream of a generated request."""
    stream = TopkStream(group, name)
    for step in steps:
        stream.append(step.seq_len, tuple(np.sort(step.topk, axis=1)))
    return stream
