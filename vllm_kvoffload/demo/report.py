"""Reports the two runs: comparison of answers, table, verdict. No I/O except printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from vllm_kvoffload.demo.client import DemoAnswer, Sample
from vllm_kvoffload.demo.workload import AGAIN, LONG, PAIR

NONE = "-"
_PREFIX = "vllm:kvoffload_"
_CONFIG = "vllm:cache_config_info"
_SOURCES = "vllm:prompt_tokens_by_source_total"
PULLED, CACHED = "external_kv_transfer", "local_cache_hit"
"""Keys of `RunResult.sources`."""


@dataclass
class RunResult:
    """One deployment's run.

    name: the heading of its column. device_bytes: for KV, of each server. disaggregated: prefill and decode
    name: column heading. device_bytes: for KV, per server. disaggregated: prefill and decode are separate
    servers; metrics are decode's unless stated otherwise. stores: prefill has a store. answers: by request
    name. step_s: wall time by step key. sources: prompt tokens by source of their KV, in vLLM's terms.
    offload: counters and gauges by the names of `metrics.fields`, empty without offload.
    store: the same of prefill, after each step by its key.
    end: problems during shutdown, None before it.
    """

    name: str
    device_bytes: int
    disaggregated: bool = False
    stores: bool = False
    start_s: float = 0.0
    kv_tokens: int = 0
    prefill_kv_tokens: int = 0
    answers: dict[str, DemoAnswer] = field(default_factory=dict)
    step_s: dict[str, float] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    offload: dict[str, float] = field(default_factory=dict)
    store: dict[str, dict[str, float]] = field(default_factory=dict)
    end: list[str] | None = None

    def take_metrics(self, metrics: Mapping[str, list[Sample]]) -> None:
        """Reads KV tokens and the offload's series, summed over engines and ranks."""
        self.kv_tokens = _kv_tokens(metrics)
        for sample in metrics.get(_SOURCES, ()):
            self.sources[sample.labels["source"]] = int(sample.value)
        self.offload |= _series(metrics)

    def take_store(self, step: str, metrics: Mapping[str, list[Sample]]) -> None:
        """Reads, after a step, KV tokens and the series of prefill with a store."""
        self.prefill_kv_tokens = _kv_tokens(metrics)
        self.store[step] = _series(metrics)

    def from_store(self, step: str) -> tuple[int, float]:
        """Prompt tokens of a step that prefill did not compute but found in its store; bytes loaded in it."""
        after, steps = self.store.get(step, {}), list(self.store)
        before = self.store[steps[steps.index(step) - 1]] if step in steps[1:] else {}
        tokens, loaded = (
            after.get(key, 0.0) - before.get(key, 0.0) for key in ("store_hit_tokens", "store_loaded_bytes")
        )
        return int(tokens), loaded

    @property
    def hit_ratio(self) -> float | None:
        """Hit ratio of the rows selected in decode, None if none was looked up."""
        looked_up = self.offload.get("hits", 0.0) + self.offload.get("misses", 0.0)
        return self.offload["hits"] / looked_up if looked_up else None


def _kv_tokens(metrics: Mapping[str, list[Sample]]) -> int:
    """Number of KV tokens that fit, 0 if not reported."""
    for sample in metrics.get(_CONFIG, ()):
        labels = sample.labels
        if "kv_cache_size_tokens" in labels:
            return int(labels["kv_cache_size_tokens"])
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])  # vLLM 0.23
    return 0


def _series(metrics: Mapping[str, list[Sample]]) -> dict[str, float]:
    """The plugin's own series, by the names of `metrics.fields`."""
    return {
        name[len(_PREFIX) :].removesuffix("_total"): sum(sample.value for sample in samples)
        for name, samples in metrics.items()
        if name.startswith(_PREFIX)
    }


@dataclass(frozen=True)
class Comparison:
    """`differences`: one line for each unequal answer. `worst_logprob`: over positions with equal tokens."""

    answers: int
    tokens: int
    worst_logprob: float
    differences: tuple[str, ...]


