"""Synthetic indexers: streams of top-k ids with the hit rates, or the retention, published for real models.

Real top-k traces are not public. A token's score in a :class:`ScoreModel` is the sum of a constant Gumbel
variate (some tokens matter throughout), an AR(1) process (relevance drifts) and white noise. In a
:class:`DriftModel` it drifts at several speeds, and recent tokens matter more. The top-k indices are the K
best tokens, and always include the most recent ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.trace.format import Ids

RECENT = 128  # most recent tokens, part of every top-k
Scores: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ScoreModel:
    """Parameters of the scores.

    scale, rho: standard deviation and coefficient per token of the AR(1) process.
    noise: standard deviation of the white noise.
    span: number of adjacent tokens that share constant and drift.
    shift_tokens: interval in tokens at which ``shift_share`` of the constants are redrawn; 0: never.
    """

    scale: float
    rho: float
    noise: float
    span: int = 1
    shift_tokens: int = 0
    shift_share: float = 0.5


# `hisparse` fits the figures published for GLM-5.1 on LongBench-V2 documents of 100K tokens, `cann` those for
# GLM-5.2.
HISPARSE = ScoreModel(scale=1.0, rho=0.85, noise=0.43)
CANN = ScoreModel(scale=0.8, rho=0.85, noise=0.75)


@dataclass(frozen=True)
class DriftModel:
    """Scores of variance 1 that drift at several speeds, and a bonus for recent tokens.

    drifts: time constant in tokens and variance of each AR(1) process.
    constant, noise: variance of the part that never changes, and of the white noise.
    recency, recency_tokens: a token of age n has ``recency * exp(-n / recency_tokens)`` more.
    """

    drifts: tuple[tuple[float, float], ...]
    constant: float
    noise: float
    recency: float
    recency_tokens: float


# Fits the retention published for GLM-5.2 at 128K, and its share of recent tokens (docs/policies.md).
DRIFT = DriftModel(
    drifts=((1.5, 0.081), (6, 0.075), (24, 0.038), (96, 0.085), (384, 0.134), (1536, 0.198)),
    constant=0.363,
    noise=0.026,
    recency=2.947,
    recency_tokens=5863,
)
Model: TypeAlias = ScoreModel | DriftModel
SCORE_MODELS: dict[str, Model] = {"hisparse": HISPARSE, "cann": CANN, "drift": DRIFT}


def best(score: Scores, topk: int) -> Ids:
    """int32 [topk]: the numbers of the best scores and of the last 128, in no order. Changes ``score``."""
    length = len(score)
    score[max(0, length - RECENT) :] = np.inf
    return np.argpartition(score, length - topk)[length - topk :].astype(np.int32)


class ScoreProcess:
    """The scores of ``length`` tokens during decoding.

    rng: the only source of randomness.
    length: tokens, including those decoded later.
    """

    def __init__(self, rng: np.random.Generator, length: int, model: ScoreModel) -> None:
        self._rng = rng
        self._length = length
        self._model = model
        self._innovation = np.float32(model.scale * np.sqrt(1 - model.rho * model.rho))
        self._tokens = 0
        spans = -(-length // model.span)
        self.constant: Scores = rng.gumbel(size=spans).astype(np.float32)
        self.drift: Scores = np.float32(model.scale) * rng.standard_normal(spans, dtype=np.float32)

    def choose(self, length: int, topk: int) -> Ids:
        """int32 [topk]: the best of the first ``length`` tokens and the last 128 of them, in no order.

        Draws the white noise anew each time.
        """
        field = self.constant + self.drift
        if self._model.span > 1:
            field = np.repeat(field, self._model.span)[: self._length]
        score = field + np.float32(self._model.noise) * self._rng.standard_normal(
            self._length, dtype=np.float32
        )
        return best(score[:length], topk)

    def advance(self) -> None:
        """Advances the scores by one token."""
        noise = self._rng.standard_normal(len(self.drift), dtype=np.float32)
        self.drift = np.float32(self._model.rho) * self.drift + self._innovation * noise
        self._tokens += 1
        if self._model.shift_tokens and self._tokens % self._model.shift_tokens == 0:
            count = int(len(self.constant) * self._model.shift_share)
            moved = self._rng.permutation(len(self.constant))[:count]
            self.constant[moved] = self._rng.gumbel(size=count).astype(np.float32)


class DriftProcess:
    """The scores of a :class:`DriftModel`; arguments and methods as :class:`ScoreProcess`'s.

    drift: float32 [processes, length], replaced by every step.
    """

    def __init__(self, rng: np.random.Generator, length: int, model: DriftModel) -> None:
        self._rng = rng
        self._noise = np.float32(np.sqrt(model.noise))
        taus, variances = np.array(model.drifts, np.float64).T
        keep = np.exp(-1 / taus)
        self._keep = keep.astype(np.float32)[:, None]
        self._innovation = np.sqrt(variances * (1 - keep * keep)).astype(np.float32)[:, None]
        ages = np.arange(length - 1, -1, -1)
        self._bonus = (model.recency * np.exp(-ages / model.recency_tokens)).astype(np.float32)
        self.constant: Scores = self._normal(length) * np.float32(np.sqrt(model.constant))
        deviations = np.sqrt(variances).astype(np.float32)[:, None]
        self.drift: Scores = self._normal(len(taus), length) * deviations

    def _normal(self, *shape: int) -> Scores:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def choose(self, length: int, topk: int) -> Ids:
        """int32 [topk]: see :meth:`ScoreProcess.choose`."""
        score = self.constant[:length] + self.drift[:, :length].sum(axis=0) + self._bonus[-length:]
        return best(score + self._noise * self._normal(length), topk)

    def advance(self) -> None:
        """Advances the scores by one token."""
        self.drift = self._keep * self.drift + self._innovation * self._normal(*self.drift.shape)


def process_of(rng: np.random.Generator, length: int, model: Model) -> ScoreProcess | DriftProcess:
    """The process of a model, in its stationary state."""
    if isinstance(model, DriftModel):
        return DriftProcess(rng, length, model)
    return ScoreProcess(rng, length, model)


def scored_stream(
    rng: np.random.Generator, steps: int, context: int, topk: int, model: Model = HISPARSE
) -> Ids:
    """int32 [steps, topk]: top-k ids of one request whose context grows by one token a step.

    Args:
        context: tokens before the first step; at least ``topk``.
    """
    process = process_of(rng, context + steps, model)
    chosen = np.empty((steps, topk), dtype=np.int32)
    for step in range(steps):
        chosen[step] = process.choose(context + step + 1, topk)
        process.advance()
    return chosen


@dataclass(frozen=True)
class DraftedStep:
    """A step of several query tokens. seq_len: tokens including them; topk: int32 [query_len, K]."""

    seq_len: int
    topk: Ids


def drafted_stream(
    rng: np.random.Generator,
    steps: int,
    context: int,
    topk: int,
    model: Model = HISPARSE,
    *,
    query_len: int = 4,
    accept: float = 0.74,
) -> Iterator[DraftedStep]:
    """Steps of multi-token prediction: ``query_len`` query tokens, of which 1 or more are accepted.

    A draft is accepted with probability ``accept`` if those before it were (0.74 with three drafts: 2.7
    tokens a step on average); the others' positions are decoded again, with the same drift and new noise.
    """
    process = process_of(rng, context + steps * query_len, model)
    stable = context
    for _ in range(steps):
        drifts = []
        chosen = np.empty((query_len, topk), np.int32)
        for token in range(query_len):
            chosen[token] = process.choose(stable + token + 1, topk)
            process.advance()
            drifts.append(process.drift)
        yield DraftedStep(stable + query_len, chosen)
        accepted = 1
        while accepted < query_len and rng.random() < accept:
            accepted += 1
        process.drift = drifts[accepted - 1]
        stable += accepted


def stream_steps(
    rng: np.random.Generator,
    steps: int,
    context: int,
    topk: int,
    model: Model,
    query_len: int = 1,
) -> Iterator[DraftedStep]:
    """One request's steps: :func:`scored_stream` for one query token a step, else :func:`drafted_stream`."""
    if query_len > 1:
        yield from drafted_stream(rng, steps, context, topk, model, query_len=query_len)
        return
    for step, ids in enumerate(scored_stream(rng, steps, context, topk, model)):
        yield DraftedStep(context + step + 1, ids[None])
