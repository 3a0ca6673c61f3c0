"""``proxy``: the proxy's cost per request and token, beside other relays of the same trivial SSE engine.

- ``proxy/tokens_per_s``: streamed tokens per second of the relay's CPU time, that is per core; 64 streams, a
  token each every 10 ms; baseline: vllm-router.
- ``proxy/tokens_per_s/naive``: the same; baseline: a relay of FastAPI and httpx, written for the comparison.
- ``proxy/requests_per_s`` and ``/naive``: whole answers of 4 tokens, per second of CPU time.
- ``proxy/rendezvous_per_s``: the same with decode's post and a prefill for each; baseline: without them.
- ``proxy/added_ms/token/{p50,p99}`` and ``request/{p50,p99}``: how much later than the engine's own median a
  token, and a whole short answer, arrives; baselines: vllm-router's, and for ``/naive`` the naive relay's.
- ``proxy/direct``: tokens per second through the proxy at that pace; baseline: from the engine directly.

vllm-router is taken from ``KVOFFLOAD_BENCH_VLLM_ROUTER`` or PATH; without it its rows are left out. It relays
to one engine here, without a rendezvous, as the naive relay does; the proxy's engine never posts for one
either, except in ``rendezvous_per_s``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from benchmarks.http.load import Result, load
from benchmarks.registry import Row, higher_is_better, lower_is_better

ROUTER_VARIABLE = "KVOFFLOAD_BENCH_VLLM_ROUTER"
STREAMS, STEP_MS, TOKENS = 64, 10.0, 200
ROUNDS = 3
MODULE = [sys.executable, "-m"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    return (
        sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
    )


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    cuts = quantiles(seconds, n=100)
    return {"p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98]}


@dataclass
class Relay:
    """A contender and its figures, one per round: per second of CPU time, and percentiles of latencies."""

    port: int
    pid: int | None = None
    tokens_rate: list[float] = field(default_factory=list)
    requests_rate: list[float] = field(default_factory=list)
    wall_tokens_rate: list[float] = field(default_factory=list)
    token_ms: list[dict[str, float]] = field(default_factory=list)
    request_ms: list[dict[str, float]] = field(default_factory=list)

    def _run(self, *, connections: int, each: int, tokens: int, stream: bool) -> tuple[Result, float]:
        before = cpu_seconds(self.pid) if self.pid is not None else 0.0
        result = load(self.port, connections=connections, each=each, tokens=tokens, stream=stream)
        used = cpu_seconds(self.pid) - before if self.pid is not None else 1.0
        if result.errors:
            raise RuntimeError(f"{result.errors} requests failed on port {self.port}")
        return result, used

    def stream(self, each: int = 2) -> None:
        result, used = self._run(connections=STREAMS, each=each, tokens=TOKENS, stream=True)
        self.tokens_rate.append(result.tokens / used)
        self.wall_tokens_rate.append(result.tokens / result.seconds)
        self.token_ms.append(percentiles(result.delays))

    def whole(self, each: int = 150) -> None:
        result, used = self._run(connections=16, each=each, tokens=4, stream=False)
        self.requests_rate.append(result.requests / used)

    def one_by_one(self, each: int = 300) -> None:
        """Measures a request's latency without other load."""
        result, _ = self._run(connections=1, each=each, tokens=4, stream=False)
        self.request_ms.append(percentiles(result.wholes))


@contextlib.contextmanager
def started(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a server that answers GET /health on ``port``; shows its output if it does not."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(
                        f"{command} doesn't serve: {log.read()[-2000:].decode(errors='replace')}"
                    )
                time.sleep(0.1)
            yield process
        finally:
            process.kill()
            process.wait()


def engine_command(port: int, step_ms: float, *more: str) -> list[str]:
    return [*MODULE, "benchmarks.http.engine", "--port", str(port), "--step-ms", str(step_ms), *more]


def proxy_command(port: int, decode: int, prefill: int) -> list[str]:
    flags = f"--host 127.0.0.1 --port {port} --prefiller-hosts 127.0.0.1 --prefiller-ports {prefill} "
    flags += f"--decoder-hosts 127.0.0.1 --decoder-ports {decode}"
    return [*MODULE, "vllm_kvoffload.cli.main", "proxy", *flags.split()]


