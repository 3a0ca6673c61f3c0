"""Entry point of the `kvoffload` command: its subcommands and their options."""

from __future__ import annotations

import importlib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_kvoffload.cli import control_key, memcache, operators, proxy, trace
from vllm_kvoffload.cli import doctor as diagnosis
from vllm_kvoffload.cli import size as sizing
from vllm_kvoffload.policies import DEFAULT_PLACEMENT, DEFAULT_POLICY, TABLE
from vllm_kvoffload.settings.errors import ConfigError

DEMO_MODULE = "vllm_kvoffload.demo.run"
POLICY_HELP = (
    "Replacement policy of a set: " + ", ".join(f"{p.name} ({p.summary})" for p in TABLE.values()) + "."
)

app = typer.Typer(
    name="kvoffload", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


app.add_typer(trace.app, name="trace")
memcache.add_to(app)
control_key.add_to(app)
operators.add_to(app)


@app.callback()
def _root() -> None:
    """KV cache offload for sparse-attention models on vLLM."""


@app.command()
def size(
    *,
    model: Annotated[Path, typer.Option(help="Model folder, or its config.json.")],
    device_gb: Annotated[
        float | None, typer.Option(help="Memory for KV of each device, GiB. Default: the memory needed.")
    ] = None,
    dram_gb: Annotated[int, typer.Option(help="dram_size_per_dp_GB: host memory for main KV, GiB.")] = 128,
    topk_buffer_size: Annotated[int, typer.Option(help="Hot-pool slots of a request.")] = 4096,
    ways: Annotated[int, typer.Option(help="Hot-pool slots that a token can be in, 16 or 32.")] = 16,
    placement: Annotated[
        str, typer.Option(help="one_set or two_sets, in which these slots are.")
    ] = DEFAULT_PLACEMENT,
    policy: Annotated[str, typer.Option(help=POLICY_HELP)] = DEFAULT_POLICY,
    delivery: Annotated[str, typer.Option(help="in_place or compact.")] = "in_place",
    max_num_seqs: Annotated[int, typer.Option(help="Requests that decode together.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request. Default: the model's own limit.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 128,
    layout: Annotated[str, typer.Option(help="Main KV layout: cpu, ascend or fp8.")] = "ascend",
    indexer_layout: Annotated[
        str | None, typer.Option(help="Indexer layout: model, float32, fp8, int8 or mxfp4.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Type of unquantised caches. Default: the model's.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=0, help="MTP drafts of a step.")] = 0,
    aggregated: Annotated[
        bool, typer.Option("--aggregated", help="The engine prefills too: no KV transfer.")
    ] = False,
    prefill_buffers: Annotated[int, typer.Option(help="Layer buffers of an aggregated engine.")] = 2,
    keep_device_kv_cache: Annotated[
        bool, typer.Option("--keep-device-kv-cache", help="Debugging: keep the main KV on the device too.")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Say which budgets this many tokens need.")
    ] = None,
    shared_buffers: Annotated[
        int | None, typer.Option(help="layerwise_num_shared_buffers of a prefill engine.")
    ] = None,
    independent_layers: Annotated[
        str | None, typer.Option(help='layerwise_independent_layers, such as 0,-1 or "all". Default: 0.')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print a model's KV geometry, and its capacity with and without offload."""
    request = sizing.SizeRequest(
        model=model,
        device_gb=device_gb,
        dram_gb=dram_gb,
        topk_buffer_size=topk_buffer_size,
        ways=ways,
        placement=placement,
        policy=policy,
        delivery=delivery,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
        layout=layout,
        indexer_layout=indexer_layout,
        dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
        prefill_buffers=prefill_buffers if aggregated else 0,
        keep_device=keep_device_kv_cache,
        tokens=tokens,
        shared_buffers=shared_buffers,
        independent_layers=independent_layers,
    )
    _print_size(request, as_json)


def _print_size(request: sizing.SizeRequest, as_json: bool) -> None:
    try:
        report = sizing.size_report(request)
    except ConfigError as error:
        typer.echo(f"kvoffload size: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        sizing.print_report(report, Console())


def _demo(context: typer.Context) -> None:
    """Build and run the demo model."""
    raise typer.Exit(importlib.import_module(DEMO_MODULE).main(context.args) or 0)


def _add_demo() -> None:
    """Adds `kvoffload demo` if its module is present; it parses all its arguments itself, including
    --help."""
    if find_spec(DEMO_MODULE) is not None:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command("demo", context_settings=settings)(_demo)


_add_demo()


@app.command(
    "proxy",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def _proxy(context: typer.Context) -> None:
    """Serve OpenAI requests from prefill and decode engines."""
    raise typer.Exit(proxy.main(context.args))


@app.command()
def doctor(
    *,
    kv_port: Annotated[int, typer.Option(help="kv_port of a decode engine that is to run here.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="Its DP x TP ranks, a port each.")] = 1,
    root: Annotated[Path, typer.Option(help="Look at the machine below this folder.")] = Path("/"),
) -> None:
    """Check an Ascend machine for the prerequisites of the offload; name the fix for missing ones."""
    ports = range(kv_port, kv_port + ranks) if kv_port else range(0)
    findings = diagnosis.examine(diagnosis.Machine(root, os.environ, ports))
    diagnosis.print_findings(findings, Console())
    if any(finding.verdict is diagnosis.Verdict.FAIL for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Console script."""
    app()


if __name__ == "__main__":
    main()
