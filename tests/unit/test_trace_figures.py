"""The synthetic models give the hit rates published for real ones, and the default policy meets its bars.

Slow, but only some seconds each: four requests of 256 steps, at pools of up to 16K slots.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from vllm_kvoffload import ops
from vllm_kvoffload.policies import TABLE
from vllm_kvoffload.trace.generator import SCORE_MODELS, ScoreProcess, drafted_stream, scored_stream
from vllm_kvoffload.trace.simulator import PlanPolicy, parse_policy, simulate
from vllm_kvoffload.trace.streams import stream_of
from vllm_kvoffload.trace.suite import SUITE, sources

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
COMPARED = {
    **{trace: sorted({key[1] for key in PUBLISHED} | {DEFAULT}) for trace in ("hisparse", "cann")},
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
