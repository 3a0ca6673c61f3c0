"""Real processes: prefill, decode and `kvoffload proxy`. Relay and hop, between them, are threads in here."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests import import_path
from tests.faults.fault_client import Client, new_prompt
from tests.faults.fault_hop import HOST as HOP_HOST
from tests.faults.fault_hop import Hop
from tests.faults.fault_relay import Relay
from vllm_kvoffload.demo.client import read_metrics
from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import (
    HOST,
    Server,
    ServerError,
    ServerOptions,
    command_line,
    free_port,
    free_ports,
)

LEASE_S = 3.0
REQUEST_S = 25.0
READY_S = 240.0
QUIET_S = 60.0
DEADLINE_S = 60.0
"""By then everything must be as it was."""
MAX_SEQS = 8
MAX_MODEL_LEN = 2048
PREFILL_MODEL_LEN = 1920
"""Prefill takes shorter prompts than decode, so that it can refuse one."""
BLOCKS = 80
BLOCK_TOKENS = 64
CHUNK_TOKENS = 256
NAMES = ("prefill", "decode", "proxy")
SECOND = "second"
"""Another prefill server, for a while."""
ADMIN_TOKEN = "faults"


@dataclass(frozen=True)
class Kind:
    """How a process is started, if not as the matrix has it.

    patch: Python that it runs first. transfer: of an engine, makes another `--kv-transfer-config` of the one
    it would have. environment, flags: more of them.
    """

    patch: str = ""
    transfer: Callable[[dict[str, Any]], dict[str, Any]] = dict
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


PLAIN = Kind()


def transfer_config(role: str, port: int) -> dict[str, Any]:
    extra = {"transfer_backend": "nixl", "use_layerwise": True, "lease_s": LEASE_S, "request_s": REQUEST_S}
    fields = {"kv_connector": "SfaRemoteD2HConnector", "kv_role": role, "kv_port": port}
    return {**fields, "kv_connector_extra_config": extra}


def proxy_port() -> int:
    """Free at the proxy's address and the hop's."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind((HOP_HOST, port))
            except OSError:
                continue
            return port


def metrics(port: int, timeout_s: float = 30.0) -> dict[str, float]:
    """Sums of all samples of each series."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics", headers={"Connection": "close"})
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    sums: Counter[str] = Counter()
    for line in lines:
        if line and not line.startswith("#"):
            name, value = re.split(r"[{ ]", line, maxsplit=1)[0], float(line.rpartition(" ")[2])
            sums[name] += value  # type: ignore[assignment]
    return dict(sums)


class Census:
    """Threads and open files of a server's processes, by kind."""

    def __init__(self, pid: int) -> None:
        self.threads: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        sockets = _sockets()
        for process, name in session_and_descendants(pid).items():
            folder = Path(f"/proc/{process.pid}")
            for task in folder.glob("task/*"):
                self.threads[f"{name}/{_read(task / 'comm')}"] += 1
            for fd in folder.glob("fd/*"):
                try:
                    target = os.readlink(fd)
                except OSError:  # closed meanwhile
                    continue
                what = sockets.get(target) or re.sub(r"[0-9]+", "N", target)
                self.files[f"{name}/{what}"] += 1

    @property
    def counts(self) -> tuple[int, int]:
        """Threads and open files."""
        return self.threads.total(), self.files.total()

    def more_than(self, other: Census) -> str:
        """Returns the items that exceed the other snapshot."""
        threads, files = self.threads - other.threads, self.files - other.files
        return f"{self.counts} after {other.counts}, more: {dict(threads)} {dict(files)}"