def router_command(port: int, decode: int) -> list[str] | None:
    """Returns None if vllm-router is not installed."""
    binary = os.environ.get(ROUTER_VARIABLE) or shutil.which("vllm-router")
    if binary is None:
        return None
    flags = f"--host 127.0.0.1 --port {port} --worker-urls http://127.0.0.1:{decode} --policy round_robin "
    flags += f"--log-level warning --prometheus-port {free_port()}"
    return [binary, *flags.split()]


def added(relay: Relay, direct: Relay, what: str) -> dict[str, float]:
    """Returns percentiles above the direct path's median, at least a microsecond so that ratios stay
    finite.

    Each is the median over the rounds, because other load on the core must not count.
    """
    base = median(one["p50"] for one in getattr(direct, what))
    own = {name: median(one[name] for one in getattr(relay, what)) for name in ("p50", "p99")}
    return {name: max(value - base, 1e-3) for name, value in own.items()}


def compare(proxy: Relay, direct: Relay, other: Relay, suffix: str) -> Iterator[Row]:
    """The rows against one other relay."""
    for name, what in (("tokens_per_s", "tokens_rate"), ("requests_per_s", "requests_rate")):
        own, theirs = median(getattr(proxy, what)), median(getattr(other, what))
        yield higher_is_better(f"proxy/{name}{suffix}", own, "/s", theirs)
    for name in ("token", "request"):
        own_ms, their_ms = added(proxy, direct, f"{name}_ms"), added(other, direct, f"{name}_ms")
        for percentile, value in own_ms.items():
            row = f"proxy/added_ms/{name}/{percentile}{suffix}"
            yield lower_is_better(row, value, "ms", their_ms[percentile])


def rendezvous(prefill: int, without: float) -> Iterator[Row]:
    """Measures whole answers including the rendezvous and prefill."""
    decode, port = free_port(), free_port()
    with (
        started(engine_command(decode, STEP_MS, "--rendezvous"), decode),
        started(proxy_command(port, decode, prefill), port) as process,
    ):
        relay = Relay(port, process.pid)
        for _ in range(ROUNDS):
            relay.whole(each=50)
        yield higher_is_better("proxy/rendezvous_per_s", median(relay.requests_rate), "/s", without)


def run() -> Iterator[Row]:
    """All rows; about two minutes."""
    decode, prefill = free_port(), free_port()
    ports = {"proxy": free_port(), "naive": free_port(), "router": free_port()}
    upstream = ["--upstream", f"http://127.0.0.1:{decode}"]
    commands: dict[str, list[str] | None] = {
        "proxy": proxy_command(ports["proxy"], decode, prefill),
        "naive": [*MODULE, "benchmarks.http.naive", "--port", str(ports["naive"]), *upstream],
        "router": router_command(ports["router"], decode),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(started(engine_command(decode, STEP_MS), decode))
        stack.enter_context(started(engine_command(prefill, STEP_MS), prefill))
        relays = {"direct": Relay(decode)}
        for name, command in commands.items():
            if command is None:
                print(
                    f"vllm-router: not on PATH nor in {ROUTER_VARIABLE}; its rows are left out",
                    file=sys.stderr,
                )
                continue
            process = stack.enter_context(started(command, ports[name]))
            relays[name] = Relay(ports[name], process.pid)
        for relay in relays.values():
            load(relay.port, connections=STREAMS, each=1, tokens=20, stream=True)
        for turn in range(ROUNDS):
            names = list(relays)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                relays[name].stream()
                relays[name].whole(each=30 if name == "naive" else 150)
                relays[name].one_by_one(each=100 if name == "naive" else 300)
        proxy, direct = relays["proxy"], relays["direct"]
        if "router" in relays:
            yield from compare(proxy, direct, relays["router"], "")
        yield from compare(proxy, direct, relays["naive"], "/naive")
        through, past = median(proxy.wall_tokens_rate), median(direct.wall_tokens_rate)
        yield higher_is_better("proxy/direct", through, "tok/s", past)
        yield from rendezvous(prefill, median(proxy.requests_rate))