def compare(reference: Mapping[str, DemoAnswer], answers: Mapping[str, DemoAnswer]) -> Comparison:
    """Compares token by token."""
    differences = [f"{name}: missing in one run" for name in sorted(reference.keys() ^ answers.keys())]
    tokens, worst = 0, 0.0
    for name in (name for name in reference if name in answers):
        a, b = reference[name], answers[name]
        tokens += len(a.token_ids)
        if a.prompt_tokens != b.prompt_tokens:
            differences.append(f"{name}: prompts of {a.prompt_tokens} and {b.prompt_tokens} tokens")
        same = 0
        for left, right in zip(a.token_ids, b.token_ids, strict=False):
            if left != right:
                break
            same += 1
        if same < max(len(a.token_ids), len(b.token_ids)):
            lengths = f"{len(a.token_ids)} and {len(b.token_ids)}"
            differences.append(f"{name}: tokens differ from number {same + 1} on ({lengths} tokens)")
        gaps = [abs(x - y) for x, y in zip(a.logprobs[:same], b.logprobs[:same], strict=False)]
        worst = max([worst, *gaps])
    return Comparison(len(reference), tokens, worst, tuple(differences))


def failures(without: RunResult, with_offload: RunResult) -> list[str]:
    """Lists everything that contradicts success, one line each."""
    found = list(compare(without.answers, with_offload.answers).differences)
    if not without.answers:
        found.append("no answers to compare")
    if with_offload.hit_ratio is None:
        found.append("no offload at work: /metrics shows no row looked up in the hot pool")
    elif not with_offload.offload.get("misses"):
        found.append("the hot pool had no miss: nothing was fetched, so nothing was shown")
    if with_offload.disaggregated and not with_offload.sources.get(PULLED):
        found.append("no prefill and decode at work: decode pulled no KV from prefill")
    if with_offload.kv_tokens <= without.kv_tokens:
        found.append(f"no more KV tokens with offload: {with_offload.kv_tokens} vs {without.kv_tokens}")
    if with_offload.stores:
        if not all(with_offload.from_store(AGAIN)):
            found.append("no store at work: prefill loaded nothing of the long prompt when asked it again")
        tokens = with_offload.prefill_kv_tokens
        if tokens <= without.kv_tokens:
            found.append(f"no more KV tokens where layers share buffers: {tokens} vs {without.kv_tokens}")
    for run in (without, with_offload):
        found += [f"{run.name}: {problem}" for problem in run.end or ()]
    return found


def table_rows(without: RunResult, with_offload: RunResult) -> list[tuple[str, str, str]]:
    """Returns the table's lines: label, without offload, with offload."""

    def both(what: str, show: Callable[[RunResult], str]) -> tuple[str, str, str]:
        return what, show(without), show(with_offload)

    def only_with(what: str, text: str) -> tuple[str, str, str]:
        return what, NONE, text

    def tokens_that_fit(role: str, tokens: int) -> tuple[str, str, str]:
        factor = tokens / without.kv_tokens if without.kv_tokens else 0.0
        return f"KV tokens that fit, for {role}", f"{without.kv_tokens:,}", f"{tokens:,} ({factor:.1f}x)"

    tokens, offload, hit_ratio = with_offload.kv_tokens, with_offload.offload, with_offload.hit_ratio
    needed = _mib(offload.get("device_bytes_without_offload")), _mib(offload.get("device_bytes"))
    rows = [
        both("device memory for KV, of each server", lambda run: _mib(run.device_bytes)),
        tokens_that_fit("decode", tokens),
        (f"device memory for {tokens:,} tokens", *needed),
        only_with("host memory for KV", _mib(offload.get("host_pool_bytes"))),
        both("long prompt: first token after", lambda run: f"{_long(run).first_s:.2f} s"),
        both("prefill of a long prompt, tokens/s", lambda run: _speed(_prefill_speed(run))),
        both("decode of one request, tokens/s", lambda run: _speed(_decode_speed(run))),
        both("two at once, prompt and output tokens/s", lambda run: _speed(_pair_speed(run))),
        both("long prompt again: tokens found cached", lambda run: f"{_again(run).cached_tokens:,}"),
        both("long prompt again: first token after", lambda run: f"{_again(run).first_s:.2f} s"),
        only_with("selected rows found in the hot pool", NONE if hit_ratio is None else f"{hit_ratio:.1%}"),
        only_with("fetched from host memory in decode", _mib(offload.get("fetched_bytes"))),
    ]
    if with_offload.disaggregated:
        rows += [
            only_with("prompt tokens pulled from prefill", f"{with_offload.sources.get(PULLED, 0):,}"),
            only_with("bytes of that", _mib(offload.get("pulled_bytes"))),
            only_with("prompt tokens that decode had", f"{with_offload.sources.get(CACHED, 0):,}"),
        ]
        if with_offload.stores:
            found, loaded = with_offload.from_store(AGAIN)
            rows += [
                tokens_that_fit("prefill", with_offload.prefill_kv_tokens),
                only_with("again: tokens out of prefill's store", f"{found:,}"),
                only_with("bytes loaded for them", _mib(loaded)),
                only_with("moved from and to it (times the least)", _moved(with_offload)),
            ]
    else:
        rows.append(only_with("streamed from host memory in prefill", _mib(offload.get("prefill_bytes"))))
    return [*rows, both("all requests", lambda run: f"{sum(run.step_s.values()):.1f} s")]