def _sockets() -> dict[str, str]:
    """Describes a link like socket:[123] from /proc, with its numeric TCP state."""
    found = {}
    for kind, place in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("unix", 6)):
        for line in Path(f"/proc/net/{kind}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            state = fields[3] if kind.startswith("tcp") else ""
            found[f"socket:[{fields[place]}]"] = f"socket {kind} {state}".rstrip()
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "gone"


class Cluster:
    """The processes by name, and the relay and hop between them."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        ports = free_ports(4)
        self.ports = dict(zip(("prefill", "decode", SECOND), ports, strict=False), proxy=proxy_port())
        self.kv_port = ports[3]
        self.relay = Relay(self.kv_port)
        self.hop = Hop(self.ports["proxy"], self.relay.port)
        self.servers: dict[str, Server] = {}
        self.baseline: dict[str, Census] = {}
        self.reference_engine = "prefill"
        self.also_held: Callable[[], str] = str
        """Describes resources still held, "" for none."""
        self._kinds: dict[str, Kind] = {}
        self._running: dict[str, Kind] = {}
        self._starts = 0
        self._seed = 0
        self._references: dict[tuple[bytes, int], list[str]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        os.environ["VLLM_HOST_IP"] = HOST
        os.environ["OMP_NUM_THREADS"] = "1"  # two engines share few cores with the tests
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
        os.environ["KVOFFLOAD_PROXY_ADMIN_TOKEN"] = ADMIN_TOKEN
        self.relay.start()
        self._stack.callback(self.relay.stop)
        self._stack.enter_context(self.hop.serve())
        self._stack.callback(self._stop_all)
        for name in NAMES[:2]:
            self.start(name)
        for name in NAMES[:2]:
            self.servers[name].wait_ready(READY_S)
        self.start("proxy")
        self.wait_ready()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._stack.close()

    def _stop_all(self) -> None:
        self.go_on()
        for server in self.servers.values():
            server.stop(15)

    # ----------------------------------------------------------------------------------------- processes

    def start(self, name: str) -> None:
        """Starts a process, of the kind that it is to be, on the port that it always has."""
        self._starts += 1
        kind = self._running[name] = self._kinds.get(name, PLAIN)
        command = self._proxy() if name == "proxy" else self._engine(name, kind)
        environment = dict(kind.environment)
        if kind.patch:
            folder = self._folder / f"patch-{self._starts}"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(kind.patch, encoding="utf-8")
            environment["PYTHONPATH"] = import_path(folder)
        with patch.dict(os.environ, environment):
            log = self._folder / f"{name}-{self._starts}.log"
            self.servers[name] = Server(command, log, self.ports[name])

    @contextmanager
    def of_kind(self, **kinds: Kind) -> Iterator[None]:
        """Processes of another kind for a while; the next `heal` puts the right ones back."""
        before, kinds_before = dict(self.baseline), dict(self._kinds)
        self._kinds.update(kinds)
        try:
            self.heal()
            self.baseline.clear()
            yield
        finally:
            self._kinds = kinds_before
            # For other kinds keep the latest snapshot, with anything they started meanwhile.
            self.baseline = before | {n: seen for n, seen in self.baseline.items() if n not in kinds}

    def _engine(self, name: str, kind: Kind) -> list[str]:
        decode = name == "decode"
        options = ServerOptions(
            self._checkpoint,
            32 << 20,
            self.ports[name],
            {"topk_buffer_size": 128, "dram_size_per_dp_GB": 1} if decode else None,
            max_model_len=MAX_MODEL_LEN if decode else PREFILL_MODEL_LEN,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=CHUNK_TOKENS,
        )
        role = "kv_consumer" if decode else "kv_producer"
        transfer = kind.transfer(transfer_config(role, self.kv_port))
        more = ["--kv-transfer-config", json.dumps(transfer)]
        return [*command_line(options), *more, "--num-gpu-blocks-override", str(BLOCKS), *kind.flags]

    def _proxy(self) -> list[str]:
        flags = {
            "host": HOST,
            "port": self.ports["proxy"],
            "advertise-host": HOP_HOST,
            "prefiller-hosts": HOST,
            "prefiller-ports": self.ports["prefill"],
            "decoder-hosts": HOST,
            "decoder-ports": self.ports["decode"],
            "probe-interval": 1,
            "drain-timeout": 5,
        }
        command = [sys.executable, "-m", "vllm_kvoffload.cli.main", "proxy"]
        return command + [part for name, value in flags.items() for part in (f"--{name}", str(value))]

    @contextmanager
    def second_prefill(self, kind: Kind = PLAIN) -> Iterator[None]:
        """Another prefill server joins for a while."""
        baseline = dict(self.baseline)
        self.baseline.clear()  # the others have connections to it, and may keep a thread
        self._kinds[SECOND] = kind
        try:
            self.start(SECOND)
            self.servers[SECOND].wait_ready(READY_S)
            self.admin("add", SECOND)
            yield
        finally:
            self.admin("remove", SECOND)
            self.signal(SECOND, signal.SIGCONT)
            self.servers.pop(SECOND).stop(5)
            del self._kinds[SECOND]
            self.baseline = baseline

    def admin(self, action: str, name: str) -> None:
        """`add`, `drain` or `remove` of a prefill server, at the proxy."""
        body = {"role": "prefill", "host": HOST, "port": self.ports[name]}
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(HOST, self.ports["proxy"], timeout=30)
        try:
            connection.request("POST", f"/admin/instances/{action}", json.dumps(body), headers)
            assert connection.getresponse().status == 200, f"the proxy did not {action} {name}"
        finally:
            connection.close()

    def reset(self, name: str) -> bool:
        """Calls vLLM's endpoint that resets the prefix cache and the connectors; returns its verdict."""
        connection = http.client.HTTPConnection(HOST, self.ports[name], timeout=30)
        try:
            connection.request("POST", "/reset_prefix_cache?reset_external=true")
            answer = connection.getresponse()
            assert answer.status == 200, f"reset of {name}: {answer.status} {answer.read()[:300]!r}"
            return bool(json.loads(answer.read())["success"])
        finally:
            connection.close()

    def failures(self, reason: str) -> float:
        """Requests that decode failed to receive for that reason, so far."""
        samples = read_metrics(self.ports["decode"], 30.0).get("vllm:kvoffload_receives_failed_total", ())
        return sum(sample.value for sample in samples if sample.labels.get("reason") == reason)

    def signal(self, name: str, number: int) -> None:
        """To every process of a server."""
        for process in session_and_descendants(self.servers[name].pid):
            _kill(process.pid, number)

    def terminate(self, name: str) -> None:
        """As an operator does: one SIGTERM to the server's first process."""
        _kill(self.servers[name].pid, signal.SIGTERM)

    def reap(self, name: str, grace_s: float = 0.0) -> None:
        """Waits for a server to end, then kills what remains of it."""
        end = time.monotonic() + grace_s
        while session_and_descendants(self.servers[name].pid) and time.monotonic() < end:
            time.sleep(0.1)
        self.servers[name].stop(0.5)

    def go_on(self) -> None:
        """Nothing is stopped any more."""
        for name in self.servers:
            self.signal(name, signal.SIGCONT)

    def heal(self) -> None:
        """Restarts servers that died in an earlier failed fault, or that are of another kind than
        requested."""
        for name, server in list(self.servers.items()):
            try:
                server.check_alive()
                right = self._running[name] == self._kinds.get(name, PLAIN)
            except ServerError:
                right = False
            if not right:
                self.signal(name, signal.SIGKILL)
                self.reap(name)
                self.start(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        """All three answer, and the proxy would send requests to both engines."""
        for server in self.servers.values():
            server.wait_ready(READY_S)

    # ------------------------------------------------------------------------------------------ requests

    def prompt(self, length: int) -> list[int]:
        """One that was never used."""
        self._seed += 1
        return new_prompt(length, self._seed)

    def client(self, length: int, max_tokens: int = 8, to: str = "proxy", **more: Any) -> Client:
        return Client(self.ports[to], self.prompt(length), max_tokens, **more)

    def references(self, clients: list[Client]) -> dict[Client, list[str]]:
        """What an engine alone makes of the clients' prompts, with nothing of them in its cache: prefill, as
        an engine without offload; or decode, as one without a store, where prefill's has faults."""
        wanted = {(c.digest, c.max_tokens): c for c in clients}
        port = self.ports[self.reference_engine]
        asked = {
            key: Client(port, c.prompt, c.max_tokens, stream=False, cache_salt=uuid.uuid4().hex).start()
            for key, c in wanted.items()
            if key not in self._references and len(c.prompt) + c.max_tokens <= PREFILL_MODEL_LEN
        }
        for key, client in asked.items():
            assert client.join(90), "the reference hangs"
            assert client.complete, f"no reference: {client.error}"
            self._references[key] = client.tokens
        return {c: self._references.get((c.digest, c.max_tokens), []) for c in clients}

    # --------------------------------------------------------------------------------------- observables

    def busy(self) -> str:
        """Describes remaining holders of resources, "" for none."""
        for name in (name for name in self.servers if name != "proxy"):
            found = metrics(self.ports[name])
            for series in ("vllm:num_requests_running", "vllm:num_requests_waiting", *HELD):
                if found.get(series):
                    return f"{name}: {series} = {found[series]:g}"
        found = metrics(self.ports["proxy"])
        for series in PROXY_HELD:
            if found[series]:
                return f"proxy: {series} = {found[series]:g}"
        return self.also_held()

    def over_baseline(self) -> str:
        """Which process has more threads or open files than at the start, "" for none."""
        for name, before in self.baseline.items():
            now = Census(self.servers[name].pid)
            if any(a > b for a, b in zip(now.counts, before.counts, strict=True)):
                return f"{name}: {now.more_than(before)}"
        return ""

    def wait_quiet(self, seconds: float = QUIET_S) -> float:
        """Seconds until nothing is held, and threads and open files are back."""
        begin = time.monotonic()
        while problem := self.busy() or self.over_baseline():
            assert time.monotonic() - begin < seconds, f"after {seconds:g} s: {problem}"
            time.sleep(0.25)
        return time.monotonic() - begin

    def wait_released(self, name: str, seconds: float) -> float:
        """Seconds until an engine holds no KV block."""
        begin = time.monotonic()
        while metrics(self.ports[name])["vllm:kv_cache_usage_perc"]:
            assert time.monotonic() - begin < seconds, f"{name} holds blocks after {seconds:g} s"
            time.sleep(0.1)
        return time.monotonic() - begin

    def wait_held(self, name: str, seconds: float = 10.0) -> None:
        """Until an engine says that it holds KV blocks: it tells after its step."""
        end = time.monotonic() + seconds
        while not metrics(self.ports[name])["vllm:kv_cache_usage_perc"]:
            assert time.monotonic() < end, f"{name} never held blocks"
            time.sleep(0.05)

    def settle(self) -> None:
        """Takes the state as the one to come back to, once it has stopped changing."""
        self.baseline.clear()
        for name in ("prefill", "decode"):  # starts pyzmq's thread for large messages, if it isn't there
            large = self.client(100, to=name, kv_transfer_params={"large": "x" * 100_000}).start()
            assert large.join(DEADLINE_S)
        self.wait_quiet()
        same_since, last = time.monotonic(), {}
        while time.monotonic() - same_since < 5.0:
            now = {name: Census(server.pid) for name, server in self.servers.items()}
            if {n: c.counts for n, c in now.items()} != {n: c.counts for n, c in last.items()}:
                same_since = time.monotonic()
            last = now
            time.sleep(0.25)
        self.baseline = last


HELD = (
    "vllm:kv_cache_usage_perc",
    *(f"vllm:kvoffload_{name}" for name in ("live_rows", "open_transfers", "kept_requests", "receives")),
    "vllm:kvoffload_store_pinned_objects",
)
PROXY_HELD = ("kvoffload_proxy_requests_running", "kvoffload_proxy_instance_requests")


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
