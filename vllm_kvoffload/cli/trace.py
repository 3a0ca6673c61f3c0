"""`kvoffload trace`: creates synthetic traces, describes traces, and evaluates policies on them.

Results are plain data (the output of `--json`, and the input of `plot`); printing adds no logic. numpy and
the operators are imported by the subcommand that needs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from vllm_kvoffload.trace.simulator import Result

app = typer.Typer(
    no_args_is_help=True, help="Recorded and synthetic top-k indices, and policies judged by them."
)


@contextmanager
def _errors(command: str) -> Iterator[None]:
    """Prints expected errors as one line and exits with code 2."""
    from vllm_kvoffload.trace.format import TraceError

    try:
        yield
    except (TraceError, OSError, ValueError) as error:
        typer.echo(f"kvoffload trace {command}: {error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def generate(
    *,
    suite: Annotated[
        Path | None, typer.Option(help="Folder for the whole trace suite, one file per trace.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Of the suite only this trace, or drift. Repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Instead of a suite: one trace file, made as below.")
    ] = None,
    model: Annotated[str, typer.Option(help="Score model of --out: hisparse or cann.")] = "hisparse",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the first step.")] = 100_000,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps.")] = 256,
    requests: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 1,
    query_len: Annotated[int, typer.Option(min=1, help="Query tokens of a step, 1 + drafts.")] = 1,
    topk: Annotated[int, typer.Option(min=1, help="Top-k indices of a query token.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Of the random numbers.")] = 0,
) -> None:
    """Make synthetic traces: the suite, or one."""
    from vllm_kvoffload.trace.generator import SCORE_MODELS
    from vllm_kvoffload.trace.suite import LONG_RUNS, SUITE, TraceSpec, write_suite, write_trace

    with _errors("generate"):
        if (suite is None) == (out is None):
            raise ValueError("give either --suite FOLDER or --out FILE")
        if suite is not None:
            names = [spec.name for spec in (*SUITE, *LONG_RUNS)]
            if unknown := sorted(set(only or ()) - set(names)):
                raise ValueError(f"the suite has no {', '.join(unknown)}; it has {', '.join(names)}")
            named = [spec for spec in (*SUITE, *LONG_RUNS) if spec.name in (only or ())]
            for path in write_suite(suite, named or SUITE, seed):
                typer.echo(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
        if out is not None:
            if model not in SCORE_MODELS:
                raise ValueError(f"no score model {model!r}; there are {', '.join(SCORE_MODELS)}")
            if context < topk:
                raise ValueError(f"a context of {context} tokens has no {topk} to choose; raise --context")
            spec = TraceSpec(out.stem, "", (SCORE_MODELS[model],), context, requests, steps, query_len, topk)
            write_trace(out, spec, seed)
            typer.echo(f"{out}  {out.stat().st_size / 1e6:.1f} MB")


@app.command()
def info(
    trace: Annotated[Path, typer.Argument(help="A trace file.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a trace's contents, and whether it is complete."""
    with _errors("info"):
        report = trace_report(trace)
        if as_json:
            typer.echo(json.dumps(report, indent=2))
            return
        table = Table(title=str(trace), title_justify="left", show_header=False)
        for name, value in report.items():
            table.add_row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
        Console().print(table)


def trace_report(path: Path) -> dict[str, Any]:
    """Builds the output of `info`, JSON-compatible. Raises TraceError."""
    from vllm_kvoffload.trace.reader import TraceReader

    reader = TraceReader(path)
    steps = ids = query_tokens = longest = 0
    groups, names = set(), set()
    for step in reader:
        steps += 1
        groups.add(step.group)
        for request in step.requests:
            names.add(request.name)
            longest = max(longest, request.seq_len)
            query_tokens += request.query_len
            ids += sum(map(len, request.ids))
    state = (
        "complete"
        if reader.closed
        else "not closed: its engine is still recording, was killed, or had to stop recording"
    )
    if reader.damaged_at is not None:
        state += f"; readable up to byte {reader.damaged_at:,} of {reader.file_bytes:,}"
    return {
        **{name: value for name, value in asdict(reader.header).items() if name != "details"},
        "state": state,
        "file_bytes": reader.file_bytes,
        "recorded_steps": steps,
        "dropped_steps": reader.dropped,
        "groups_recorded": len(groups),
        "requests": len(names),
        "query_tokens": query_tokens,
        "longest_request_tokens": longest,
        "ids": ids,
        "bytes_per_id": round(reader.file_bytes / ids, 3) if ids else 0.0,
    }


