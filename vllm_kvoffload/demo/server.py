"""One server of the demo, an engine or the proxy: its command line, start and guaranteed end.

The server runs in a session of its own, so that Ctrl-C reaches the demo only, which then ends the server in
order. `Server.stop` leaves neither a process nor a name in /dev/shm behind, and says if it had to help.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_kvoffload.demo.processes import Process, mapped_segments, session_and_descendants
from vllm_kvoffload.settings.connectors import REMOTE_D2H
from vllm_kvoffload.settings.connectors import STORE as STORE_CONNECTOR
from vllm_kvoffload.settings.offload import SECTION

HOST = "127.0.0.1"
MODEL_NAME = "kvoffload-demo"
TAIL_LINES = 25
_NOISE = ("nanobind: ", " - leaked ", " - ... skipped", "See https://nanobind")
_POLL_S = 0.1
_KILL_WAIT_S = 10.0
_SOCKET_PATH_BYTES = 60
"""Longest folder for vLLM's Unix sockets: with a UUID behind it, it must stay below 108 bytes."""


class ServerError(RuntimeError):
    """The server did not start, or ended by itself."""


@dataclass(frozen=True)
class ServerOptions:
    """Options of a served model.

    device_bytes: memory for KV. offload: `sparse_kv_offload_config` without its `enabled`, None for none.
    transfer: `--kv-transfer-config`, None for an engine that is neither prefill nor decode. port: of HOST.
    npu: serves on an NPU, in 16 bits and blocks of 128 tokens.
    """

    checkpoint: Path
    device_bytes: int
    port: int
    offload: Mapping[str, Any] | None = None
    transfer: Mapping[str, Any] | None = None
    max_model_len: int = 8192
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 1024
    npu: bool = False


def command_line(options: ServerOptions) -> list[str]:
    """The server's command, `vllm serve ...`, by this Python. The offload is one option of it."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(options.checkpoint)]
    settings: dict[str, object] = {
        "served-model-name": MODEL_NAME,
        "host": HOST,
        "port": options.port,
        "dtype": "bfloat16" if options.npu else "float32",
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_num_seqs,
        "max-num-batched-tokens": options.max_num_batched_tokens,
        "kv-cache-memory-bytes": options.device_bytes,
    }
    if options.npu:
        settings["block-size"] = 128
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    command += ["--enforce-eager", "--enable-prompt-tokens-details"]
    if options.offload is not None:
        section = {SECTION: {"enabled": True, **options.offload}}
        command += ["--additional-config", json.dumps(section)]
    if options.transfer is not None:
        command += ["--kv-transfer-config", json.dumps(options.transfer)]
    return command


def transfer_options(role: str, kv_port: int, backend: str = "nixl", **extra: Any) -> dict[str, Any]:
    """`ServerOptions.transfer` of a "kv_producer" (prefill) or "kv_consumer" (decode).

    kv_port: where decode's first rank listens. backend: "nixl", or "memfabric" on NPUs. extra: more keys of
    the connector.
    """
    return {
        "kv_connector": REMOTE_D2H,
        "kv_role": role,
        "kv_port": kv_port,
        "kv_connector_extra_config": {"transfer_backend": backend, **extra},
    }


def with_store(transfer: Mapping[str, Any], store: Mapping[str, Any]) -> dict[str, Any]:
    """`transfer` of a prefill engine whose layers also take turns in a few buffers, in front of a store.

    store: `kv_connector_extra_config` of the store's connector, without its `use_layerwise`.
    """
    role = transfer["kv_role"]
    behind = {
        "kv_connector": STORE_CONNECTOR,
        "kv_role": role,
        "kv_connector_extra_config": {"use_layerwise": True, **store},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": [dict(transfer), behind]},
    }


def proxy_command(port: int, prefill_ports: Sequence[int], decode_ports: Sequence[int]) -> list[str]:
    """The command of a proxy at `port`, in front of engines of HOST."""
    command = [sys.executable, "-m", "vllm_kvoffload.cli.main", "proxy", "--host", HOST, "--port", str(port)]
    for role, ports in (("prefiller", prefill_ports), ("decoder", decode_ports)):
        command += [f"--{role}-hosts", *[HOST] * len(ports), f"--{role}-ports", *map(str, ports)]
    return command


def environment(base: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """The server's environment: `base` without variables that would change the demo, and offline.

    `temporary` receives vLLM's sockets and scratch files.
    """
    unwanted = ("PROMETHEUS_MULTIPROC_DIR", "VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_RPC_BASE_PATH")
    kept = {name: value for name, value in base.items() if name not in unwanted}
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's default leaves one of two cores idle
        "OMP_WAIT_POLICY": "passive",  # spinning threads starve the offload's streams on few cores
        # one helper for log-probabilities would be compiled at the first request, for half a minute
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **kept,
        "VLLM_HOST_IP": HOST,  # the address by which prefill and decode find each other
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
    }


def free_port() -> int:
    """Returns a port of HOST that is currently free."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Returns `count` different free ports."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((HOST, 0))
        return [int(probe.getsockname()[1]) for probe in probes]


