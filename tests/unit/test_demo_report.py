"""The demo's verdict: what counts as equal, and everything that must make it fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from vllm_kvoffload.demo.client import DemoAnswer, Sample
from vllm_kvoffload.demo.report import (
    RunResult,
    as_json,
    compare,
    failures,
    print_table,
    print_verdict,
    table_rows,
)


def run(name: str, kv_tokens: int, **offload: float) -> RunResult:
    answer = DemoAnswer("text", [1, 2, 3], [-1.0, -2.0, -3.0], 100, 0, first_s=2.0, total_s=3.0)
    answers = {name: copy.deepcopy(answer) for name in ("long", "pair-1", "pair-2", "again")}
    made = RunResult(name, 48 << 20, start_s=1.0, kv_tokens=kv_tokens, answers=answers, offload=dict(offload))
    made.step_s, made.end = {"long": 3.0, "pair": 4.0}, []
    return made


@pytest.fixture
def without() -> RunResult:
    return run("without offload", 1000)


@pytest.fixture
def with_offload() -> RunResult:
    return run(
        "with offload",
        3000,
        hits=90,
        misses=10,
        device_bytes=48 << 20,
        device_bytes_without_offload=144 << 20,
        fetched_bytes=2 << 20,
    )


@pytest.fixture
def disaggregated(with_offload: RunResult) -> RunResult:
    with_offload.name, with_offload.disaggregated = "prefill + decode", True
    with_offload.sources = {"external_kv_transfer": 1500, "local_cache_hit": 64, "local_compute": 3}
    return with_offload


@pytest.fixture
def joint(disaggregated: RunResult) -> RunResult:
    disaggregated.stores = True
    for step, hits in (("long", 0.0), ("pair", 64.0), ("again", 1064.0)):
        metrics = {
            "vllm:cache_config_info": [Sample({"kv_cache_size_tokens": "1500"}, 1.0)],
            "vllm:kvoffload_store_hit_tokens_total": [Sample({}, hits)],
            "vllm:kvoffload_store_loaded_bytes_total": [Sample({}, hits * 2048)],
            "vllm:kvoffload_store_saved_bytes_total": [Sample({}, 2048.0)],
            "vllm:kvoffload_store_needed_bytes_total": [Sample({}, hits * 2048)],
        }
        disaggregated.take_store(step, metrics)
    return disaggregated


def text(print_it: Callable[[Console], object]) -> str:
    console = Console(file=StringIO(), width=120)
    print_it(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_equal_answers(without: RunResult, with_offload: RunResult) -> None:
    with_offload.answers["long"].logprobs[1] += 0.25
    comparison = compare(without.answers, with_offload.answers)
    assert (comparison.answers, comparison.tokens, comparison.differences) == (4, 12, ())
    assert comparison.worst_logprob == 0.25
    assert failures(without, with_offload) == []
    shown = text(lambda console: print_verdict(console, without, with_offload))
    assert shown.startswith("OK: 4 answers, 12 tokens")
    assert "2.5e-01" in shown
    assert "nothing is left running" in shown


def test_no_claim_about_servers_that_still_run(without: RunResult, with_offload: RunResult) -> None:
    with_offload.end = None
    assert "running" not in text(lambda console: print_verdict(console, without, with_offload))


Spoil = Callable[[RunResult, RunResult], object]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda _, b: b.answers["again"].token_ids.__setitem__(1, 9),
            "again: tokens differ from number 2 on",
        ),
        (
            lambda _, b: b.answers["long"].token_ids.pop(),
            "long: tokens differ from number 3 on (3 and 2 tokens)",
        ),
        (lambda _, b: b.answers["long"].token_ids.append(4), "long: tokens differ from number 4 on"),
        (lambda _, b: b.answers.pop("long"), "long: missing in one run"),
        (lambda _, b: setattr(b.answers["long"], "prompt_tokens", 9), "long: prompts of 100 and 9 tokens"),
        (lambda a, b: (a.answers.clear(), b.answers.clear()), "no answers"),
        (lambda _, b: b.offload.clear(), "no offload at work"),
        (lambda _, b: b.offload.update(hits=0, misses=0), "no offload at work"),
        (lambda _, b: b.offload.update(misses=0), "no miss"),
        (lambda _, b: setattr(b, "kv_tokens", 1000), "no more KV tokens"),
        (lambda a, _: a.end.append("killed"), "without offload: killed"),
        (lambda _, b: b.end.append("killed"), "with offload: killed"),
    ],
)
def test_failures(without: RunResult, with_offload: RunResult, spoil: Spoil, message: str) -> None:
    spoil(without, with_offload)
    assert any(message in problem for problem in failures(without, with_offload))
    shown = text(lambda console: print_verdict(console, without, with_offload))
    assert message in shown
    assert "FAILED" in shown
    assert "OK" not in shown


def test_table(without: RunResult, with_offload: RunResult) -> None:
    rows = {what: values for what, *values in table_rows(without, with_offload)}
    assert rows["KV tokens that fit, for decode"] == ["1,000", "3,000 (3.0x)"]
    assert rows["device memory for 3,000 tokens"] == ["144.0 MiB", "48.0 MiB"]
    assert rows["prefill of a long prompt, tokens/s"] == ["50.0", "50.0"]
    assert rows["decode of one request, tokens/s"] == ["2.0", "2.0"]
    assert rows["two at once, prompt and output tokens/s"] == ["51.5", "51.5"]
    assert rows["selected rows found in the hot pool"] == ["-", "90.0%"]
    assert rows["fetched from host memory in decode"] == ["-", "2.0 MiB"]
    assert rows["all requests"] == ["7.0 s", "7.0 s"]
    shown = text(lambda console: print_table(console, without, with_offload))
    assert all(what in shown for what in rows)


def test_table_of_prefill_and_decode(without: RunResult, disaggregated: RunResult) -> None:
    rows = {what: values for what, *values in table_rows(without, disaggregated)}
    assert rows["prompt tokens pulled from prefill"] == ["-", "1,500"]
    assert rows["prompt tokens that decode had"] == ["-", "64"]
    assert "streamed from host memory in prefill" not in rows
    assert "prefill + decode" in text(lambda console: print_table(console, without, disaggregated))


def test_prefill_and_decode_without_a_pull_failed(without: RunResult, disaggregated: RunResult) -> None:
    assert failures(without, disaggregated) == []
    disaggregated.sources["external_kv_transfer"] = 0
    assert failures(without, disaggregated) == [
        "no prefill and decode at work: decode pulled no KV from prefill"
    ]


def test_table_of_prefill_with_a_store(without: RunResult, joint: RunResult) -> None:
    rows = {what: values for what, *values in table_rows(without, joint)}
    assert rows["KV tokens that fit, for prefill"] == ["1,000", "1,500 (1.5x)"]
    assert rows["again: tokens out of prefill's store"] == ["-", "1,000"], "what came before is not counted"
    assert rows["bytes loaded for them"] == ["-", "2.0 MiB"]
    assert rows["moved from and to it (times the least)"] == ["-", "2.1 MiB (1.00x)"]
    assert "with a store" in text(lambda console: print_verdict(console, without, joint))


def test_a_store_that_does_nothing_failed(without: RunResult, joint: RunResult) -> None:
    assert failures(without, joint) == []
    joint.store["again"] = joint.store["pair"]
    joint.prefill_kv_tokens = 1000
    idle, crowded = failures(without, joint)
    assert "no store at work" in idle
    assert "no more KV tokens where layers share buffers: 1000 vs 1000" in crowded


def test_table_of_runs_without_numbers() -> None:
    for disaggregated, stores in ((False, False), (True, False), (True, True)):
        assert table_rows(RunResult("a", 1), RunResult("b", 1, disaggregated, stores))


def test_metrics_are_summed_over_workers(with_offload: RunResult) -> None:
    with_offload.take_metrics(
        {
            "vllm:cache_config_info": [Sample({"kv_cache_size_tokens": "77"}, 1.0)],
            "vllm:kvoffload_hits_total": [Sample({"rank": "0"}, 1.0), Sample({"rank": "1"}, 2.0)],
            "vllm:kvoffload_device_bytes": [Sample({"rank": "0"}, 5.0)],
            "vllm:prompt_tokens_by_source_total": [Sample({"source": "local_compute"}, 4.0)],
            "vllm:other_total": [Sample({}, 9.0)],
        }
    )
    assert with_offload.kv_tokens == 77
    assert (with_offload.offload["hits"], with_offload.offload["device_bytes"]) == (3.0, 5.0)
    assert with_offload.sources == {"local_compute": 4}
    assert "other" not in with_offload.offload


def test_json(without: RunResult, with_offload: RunResult) -> None:
    content = json.loads(json.dumps(as_json(without, with_offload)))
    assert content["failures"] == []
    assert content["with_offload"]["answers"]["long"]["token_ids"] == [1, 2, 3]
