"""MTP without offload: drafts change how fast tokens come, not which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.golden.engine import Outcome
from tests.golden.lab import Result
from tests.golden.workloads import WORKLOADS

pytestmark = pytest.mark.slow

WORKLOADS_WITH_DRAFTS = ["short", "long", "mixed", "prefix", "full"]
TIE = 1e-3
"""Log-probability difference of two tokens up to which rounding may choose either."""


def mtp(drafts: int, **options: Any) -> dict[str, Any]:
    """Engine options for a number of drafts per step; extra options go to `speculative_config`."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts, **options}}


def assert_same_tokens(ours: Sequence[Outcome], reference: Sequence[Outcome]) -> None:
    """Fails unless both got the same tokens with the same probabilities.

    A step verifies several tokens at once, so sums are rounded differently. Where the two best tokens are
    nearly tied, either is right; what follows the first such place says nothing.
    """
    compared = total = 0
    for a, b in zip(ours, reference, strict=True):
        assert (len(a.token_ids), a.finished) == (len(b.token_ids), b.finished)
        assert len(a.logprobs) == len(b.logprobs)
        prompt = len(b.logprobs) - len(b.token_ids)
        equal = [x == y for x, y in zip(a.token_ids, b.token_ids, strict=True)]
        stop = equal.index(False) + 1 if False in equal else len(equal)
        for x, y in zip(a.logprobs[: prompt + stop], b.logprobs[: prompt + stop], strict=True):
            assert abs(x - y) < TIE
        compared += stop
        total += len(equal)
    assert compared > 0.8 * total


def draft_counts(*results: Result) -> Counter[int]:
    """Number of draft sets, by their number of accepted drafts."""
    return Counter(count for result in results for count in result.trace.accepted)


@pytest.mark.parametrize(
    ("model", "drafts"), [("glm-tiny-mtp", 1), ("glm-tiny-mtp", 3), ("dsv32-tiny-mtp", 3)]
)
def test_tokens_are_those_of_a_model_without_drafts(lab, model, drafts):
    plain = {workload: lab.reference(workload, model) for workload in WORKLOADS_WITH_DRAFTS}
    drafting = {workload: lab.reference(workload, model, **mtp(drafts)) for workload in WORKLOADS_WITH_DRAFTS}
    for workload, result in drafting.items():
        assert_same_tokens(result.outcomes, plain[workload].outcomes)
        assert len(result.trace.schedule) < len(plain[workload].trace.schedule)
    counts = draft_counts(*drafting.values())
    assert sorted(counts) == list(range(drafts + 1)), "each number of accepted drafts must occur"
    assert 0.1 < sum(count * number for count, number in counts.items()) / (drafts * counts.total()) < 0.8


def test_the_workloads_are_what_they_are_called(lab):
    results = {
        name: lab.reference(name, "glm-tiny-mtp", **mtp(3)) for name in ("long", "mixed", "prefix", "full")
    }
    # the last block of a prefix is computed again: the MTP layer wants the hidden states at its end
    cached = [outcome.cached_tokens for outcome in results["prefix"].outcomes]
    assert cached[1:5] == [576, 512, 576, 256]
    assert cached[6] >= 128
    chunks = [step["job-2"] for step in results["long"].trace.schedule if "job-2" in step]
    assert sum(count > 4 for count in chunks) > 5
    steps = results["mixed"].trace.schedule
    assert sum(4 in step.values() and max(step.values()) > 4 for step in steps if step) > 3
    # zeros are scheduled in place of drafts that are not made
    assert any(set(ids) == {0} for step in results["full"].trace.drafts for ids in step.values())


def test_preemption(lab):
    model, workload = "glm-tiny-mtp", "preempted"
    plain = lab.reference(workload, model)
    drafting = lab.reference(workload, model, **mtp(3))
    assert len(set(drafting.trace.preempted)) >= 2
    assert_same_tokens(drafting.outcomes, plain.outcomes)
    assert sorted(draft_counts(drafting)) == [0, 1, 2, 3]


def test_index_share_and_padding_change_drafts_only(lab):
    model, workload = "glm-tiny-mtp", "mixed"
    shared = lab.reference(workload, model, **mtp(3))
    own = lab.reference(workload, model, **mtp(3, index_share_for_mtp_iteration=False))
    assert_same_tokens(own.outcomes, shared.outcomes)
    assert first_drafts(own, 1) == first_drafts(shared, 1)
    assert first_drafts(own, 3) != first_drafts(shared, 3)
    compact = lab.reference(workload, model, **mtp(3, disable_padded_drafter_batch=True))
    assert_same_tokens(compact.outcomes, shared.outcomes)
    assert first_drafts(compact, 3) == first_drafts(shared, 3)


def first_drafts(result: Result, count: int) -> list[tuple[int, ...]]:
    """The first drafts of two early steps' requests.

    Only of requests whose prompt is one chunk: at the end of a chunk vLLM takes the prompt's last token for
    the next one when it pads, and the right one when it doesn't.
    """
    steps = [step for step in result.trace.drafts if "job-1" in step][:2]
    return [step[job][:count] for step in steps for job in ("job-0", "job-1")]


@pytest.mark.parametrize("part", ["attn", "indexer.k_cache"])
def test_control_only_drafts_show_a_broken_draft_layer(lab, part):
    model, workload = "glm-tiny-mtp", "long"
    right = lab.reference(workload, model, **mtp(3))
    engine = lab.engine(model, **WORKLOADS[workload].options, **mtp(3))
    layers = engine.runner.compilation_config.static_forward_context
    cache = layers[f"model.layers.4.self_attn.{part}"].kv_cache

    def forget(step, _outcomes):
        if step % 4 == 3:
            cache.zero_()

    wrong = lab.run(workload, model, before_step=forget, **mtp(3))
    assert wrong.trace.drafts != right.trace.drafts
    assert_same_tokens(wrong.outcomes, right.outcomes)


def test_one_choice_buffer_for_target_and_drafts(lab):
    """vLLM does this to some models, after their layers were made."""
    model, workload = "glm-tiny-mtp", "mixed"
    reference = lab.reference(workload, model, **mtp(3))
    engine = lab.engine(model, **mtp(3))
    target = engine.runner.model.model.layers[0].self_attn.mla_attn.topk_indices_buffer
    drafting = [
        module for module in engine.runner.drafter.model.modules() if hasattr(module, "topk_indices_buffer")
    ]
    own = [module.topk_indices_buffer for module in drafting]
    assert all(buffer is not target for buffer in own)
    for module in drafting:
        module.topk_indices_buffer = target
    try:
        result = lab.run(workload, model, **mtp(3))
    finally:
        for module, buffer in zip(drafting, own, strict=True):
            module.topk_indices_buffer = buffer
    assert result.trace.drafts == reference.trace.drafts
    assert result.outcomes == reference.outcomes