class Server:
    """A server process and all it starts.

    Args:
        command: absolute path of the program and its arguments. Start it from the main thread: the server
            gets a SIGTERM when the thread that started it ends.
        log: file that takes its output, replaced; its folder is the server's working directory.
        port: of HOST, where /health answers when it is ready.
    """

    def __init__(self, command: list[str], log: Path, port: int) -> None:
        self.log, self.port = log, port
        folder = log.parent / f"{log.stem}.tmp"
        self._temporary = folder
        if len(os.fsencode(folder)) > _SOCKET_PATH_BYTES:
            self._temporary = Path(tempfile.mkdtemp(prefix="kvoffload-demo-"))
        shutil.rmtree(folder, ignore_errors=True)  # of a demo that was killed
        self._temporary.mkdir(exist_ok=True)
        self._known: dict[Process, str] = {}
        self._segments: set[Path] = set()
        guard = [sys.executable, "-m", "vllm_kvoffload.demo.launch", str(os.getpid())]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                guard + command,
                cwd=log.parent,
                env=environment(os.environ, self._temporary),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Pid of the process, which leads its session."""
        return self._process.pid

    def check_alive(self) -> None:
        """Raises ServerError when the server has ended."""
        ended = self._ended()
        if ended is not None:
            raise ServerError(f"the server ended on its own, exit status {ended}")

    def wait_ready(self, deadline_s: float, on_wait: Callable[[], None] = lambda: None) -> None:
        """Returns when /health answers 200; calls `on_wait` a few times a second until then.

        Raises ServerError after `deadline_s`, or when the server ends.
        """
        end_s = time.monotonic() + deadline_s
        while not self._healthy():
            self.check_alive()
            if time.monotonic() >= end_s:
                raise ServerError(f"the server was not ready after {deadline_s:.0f} s")
            on_wait()
            time.sleep(_POLL_S)
        self._look()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log, without the lines that nanobind prints when a vLLM process ends."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        kept = [line for line in text.splitlines() if not line.startswith(_NOISE)]
        return "\n".join(kept[-lines:])

    def stop(self, grace_s: float) -> list[str]:
        """Ends the server: SIGTERM, then SIGKILL for processes left after `grace_s`. Idempotent.

        Returns problems, one line each; empty after a clean end. An interrupt meanwhile
        skips the grace.
        """
        if self._process.returncode is not None:
            return []
        self._look()
        problems = []
        try:
            died = self._ended()
            if died is not None:
                problems.append(f"it had ended before, exit status {died}")
            else:
                os.kill(self.pid, signal.SIGTERM)
            left = self._wait_gone(grace_s)
            if left:
                problems.append(f"still there after {grace_s:.0f} s, killed: {_names(left)}")
        finally:
            left = self._kill()
            status = self._process.wait() if not left else -1  # reaped last: until then the pid is ours
            leaked = [path for path in sorted(self._segments) if path.exists()]
            for path in leaked:
                path.unlink(missing_ok=True)
            shutil.rmtree(self._temporary, ignore_errors=True)
        if left:
            problems.append(f"could not be killed: {_names(left)}")
        elif status not in (0, -signal.SIGTERM) and not problems:
            problems.append(f"exit status {status}")
        if leaked:
            problems.append(f"left in shared memory, removed: {', '.join(map(str, leaked))}")
        return problems

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _ended(self) -> int | None:
        """Exit status (negative: signal) once the process has ended, without reaping it."""
        if self._process.returncode is not None:
            return self._process.returncode
        info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _look(self) -> dict[Process, str]:
        """Finds its live processes; remembers them and the shared memory they map."""
        alive = session_and_descendants(self.pid, self._known)
        self._known |= alive
        self._segments |= mapped_segments(alive)
        return alive

    def _wait_gone(self, deadline_s: float) -> dict[Process, str]:
        """Waits until no process is left; returns the survivors at the deadline."""
        end_s = time.monotonic() + deadline_s
        while alive := self._look():
            if time.monotonic() >= end_s:
                break
            time.sleep(_POLL_S)
        return alive

    def _kill(self) -> dict[Process, str]:
        end_s = time.monotonic() + _KILL_WAIT_S
        alive = self._look()
        while alive and time.monotonic() < end_s:
            for process in alive:
                try:
                    os.kill(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            alive = self._wait_gone(1.0)
        return alive


def _names(processes: Mapping[Process, str]) -> str:
    return ", ".join(f"{name} (pid {process.pid})" for process, name in processes.items())
