"""The synthetic models give the hit rates published for real ones, and the default policy meets its bars.

Slow, but only some seconds each: four requests of 256 steps, at pools of up to 16K slots.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from vllm_kvoffload import ops
from vllm_kvoffload.policies import TABLE
from vllm_kvoffload.trace.generator import (
    DRIFT,
    SCORE_MODELS,
    DriftProcess,
    ScoreProcess,
    drafted_stream,
    scored_stream,
)
from vllm_kvoffload.trace.reader import TraceReader
from vllm_kvoffload.trace.simulator import PlanPolicy, parse_policy, simulate
from vllm_kvoffload.trace.streams import stream_of
from vllm_kvoffload.trace.suite import LONG_RUNS, SUITE, sources, write_suite

DEFAULT = PlanPolicy(ops.DEFAULT_POLICY, ops.DEFAULT_WAYS).name

# (trace, policy, slots): per cent. hisparse: GLM-5.1 on LongBench-V2, 100K; cann: GLM-5.2.
PUBLISHED = {
    ("hisparse", "previous", 0): 70.0,
    ("hisparse", "lru", 4096): 86.6,
    ("hisparse", "fifo_full", 4096): 82.8,
    ("hisparse", "random", 4096): 83.9,
    ("hisparse", "belady", 4096): 91.8,
    ("hisparse", "lru", 8192): 93.3,
    ("cann", "previous", 0): 58.85,
    ("cann", "lru", 8192): 90.50,
    ("cann", "fifo_cann", 8192): 85.0,
}


BITS = TABLE[ops.DEFAULT_POLICY].age_bits
RIVALS = [f"{policy.name}/16" for policy in TABLE.values() if policy.age_bits <= BITS]
TWO_SETS = ("rrip/2x8", "rrip3/2x8")
COMPARED = {
    **{
        trace: sorted({key[1] for key in PUBLISHED} | {DEFAULT, "rrip/16", *TWO_SETS})
        for trace in ("hisparse", "cann")
    },
    **{trace: sorted({"lru", DEFAULT, *RIVALS}) for trace in ("short", "mtp", "spans", "shift")},
}
"""The policies that a test below looks at, for each trace: simulating all takes twice as long."""


@cache
def hits(trace: str) -> dict[tuple[str, int], float]:
    spec = next(spec for spec in SUITE if spec.name == trace)
    streams = [stream_of(str(n), steps) for (_, n), steps in sources(spec, seed=0).items()]
    policies = [parse_policy(name) for name in COMPARED[trace]]
    return {
        (r.policy, r.slots): r.hit_percent for r in simulate(trace, streams, spec.topk, policies=policies)
    }


@pytest.mark.slow
@pytest.mark.parametrize("key", PUBLISHED, ids=lambda key: f"{key[0]}-{key[1]}-{key[2]}")
def test_published_hit_rates(key):
    trace, policy, slots = key
    assert hits(trace)[policy, slots] == pytest.approx(PUBLISHED[key], abs=1)


@pytest.mark.slow
def test_set_associative_fifo_at_16k_is_above_90():
    assert hits("cann")["fifo_cann", 16384] > 90


@pytest.mark.slow
def test_the_parameters_matter():
    """The control: either model misses the other's figures."""
    assert abs(hits("hisparse")["previous", 0] - PUBLISHED["cann", "previous", 0]) > 5
    assert abs(hits("cann")["lru", 8192] - PUBLISHED["hisparse", "lru", 8192]) > 2


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["hisparse", "cann"])
def test_two_sets_at_8k(trace):
    """A twentieth fewer misses, by placement and policy together; some by placement alone."""
    found = hits(trace)
    misses = {name: 100 - found[name, 8192] for name in (*TWO_SETS, "rrip/16")}
    assert misses["rrip3/2x8"] <= 0.94 * misses["rrip/16"]
    assert misses["rrip/2x8"] <= 0.98 * misses["rrip/16"]


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["hisparse", "cann"])
def test_the_default_policy_at_8k(trace):
    found = hits(trace)
    default, lru, set_fifo = (found[name, 8192] for name in (DEFAULT, "lru", "fifo_cann"))
    assert default >= lru - 0.5
    assert 100 - default <= 0.75 * (100 - set_fifo)


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["short", "mtp", "spans", "shift"])
def test_the_default_policy_elsewhere(trace):
    """As good as exact LRU, and as any policy that needs no more bits of state."""
    found = hits(trace)
    for slots in (8192, 16384):
        assert found[DEFAULT, slots] >= found["lru", slots] - 0.5
        assert found[DEFAULT, slots] >= max(found[name, slots] for name in RIVALS) - 0.1


# ---------------------------------------------------------------------------------------- generator


