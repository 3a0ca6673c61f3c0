"""MTP with the offload: tokens, log-probabilities and drafts equal those without offload, to the bit.

Drafts have to be compared: a wrong draft layer is hidden by verification, which just rejects more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.lab import Result
from tests.golden.test_mtp_baseline import assert_same_tokens, draft_counts, first_drafts, mtp
from tests.golden.workloads import WORKLOADS
from vllm_kvoffload.sparse.offloaded import OffloadedKV

pytestmark = pytest.mark.slow

ORDINARY = ["short", "long", "mixed", "prefix", "abort", "churn"]
BRIEF = ["mixed", "prefix", "churn"]


def compare(lab, workload: str, model: str, offload: dict[str, Any], **options: Any) -> Result:
    """A workload with offload. Fails unless everything is as without."""
    result, difference = lab.compare(workload, model, offload, **options)
    assert result.trace.drafts == lab.reference(workload, model, **options).trace.drafts
    assert difference == 0.0
    return result


def compare_all(
    lab, workloads: list[str], model: str, offload: dict[str, Any], **options: Any
) -> list[Result]:
    """`compare` for several workloads on two engines in all."""
    for workload in workloads:
        lab.reference(workload, model, **options)
    return [compare(lab, workload, model, offload, **options) for workload in workloads]


@pytest.mark.parametrize(
    ("model", "drafts", "offload", "workloads"),
    [
        ("glm-tiny-mtp", 1, {"topk_buffer_size": 128}, BRIEF),  # the smallest for one draft
        ("glm-tiny-mtp", 3, {"topk_buffer_size": 256, "policy": "fifo"}, ORDINARY),
        ("glm-tiny-mtp", 3, {"topk_buffer_size": 1024, "prefill_buffers": 5, "ways": 32}, BRIEF),
        ("glm-tiny-mtp", 3, {"topk_buffer_size": 256, "policy": "rrip3", "placement": "two_sets"}, BRIEF),
        ("dsv32-tiny-mtp", 3, {"topk_buffer_size": 256, "policy": "clock"}, ["mixed"]),
    ],
)
def test_same_results(lab, model, drafts, offload, workloads):
    results = compare_all(lab, workloads, model, offload, **mtp(drafts))
    assert sorted(draft_counts(*results)) == list(range(drafts + 1))
    for result in results:
        assert result.trace.stats["hits"] > 0
        assert result.trace.stats["fetched_bytes"] > 0


def test_preemption(lab):
    result = compare(lab, "preempted", "glm-tiny-mtp", {"topk_buffer_size": 256}, **mtp(3))
    assert len(set(result.trace.preempted)) >= 2


def test_a_request_as_long_as_the_model(lab):
    """While one request is at its end, vLLM runs no MTP layer for any, and never writes the skipped rows.

    The others' later drafts then depend on what was in these places before; their tokens don't.
    """
    reference = lab.reference("full", "glm-tiny-mtp", **mtp(3))
    result = lab.run("full", "glm-tiny-mtp", {"topk_buffer_size": 256}, **mtp(3))
    assert any(set(ids) == {0} for step in result.trace.drafts for ids in step.values())
    assert_same_tokens(result.outcomes, reference.outcomes)


def test_another_dtype(lab):
    result = compare(lab, "mixed", "glm-tiny-mtp-bf16", {"topk_buffer_size": 256}, **mtp(3))
    assert result.trace.stats["hits"] > 0
    assert draft_counts(result)[1] > 0


def test_the_offload_is_told_of_every_draft_pass_once(lab, monkeypatch):
    offload = {"topk_buffer_size": 256}
    manager = lab.engine("dsv32-tiny-mtp", offload, **mtp(3)).manager
    passes = []
    begin_draft = manager.begin_draft

    def watched(batch, index):
        passes.append((index, batch.num_requests, len(batch.req_ids), int(batch.query_lens.max())))
        begin_draft(batch, index)

    monkeypatch.setattr(manager, "begin_draft", watched)
    result = lab.run("short", "dsv32-tiny-mtp", offload, **mtp(3))
    steps = [step for step in result.trace.schedule if step]
    assert [index for index, *_ in passes] == [0, 1, 2] * len(steps)
    for n, step in enumerate(steps):
        longest = max(step.values())
        assert passes[3 * n : 3 * n + 3] == [
            (index, len(step), len(step), 1 if index else longest) for index in range(3)
        ]


@pytest.mark.parametrize(
    "options",
    [
        mtp(2, index_share_for_mtp_iteration=False),
        mtp(3, disable_padded_drafter_batch=True),
        mtp(3, num_speculative_tokens_per_batch_size=[(1, 2, 3), (3, 3, 1), (4, 8, 0)]),
        {**mtp(3), "block_size": 16, "max_num_batched_tokens": 100},
        {**mtp(3), "enforce_eager": False, "compilation_config": {"mode": 3}},
    ],
    ids=["every draft chooses", "no padding", "depends on the batch", "small blocks and chunks", "compiled"],
)
def test_other_ways_to_draft(lab, options):
    results = compare_all(lab, ["mixed"], "glm-tiny-mtp", {"topk_buffer_size": 256}, **options)
    assert draft_counts(*results)[1] > 0
    if "compilation_config" in options:
        compiled, eager = (lab.reference("mixed", "glm-tiny-mtp", **given) for given in (options, mtp(3)))
        assert_same_tokens(compiled.outcomes, eager.outcomes)
        assert first_drafts(compiled, 3) == first_drafts(
            eager, 3
        )  # the choice is frozen and thawed there, too
        lab.close()  # a compiled engine's threads and memory are of no use to the next test


def test_a_prefix_of_the_same_step(lab):
    for options in (mtp(1), mtp(3)):
        result = compare(lab, "same_step", "glm-tiny-mtp", {"topk_buffer_size": 256}, **options)
        assert [outcome.cached_tokens for outcome in result.outcomes] == [0, 576, 576, 0, 576]


def test_every_hot_row_of_the_draft_layer(lab, monkeypatch):
    compared = []
    original = OffloadedKV._compare

    def watched(self, *args):
        compared.append(self._layer)
        original(self, *args)

    monkeypatch.setattr(OffloadedKV, "_compare", watched)
    keep = {"topk_buffer_size": 256, "keep_device_kv_cache": True}
    for model, draft_layer in (("glm-tiny-mtp", 4), ("dsv32-tiny-mtp", 3)):
        compare(lab, "mixed", model, keep, **mtp(3))
        assert compared.count(draft_layer) > 1.5 * compared.count(0)
        compared.clear()


@pytest.mark.parametrize("seed", [1])
def test_random_delays(lab, monkeypatch, seed):
    workloads = ["mixed", "prefix", "abort"]
    for workload in workloads:
        lab.reference(workload, "glm-tiny-mtp", **mtp(3))
    monkeypatch.setenv("KVOFFLOAD_RUNTIME_DELAY", f"{seed}:8")
    for workload in workloads:
        # a copy of the options: an engine of its own, which sees the variable
        offload = {"topk_buffer_size": 256, "prefill_buffers": 2 + seed % 2}
        compare(lab, workload, "glm-tiny-mtp", offload, **mtp(3))
    lab.close()


class SlowWrites:
    """Delays every write into the host pool by more than a draft pass takes."""

    def delay_s(self, _stream, _task, edge):
        return 0.02 if edge == "before" else 0.0


def test_drafts_wait_for_what_the_pass_before_has_written(lab, monkeypatch):
    offload = {"topk_buffer_size": 256}
    lab.reference("mixed", "glm-tiny-mtp", **mtp(3))  # before, so that the engine below stays
    manager = lab.engine("glm-tiny-mtp", offload, **mtp(3)).manager
    monkeypatch.setattr(manager.host_rows._stream._lane, "_delays", SlowWrites())
    right = compare(lab, "mixed", "glm-tiny-mtp", offload, **mtp(3))

    begin_draft = manager.begin_draft

    def careless(*args):
        with monkeypatch.context() as patch:
            patch.setattr(manager.host_rows, "await_own_writes", lambda _layer: None)
            begin_draft(*args)

    monkeypatch.setattr(manager, "begin_draft", careless)
    wrong = lab.run("mixed", "glm-tiny-mtp", offload, **mtp(3))
    assert wrong.trace.drafts != right.trace.drafts
    assert_same_tokens(wrong.outcomes, right.outcomes)  # a draft is but a draft


def test_drafts_wait_for_a_prefix_of_the_same_step(lab, monkeypatch):
    offload, options = {"topk_buffer_size": 256}, {**WORKLOADS["same_step"].options, **mtp(3)}
    lab.reference("same_step", "glm-tiny-mtp", **mtp(3))
    manager = lab.engine("glm-tiny-mtp", offload, **options).manager
    monkeypatch.setattr(manager.host_rows._stream._lane, "_delays", SlowWrites())
    right = compare(lab, "same_step", "glm-tiny-mtp", offload, **mtp(3))

    begin_draft, prefixes_in_step = manager.begin_draft, manager._prefixes_in_step

    def careless(*args):
        with monkeypatch.context() as patch:
            patch.setattr(manager, "_prefixes_in_step", lambda *args: prefixes_in_step(*args) & False)
            begin_draft(*args)

    monkeypatch.setattr(manager, "begin_draft", careless)
    wrong = lab.run("same_step", "glm-tiny-mtp", offload, **mtp(3))
    assert wrong.trace.drafts != right.trace.drafts
    assert_same_tokens(wrong.outcomes, right.outcomes)
