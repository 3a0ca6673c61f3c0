"""Prefixes written in the very step that reads them, preemption, and both under random delays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from engine import worst_difference
from lab import OFFLOAD

from vllm_kvoffload.runtime import DelayPlan

pytestmark = pytest.mark.slow

SEEDS = range(6)


@contextmanager
def delayed(engine, seed: int, max_ms: float) -> Iterator[None]:
    """Random delays on an engine that already runs."""
    lanes = [stream._stream._lane for stream in (engine.manager.store, engine.manager.prefill)]
    for lane in lanes:
        lane._delays = DelayPlan(seed, max_ms)
    try:
        yield
    finally:
        for lane in lanes:
            lane._delays = None


@pytest.fixture
def late_engine(lab):
    lab.reference("late")  # before, so that the engine below stays
    return lab.engine(offload=OFFLOAD, max_num_batched_tokens=2048)


@pytest.fixture
def seen_late(late_engine, monkeypatch):
    """(query length, late) of every request whose prefix was late."""
    seen = []
    original = late_engine.manager._late_requests

    def watched(batch, *args):
        late = original(batch, *args)
        seen.extend(int(length) for length in batch.query_lens[late])
        return late

    monkeypatch.setattr(late_engine.manager, "_late_requests", watched)
    return seen


def test_prefix_of_the_same_step(lab, seen_late):
    result, difference = lab.compare("late")
    assert difference == 0.0
    assert sorted(seen_late) == [1, 60, 150]  # one twin decodes at once, two prefill
    assert [outcome.cached_tokens for outcome in result.outcomes] == [0, 640, 640, 0, 640]
