"""The demo's server: whatever happens, it ends, with all it started, and says what was wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_kvoffload.demo import processes
from vllm_kvoffload.demo.server import (
    Server,
    ServerError,
    ServerOptions,
    command_line,
    environment,
    free_port,
)

FAKE = Path(__file__).with_name("fake_server.py")
START_S, GRACE_S = 60.0, 60.0

Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def make(*options: str) -> Server:
        port = free_port()
        servers.append(
            Server([sys.executable, str(FAKE), str(port), *options], tmp_path / "server.log", port)
        )
        return servers[-1]

    yield make
    for server in servers:
        server.stop(0.0)


def gone(pid: int, deadline_s: float = 30.0) -> bool:
    """Whether a process is, or becomes, a zombie or nothing."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_clean_life(start: Start, tmp_path: Path) -> None:
    waits: list[None] = []
    server = start()
    server.wait_ready(START_S, lambda: waits.append(None))
    server.check_alive()
    assert waits, "the fake can't be ready at the first look"
    assert "fake server with" in server.tail()
    assert server.stop(GRACE_S) == []
    assert gone(server.pid, 0.5)
    assert server.stop(GRACE_S) == []
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]


def test_never_ready(start: Start) -> None:
    server = start("slow")
    with pytest.raises(ServerError, match="not ready after 1 s"):
        server.wait_ready(0.9)


def test_early_end_is_noticed_at_once_and_is_no_clean_end(start: Start) -> None:
    server = start("dies")
    begin_s = time.monotonic()
    with pytest.raises(ServerError, match="exit status 7"):
        server.wait_ready(START_S)
    assert time.monotonic() - begin_s < START_S / 2
    assert server.stop(GRACE_S) == ["it had ended before, exit status 7"]


def test_stubborn_server_is_killed_and_named(start: Start) -> None:
    server = start("stubborn")
    server.wait_ready(START_S)
    (problem,) = server.stop(0.5)
    assert "still there" in problem
    assert str(server.pid) in problem
    assert gone(server.pid, 0.5)


def test_child_in_another_session_does_not_survive(start: Start, tmp_path: Path) -> None:
    server = start("children")
    server.wait_ready(START_S)
    child = int((tmp_path / f"child-{server.port}.pid").read_text())
    (problem,) = server.stop(1.0)
    assert f"pid {child}" in problem
    assert gone(child, 0.5)


def test_leaked_shared_memory_is_removed_and_named(start: Start) -> None:
    server = start("leaks")
    server.wait_ready(START_S)
    segment = Path(f"/dev/shm/kvoffload-test-{server.pid}")
    assert segment.exists()
    (problem,) = server.stop(GRACE_S)
    assert str(segment) in problem
    assert not segment.exists()


def test_interrupt_while_stopping_kills(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start("stubborn")
    server.wait_ready(START_S)

    def interrupted(_: float) -> dict[processes.Process, str]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_wait_gone", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.stop(GRACE_S)
    assert gone(server.pid, 0.5)


def test_server_ends_when_the_demo_is_killed(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "import os, sys; from pathlib import Path; from vllm_kvoffload.demo.server import Server\n"
        f"command = [sys.executable, {str(FAKE)!r}, '{port}']\n"
        f"server = Server(command, Path({str(tmp_path)!r}) / 'log', {port})\n"
        f"server.wait_ready({START_S}); print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    demo = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert demo.returncode == -signal.SIGKILL, demo.stderr
    assert gone(int(demo.stdout))


def test_launcher_does_not_outlive_a_parent_already_gone() -> None:
    command = [sys.executable, "-m", "vllm_kvoffload.demo.launch", "1", "/bin/echo", "started"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "started" not in result.stdout


def test_tail_leaves_nanobind_out(start: Start) -> None:
    server = start()
    server.wait_ready(START_S)
    server.log.write_text("reason\n" + "nanobind: leaked 3 types!\n - leaked type X\n" * 50)
    assert server.tail() == "reason"


def test_command_line_differs_by_the_offload_only() -> None:
    common = {"checkpoint": Path("model"), "device_bytes": 1 << 20, "port": 1234}
    without = command_line(ServerOptions(**common))  # type: ignore[arg-type]
    with_offload = command_line(ServerOptions(**common, offload={"topk_buffer_size": 512}))  # type: ignore[arg-type]
    assert with_offload[: len(without)] == without
    option, value = with_offload[len(without) :]
    assert option == "--additional-config"
    assert json.loads(value) == {"sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 512}}
    assert without[without.index("--kv-cache-memory-bytes") + 1] == str(1 << 20)


def test_environment_keeps_choices_and_drops_what_breaks_the_demo() -> None:
    base = {"PATH": "/bin", "OMP_WAIT_POLICY": "active", "VLLM_API_KEY": "x", "HF_HUB_OFFLINE": "0"}
    made = environment(base, Path("/t"))
    assert (made["PATH"], made["OMP_WAIT_POLICY"], made["TMPDIR"]) == ("/bin", "active", "/t")
    assert made["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_API_KEY" not in made


def test_processes_of_this_session() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = processes.session_and_descendants(os.getpid())
        assert {os.getpid(), child.pid} <= {process.pid for process in found}
        (known,) = (process for process in found if process.pid == child.pid)
    finally:
        child.kill()
    child.wait()
    assert known not in processes.session_and_descendants(os.getpid(), [known])