def print_table(console: Console, without: RunResult, with_offload: RunResult) -> None:
    """Prints the table and an explanation of its speeds."""
    table = Table("", without.name, with_offload.name, box=SIMPLE)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in table_rows(without, with_offload):
        table.add_row(*row)
    console.print(table)
    console.print(
        "Speeds are this CPU's, with a tiny random model: they show that it works, not the speed of an NPU.",
        highlight=False,
        soft_wrap=True,
    )


def print_verdict(console: Console, without: RunResult, with_offload: RunResult) -> bool:
    """Prints the verdict. Returns whether all checks passed."""
    comparison, found = compare(without.answers, with_offload.answers), failures(without, with_offload)
    for problem in found:
        console.print(f"  - {problem}", markup=False, highlight=False, soft_wrap=True)
    if found:
        console.print("[bold red]FAILED[/]", highlight=False)
        return False
    text = (
        f"{comparison.answers} answers, {comparison.tokens} tokens: all equal {_how(with_offload)} "
        f"(largest log-probability difference {comparison.worst_logprob:.1e})"
    )
    if with_offload.end is not None:
        text += "; all servers ended cleanly, nothing is left running"
    console.print(f"[bold green]OK[/]: {text}.", highlight=False, soft_wrap=True)
    return True


def _how(run: RunResult) -> str:
    if run.stores:
        return "from one server and from prefill with a store and decode with offload"
    if run.disaggregated:
        return "from one server and from prefill and decode with offload"
    return "with and without offload"


def as_json(without: RunResult, with_offload: RunResult) -> dict[str, Any]:
    """Returns all measurements for report.json."""
    return {
        "without_offload": asdict(without),
        "with_offload": asdict(with_offload),
        "comparison": asdict(compare(without.answers, with_offload.answers)),
        "failures": failures(without, with_offload),
    }


def from_store_text(run: RunResult, step: str) -> str:
    """Formats the tokens of a step found in prefill's store, "-" for none."""
    tokens, loaded = run.from_store(step)
    return f"{tokens:,} tokens, {_mib(loaded)}" if tokens else NONE


def _moved(run: RunResult) -> str:
    """Formats all moved bytes and their ratio to the minimum."""
    totals = list(run.store.values())[-1] if run.store else {}
    moved = totals.get("store_loaded_bytes", 0.0) + totals.get("store_saved_bytes", 0.0)
    needed = totals.get("store_needed_bytes", 0.0)
    return f"{_mib(moved)} ({moved / needed:.2f}x)" if needed else NONE


def _again(run: RunResult) -> DemoAnswer:
    return run.answers.get(AGAIN, DemoAnswer())


def _long(run: RunResult) -> DemoAnswer:
    return run.answers.get(LONG, DemoAnswer())


def _prefill_speed(run: RunResult) -> float:
    answer = _long(run)
    return answer.prompt_tokens / answer.first_s if answer.first_s else 0.0


def _decode_speed(run: RunResult) -> float:
    answer = _long(run)
    elapsed_s = answer.total_s - answer.first_s
    return (len(answer.token_ids) - 1) / elapsed_s if elapsed_s > 0 and answer.first_s else 0.0


def _pair_speed(run: RunResult) -> float:
    pair = [answer for name, answer in run.answers.items() if name.startswith(PAIR)]
    tokens = sum(answer.prompt_tokens + len(answer.token_ids) for answer in pair)
    elapsed_s = run.step_s.get(PAIR, 0.0)
    return tokens / elapsed_s if elapsed_s else 0.0


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def _mib(count: float | None) -> str:
    return NONE if count is None else f"{count / (1 << 20):,.1f} MiB"
