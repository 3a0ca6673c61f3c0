"""The demo as a whole: its options, its exit status with a stand-in server, and (slow) the real thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm_kvoffload.demo import run
from vllm_kvoffload.demo.server import ServerOptions
from vllm_kvoffload.demo.workload import FULL, QUICK, steps

FAKE = Path(__file__).with_name("fake_server.py")


def test_options() -> None:
    options = run.parse_arguments([])
    assert (options.quick, options.keep_serving, options.port, options.work_dir) == (
        False,
        False,
        0,
        Path(".demo"),
    )
    options = run.parse_arguments(["--quick", "--keep-serving", "--port", "8000", "--work-dir", "x"])
    assert (options.quick, options.keep_serving, options.port, options.work_dir) == (
        True,
        True,
        8000,
        Path("x"),
    )


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--port", "x"], ["--fast"], ["extra"]])
def test_bad_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.parse_arguments(arguments)
    assert arguments[-1] in capsys.readouterr().err


@pytest.mark.parametrize("scale", [QUICK, FULL])
def test_workload_fits_and_makes_the_cache_forget(scale: type[FULL]) -> None:
    asked = steps(scale, str.split, " ".join)  # words stand in for tokens
    requests = {request.name: request for step in asked for request in step.requests}
    assert len(requests) == 6
    lengths = {name: len(r.prompt.split()) for name, r in requests.items() if isinstance(r.prompt, str)}
    assert lengths["long"] == scale.long_tokens
    assert lengths["pair-1"] == lengths["pair-2"] == scale.pair_tokens
    assert requests["pair-1"].prompt != requests["pair-2"].prompt
    assert str(requests["again"].prompt).startswith(str(requests["long"].prompt))
    assert max(lengths.values()) + scale.answer_tokens < scale.max_model_len
    assert sum(request.stream for request in requests.values()) == 4
    assert sum(isinstance(request.prompt, list) for request in requests.values()) == 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs the demo against the stand-in; the list takes options for the server with offload."""
    more: list[str] = []

    def command(options: ServerOptions) -> list[str]:
        extra = ["offload", *more] if options.offload is not None else []
        return [sys.executable, str(FAKE), str(options.port), *extra]

    monkeypatch.setattr(run, "command_line", command)
    monkeypatch.setattr(run, "_check_vllm", lambda: None)
    return more


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    (tmp_path / "glm").symlink_to(checkpoint)
    return tmp_path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    pytest.importorskip("torch")
    return run.build_checkpoint(tmp_path_factory.mktemp("checkpoint") / "glm", run.MODELS["glm"])


def demo(folder: Path, *arguments: str) -> int:
    return run.main(["--quick", "--work-dir", str(folder), *arguments])


def test_success(fake: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del fake
    handler = signal.getsignal(signal.SIGTERM)
    assert demo(folder) == 0
    shown = capsys.readouterr().out
    assert "OK: 6 answers" in shown
    assert "1,000" in shown
    assert "4,000 (4.0x)" in shown
    assert json.loads((folder / "report.json").read_text())["failures"] == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_one_different_token_fails(fake: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake.append("different")
    assert demo(folder) == 1
    assert "tokens differ from number 16 on" in capsys.readouterr().out


def test_server_that_ends_is_a_failure_with_its_log(
    fake: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.append("dies")
    assert demo(folder) == 1
    shown = capsys.readouterr().out
    assert "exit status 7" in shown
    assert "fake server with dies offload" in shown


def test_server_that_must_be_killed_is_a_failure(
    fake: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "STOP_GRACE_S", 0.5)
    fake.append("stubborn")
    assert demo(folder) == 1
    assert "still there" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_server(
    fake: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[run.Server] = []

    class Spy(run.Server):
        def wait_ready(self, *_: object) -> None:
            started.append(self)
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            time.sleep(30.0)

    del fake
    monkeypatch.setattr(run, "Server", Spy)
    # A test run started in the background ignores SIGINT, and Python then leaves it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert demo(folder) == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
    assert not Path(f"/proc/{started[0].pid}").exists()


def test_keep_serving_until_ctrl_c(
    fake: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del fake
    checks: list[int] = []

    class Patient(run.Server):
        def check_alive(self) -> None:
            super().check_alive()
            shown = capsys.readouterr().out
            if "Ctrl-C ends it" in shown:
                checks.append(self.port)
                assert f"curl http://127.0.0.1:{self.port}/v1/completions" in shown
                assert "4,000 (4.0x)" in shown
                raise KeyboardInterrupt

    monkeypatch.setattr(run, "Server", Patient)
    assert demo(folder, "--keep-serving") == 0
    assert len(checks) == 1


@pytest.mark.slow
def test_the_real_demo(folder: Path) -> None:
    pytest.importorskip("vllm")
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "vllm_kvoffload.cli.main", "demo", "--quick", "--work-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all equal with and without offload" in result.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["comparison"]["tokens"] == 6 * QUICK.answer_tokens
    assert report["with_offload"]["offload"]["misses"] > 0
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvoffload-")}
    assert not left
