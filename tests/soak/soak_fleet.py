"""The processes of a soak: joint prefill servers, a decode server with offload, and the proxy in front."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import (
    HOST,
    Server,
    ServerError,
    ServerOptions,
    command_line,
    free_ports,
    proxy_command,
    transfer_options,
    with_store,
)

LEASE_S = 5.0
REQUEST_S = 30.0
READY_S = 300.0
MAX_MODEL_LEN = 2048
BLOCKS = 80
"""KV blocks of each engine, 64 tokens each: less than the prompts of a soak need together."""
POOL_GB = 0.06
"""Of a prefill server's store, which fills within the first minutes."""
ADMIN_TOKEN = "soak"
OTHER_BLOCK_SIZE = ("--block-size", "128")
OTHER_DTYPE = ("--dtype", "bfloat16")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several engines share few cores with the load
    # oneDNN keeps 1,024 kernels, one for each number of rows and weight. Their turnover lets prefill's heap
    # creep by some percent for hours, which would hide a leak.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "KVOFFLOAD_PROXY_ADMIN_TOKEN": ADMIN_TOKEN,
}


@dataclass(eq=False)
class Life:
    """A process from one start to its end. label: name and number of the start. begun: time.monotonic()."""

    name: str
    label: str
    server: Server
    begun: float


class Fleet:
    """Servers by name: `prefill-0`, ..., `decode`, `proxy`; for a while also `stray`, which doesn't fit.

    Started from the main thread, as `Server` asks for. Each keeps its port through all its lives.
    """

    def __init__(self, checkpoint: Path, folder: Path, prefills: int = 2) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self.prefills = [f"prefill-{number}" for number in range(prefills)]
        self.names = [*self.prefills, "decode", "proxy"]
        ports = free_ports(len(self.names) + 2)
        self.ports = dict(zip([*self.names, "stray"], ports, strict=False))
        self.kv_port = ports[-1]
        self.lives: dict[str, Life] = {}
        self.expected_down: set[str] = set()
        self._starts = 0

    def start_all(self) -> None:
        """Starts everything, and waits until it serves."""
        for name in self.names:
            self.start(name)
        self.wait_ready(self.names)

    def start(self, name: str, more: Sequence[str] = ()) -> Life:
        """A process, on the port that it always has. more: flags."""
        self._starts += 1
        label = f"{name}.{self._starts}"
        command = [*(self._proxy() if name == "proxy" else self._engine(name)), *more]
        with patch.dict(os.environ, ENVIRONMENT):
            server = Server(command, self._folder / f"{label}.log", self.ports[name])
        self.lives[name] = Life(name, label, server, time.monotonic())
        self.expected_down.discard(name)
        return self.lives[name]

    def _engine(self, name: str) -> list[str]:
        decode = name == "decode"
        role = "kv_consumer" if decode else "kv_producer"
        transfer = transfer_options(role, self.kv_port, lease_s=LEASE_S, request_s=REQUEST_S)
        if not decode:
            store = {"backend": "local", "local_dram_size_GB": POOL_GB}
            buffers = {"layerwise_num_shared_buffers": 1, "layerwise_independent_layers": [0]}
            transfer = with_store(transfer, {**store, **buffers})
            transfer |= {"kv_connector": "KVOffloadMultiConnector", "kv_load_failure_policy": "recompute"}
        options = ServerOptions(
            self._checkpoint,
            32 << 20,
            self.ports[name],
            {"topk_buffer_size": 128, "dram_size_per_dp_GB": 1} if decode else None,
            transfer,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
        )
        return [*command_line(options), "--num-gpu-blocks-override", str(BLOCKS)]

    def _proxy(self) -> list[str]:
        prefills = [self.ports[name] for name in self.prefills]
        command = proxy_command(self.ports["proxy"], prefills, [self.ports["decode"]])
        return [*command, "--probe-interval", "1", "--drain-timeout", "5"]

    def plain(self) -> Server:
        """An engine alone, without offload and transfer: the oracle. Uses a prefill server's port."""
        options = ServerOptions(
            self._checkpoint,
            32 << 20,
            self.ports[self.prefills[0]],
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
        )
        with patch.dict(os.environ, ENVIRONMENT):
            return Server(command_line(options), self._folder / "plain.log", options.port)

    def signal(self, name: str, number: int) -> None:
        """To every process of a server."""
        for process in session_and_descendants(self.lives[name].server.pid):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue

    def kill(self, name: str) -> None:
        """Kills a whole server with SIGKILL and removes its remains."""
        self.expected_down.add(name)
        self.signal(name, signal.SIGKILL)
        self.lives[name].server.stop(0.5)

    def terminate(self, name: str, grace_s: float = 20.0) -> None:
        """As an operator does."""
        self.expected_down.add(name)
        self.lives[name].server.stop(grace_s)

    def forget(self, name: str) -> None:
        """A server that was ended and will not be back soon."""
        del self.lives[name]

    def died(self) -> list[str]:
        """Names of servers that have ended though they were not told to."""
        found = []
        for name, life in self.lives.items():
            try:
                life.server.check_alive()
            except ServerError:
                if name not in self.expected_down:
                    found.append(name)
        return found

    def healthy(self, name: str, timeout_s: float = 5.0) -> bool:
        """Whether /health answers 200."""
        return ask(self.ports[name], "GET", "/health", timeout_s=timeout_s)[0] == 200

    def wait_ready(self, names: Sequence[str], seconds: float = READY_S) -> None:
        """Until all of them answer, and the proxy would send requests. Raises ServerError."""
        for name in names:
            self.lives[name].server.wait_ready(seconds)

    def admin(self, action: str, name: str) -> tuple[int, bytes]:
        """`add`, `drain` or `remove` a prefill server at the proxy."""
        body = {"role": "prefill", "host": HOST, "port": self.ports[name]}
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        return ask(self.ports["proxy"], "POST", f"/admin/instances/{action}", body, headers)

    def stop(self) -> list[str]:
        """Ends everything. Returns problems found at the end, one line each."""
        problems = []
        for name in reversed(list(self.lives)):
            self.signal(name, signal.SIGCONT)
            problems += [f"{name}: {problem}" for problem in self.lives[name].server.stop(30.0)]
        return problems


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float = 30.0,
) -> tuple[int, bytes]:
    """Status and body of an HTTP request to this machine; status 0 where there was no answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
