"""A MetaService for tests, started as a user does, with the settings that its clients need."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TextIO

from tests.hostsim import lock_redirection, memfabric_libraries
from vllm_kvoffload.store.memcache_conf import (
    LOCAL_FILE,
    LOCAL_VARIABLE,
    META_FILE,
    META_VARIABLE,
    Cluster,
    Endpoint,
    render,
)

READY_S = 60.0
LOCK = Path(tempfile.gettempdir()) / f"kvoffload-hostsim-{os.getuid()}.lock"
LOCK_S = 400.0
GONE_S = 10.0


def tcp_environ() -> dict[str, str]:
    """Settings of host_tcp: its library's location, and small buffers that are allocated quickly."""
    return {
        "LD_LIBRARY_PATH": str(memfabric_libraries()),
        "HCOM_RECV_DATA_SIZE": "66560",
        "HCOM_MAX_SLICE_SIZE": "65536",
        "MF_HYBM_RDMA_SWAP_SPACE_SIZE": "64",
    }


def _segments() -> set[Path]:
    """MemFabric's files in shared memory."""
    return set(Path("/dev/shm").glob("memfabric_hybrid_*"))


def _machine_wide_lock() -> TextIO:
    """A locked file, once no other process has it."""
    lock = open(LOCK, "w", encoding="utf-8")  # noqa: SIM115  # held as long as it is open
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise TimeoutError(f"{LOCK} was not to be had within {LOCK_S:g} s") from None
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Returns ports that are currently free."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [made.getsockname()[1] for made in sockets]
    for made in sockets:
        made.close()
    return ports


class MetaCluster:
    """One MetaService and the files of its cluster, in a folder. Runs within a `with` block.

    Clients go by fixed names in /dev/shm, so that one cluster at a time can be on a machine: others wait.
    """

    def __init__(self, folder: Path, *, protocol: str = "host_shm", dram_size: str = "8MB") -> None:
        self.folder = self.folder_of_lock = folder
        meta, store, metrics = (Endpoint("127.0.0.1", port) for port in free_ports(3))
        self.meta = meta
        cluster = Cluster(meta=meta, config_store=store, metrics=metrics, world_size=16, protocol=protocol,
                          dram_size=dram_size)  # fmt: skip
        for name, text in render(cluster).items():
            (folder / name).write_text(text, encoding="utf-8")
        self._transport = tcp_environ() if protocol == "host_tcp" else {}
        self._process: subprocess.Popen[str] | None = None
        self._lock: TextIO | None = None
        self._there_before: set[Path] = set()

    def __enter__(self) -> MetaCluster:
        self._lock = _machine_wide_lock()
        self._there_before = _segments()
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.kill()
        for path in _segments() - self._there_before:  # of clients that were killed
            path.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()

    @property
    def environ(self) -> dict[str, str]:
        """Of the MetaService and of clients."""
        return self._transport | {
            META_VARIABLE: str(self.folder / META_FILE),
            LOCAL_VARIABLE: str(self.folder / LOCAL_FILE),
            "TMPDIR": str(self.folder_of_lock),
            "PYTHONHASHSEED": "0",
        }

    def start(self) -> None:
        """Returns once it is ready. Raises RuntimeError with its output if it ends instead."""
        assert self._process is None or self._process.poll() is not None, "it runs"
        environ = os.environ | self.environ | {"LD_PRELOAD": str(lock_redirection())}
        command = [sys.executable, "-m", "vllm_kvoffload.cli.main", "meta"]
        self._process = subprocess.Popen(
            command, env=environ, cwd=self.folder, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        watchdog = threading.Timer(READY_S, self.kill)
        watchdog.start()
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "MetaService ready" in line:
                watchdog.cancel()
                threading.Thread(target=self._process.stdout.read, daemon=True).start()
                return
        watchdog.cancel()
        raise RuntimeError(f"kvoffload meta ended with {self._process.wait()}: {''.join(said)}")

    def share_lock_with(self, other: MetaCluster) -> None:
        """As two services do that nothing is preloaded into."""
        self.folder_of_lock = other.folder_of_lock

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """To its process."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Ends it at once. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(GONE_S)

    def wait_until_free(self) -> None:
        """Until its ports can be had again."""
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            try:
                socket.create_server((self.meta.host, self.meta.port)).close()
                return
            except OSError:
                time.sleep(0.05)