@app.command()
def simulate(
    traces: Annotated[list[Path], typer.Argument(help="Trace files, or folders of *.kvtrace.")],
    *,
    pool: Annotated[list[int] | None, typer.Option(help="Slots of a request. Repeatable.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="rrip/16, lru, ...; see docs/policies.md. Repeatable.")
    ] = None,
    group: Annotated[list[int] | None, typer.Option(help="Only this index group. Repeatable.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first N requests of each group.")
    ] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="First steps of each request that don't count.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the results, for `kvoffload trace plot`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay traces on the real plan and on reference policies: hit ratios."""
    from vllm_kvoffload.trace.simulator import ALL_POLICIES, POOLS, parse_policy, simulate
    from vllm_kvoffload.trace.streams import streams_of_trace

    with _errors("simulate"):
        policies = [parse_policy(name) for name in policy] if policy else ALL_POLICIES
        results: list[Result] = []
        for path in _trace_files(traces):
            reader = _reader(path)
            streams = streams_of_trace(reader, groups=group or (), max_requests=requests)
            if not streams:
                raise ValueError(f"{path} has no step of these groups")
            if cut := sum(stream.cut for stream in streams):
                typer.echo(f"{path}: {cut} of {len(streams)} requests end early, at dropped steps", err=True)
            found = list(
                simulate(
                    path.stem,
                    streams,
                    reader.header.index_topk,
                    policies=policies,
                    pools=pool or POOLS,
                    warm_up=warm_up,
                )
            )
            results += found
            if not as_json:
                Console().print(results_table(path.stem, found))
        text = json.dumps([result.as_json() for result in results], indent=1)
        if out is not None:
            out.write_text(text)
        if as_json:
            typer.echo(text)


def _reader(path: Path) -> Any:
    from vllm_kvoffload.trace.reader import TraceReader

    return TraceReader(path)


def _trace_files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.kvtrace")) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} has no *.kvtrace")
        files += found
    return files


def results_table(trace: str, results: Sequence[Result]) -> Table:
    """Formats hit percentages: a policy per line, a pool size per column."""
    pools = sorted({result.slots for result in results if result.slots})
    steps = results[0].steps if results else 0
    title = f"{trace}, {steps:,} steps: hits in %"
    table = Table("policy", *(f"{slots:,}" for slots in pools), title=title, title_justify="left")
    for policy in dict.fromkeys(result.policy for result in results):
        own = {result.slots: f"{result.hit_percent:.2f}" for result in results if result.policy == policy}
        cells = [own[0]] * len(pools) if 0 in own else [own.get(slots, "-") for slots in pools]
        table.add_row(policy, *cells)
    return table


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(help="Output of `kvoffload trace simulate --out`.")],
    *,
    png: Annotated[Path, typer.Option(help="The picture.")],
) -> None:
    """Draw hit ratio against pool size."""
    from vllm_kvoffload.trace.plot import MissingMatplotlib
    from vllm_kvoffload.trace.plot import plot as draw
    from vllm_kvoffload.trace.simulator import Result

    with _errors("plot"):
        try:
            loaded = [Result.from_json(item) for item in json.loads(results.read_text())]
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{results} is not a result of `kvoffload trace simulate --out`") from error
        try:
            draw(loaded, png)
        except MissingMatplotlib as error:
            raise ValueError(str(error)) from error
        typer.echo(str(png))