def test_scored_stream_chooses_the_recent_and_the_best():
    chosen = scored_stream(np.random.default_rng(0), 20, 2000, 256)
    assert chosen.dtype == np.int32
    assert chosen.shape == (20, 256)
    for step, ids in enumerate(chosen):
        assert len(set(ids.tolist())) == 256
        assert set(range(2001 + step - 128, 2001 + step)) <= set(ids.tolist())
        assert ids.max() == 2000 + step
    again = scored_stream(np.random.default_rng(0), 20, 2000, 256)
    assert np.array_equal(chosen, again)
    other = scored_stream(np.random.default_rng(0), 20, 2000, 256, SCORE_MODELS["cann"])
    assert not np.array_equal(chosen, other)


def test_the_drift_is_stationary():
    process = ScoreProcess(np.random.default_rng(1), 50_000, SCORE_MODELS["cann"])
    before = process.drift
    for _ in range(4):
        process.advance()
    assert process.drift.std() == pytest.approx(0.8, rel=0.02)
    assert np.corrcoef(before, process.drift)[0, 1] == pytest.approx(0.85**4, abs=0.02)


CONTEXT = 131_072
# GLM-5.2 at 128K: the share of a step's choices that are chosen again so many tokens later.
RETENTION = {1: 0.751, 8: 0.630, 64: 0.530, 256: 0.430, 1024: 0.291}


def retention(steps: int) -> tuple[dict[int, float], float]:
    """Of `drift`: retention from step 0 up to ``steps``, and the share of the last 2048 tokens."""
    process = DriftProcess(np.random.default_rng(5), CONTEXT + steps + 1, DRIFT)
    first = process.choose(CONTEXT + 1, 2048)
    found = {}
    for step in range(1, steps + 1):
        process.advance()
        if step in RETENTION:
            found[step] = len(np.intersect1d(first, process.choose(CONTEXT + 1 + step, 2048))) / 2048
    return found, float(np.mean(first > CONTEXT - 2048))


def test_drift_has_the_published_retention_and_recency():
    found, recent = retention(64)
    assert found == {lag: pytest.approx(RETENTION[lag], abs=0.03) for lag in (1, 8, 64)}
    assert recent == pytest.approx(0.45, abs=0.03)


@pytest.mark.slow
def test_drift_has_the_published_retention_of_a_long_decode():
    found, _ = retention(1024)
    assert found == {lag: pytest.approx(share, abs=0.03) for lag, share in RETENTION.items()}


def test_the_parameters_of_drift_matter():
    """The control: without the bonus or with one speed only, the figures are missed."""
    plain = replace(DRIFT, recency=0.0)
    chosen = scored_stream(np.random.default_rng(6), 9, CONTEXT, 2048, plain)
    assert np.mean(chosen[0] > CONTEXT - 2048) < 0.2
    slow = replace(DRIFT, drifts=((1536, 0.611),))
    chosen = scored_stream(np.random.default_rng(6), 9, CONTEXT, 2048, slow)
    assert len(np.intersect1d(chosen[0], chosen[8])) / 2048 > RETENTION[8] + 0.1


def test_drifts_have_their_variance_and_speed():
    process = DriftProcess(np.random.default_rng(7), 60_000, DRIFT)
    before = process.drift
    for _ in range(6):
        process.advance()
    for row, (tau, variance) in enumerate(DRIFT.drifts):
        assert process.drift[row].var() == pytest.approx(variance, rel=0.03)
        assert np.corrcoef(before[row], process.drift[row])[0, 1] == pytest.approx(np.exp(-6 / tau), abs=0.02)
    assert sum(v for _, v in DRIFT.drifts) + DRIFT.constant + DRIFT.noise == pytest.approx(1, abs=0.001)


def test_a_long_run_is_written_when_named(tmp_path):
    (spec,) = LONG_RUNS
    assert spec.name not in [other.name for other in SUITE]
    (path,) = write_suite(tmp_path, [replace(spec, steps=2)])
    reader = TraceReader(path)
    assert [request.seq_len for step in reader for request in step.requests] == [CONTEXT + 1, CONTEXT + 2]


def test_rejected_drafts_do_not_move_the_scores_on():
    def overlap(choices):
        pairs = itertools.pairwise(choices)
        return np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in pairs])

    plain = scored_stream(np.random.default_rng(3), 40, 20_000, 512)
    drafted = drafted_stream(np.random.default_rng(3), 40, 20_000, 512, accept=0.0)
    assert overlap([step.topk[0] for step in drafted]) == pytest.approx(overlap(plain), abs=0.03)
    assert overlap(plain[::4]) < overlap(plain) - 0.08  # what four tokens a step would give


def test_drafted_steps_overlap_by_the_rejected():
    steps = list(drafted_stream(np.random.default_rng(2), 400, 1000, 128, query_len=4))
    advances = np.diff([step.seq_len for step in steps])
    assert set(advances.tolist()) == {1, 2, 3, 4}
    assert advances.mean() == pytest.approx(2.7, abs=0.15)
    for step in steps:
        assert step.topk.shape == (4, 128)
        for token, ids in enumerate(step.topk):
            assert ids.max() == step.seq_len - 4 + token  # its own position is always among the recent
