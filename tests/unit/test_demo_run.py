"""The demo as a whole: its options, its exit status with a stand-in server, and (slow) the real thing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_kvoffload.demo import deployment, run
from vllm_kvoffload.demo.server import Server, ServerOptions
from vllm_kvoffload.demo.workload import FULL, QUICK, steps

FAKE = Path(__file__).with_name("fake_server.py")


def test_options() -> None:
    assert vars(run.parse_arguments([])) == {
        "no_store": False, "aggregated": False, "ascend": False, "quick": False, "keep_serving": False,
        "port": 0, "work_dir": Path(".demo"),
    }  # fmt: skip
    given = ["--aggregated", "--quick", "--keep-serving", "--port", "8000", "--work-dir", "x"]
    assert vars(run.parse_arguments(given)) == {
        "no_store": False, "aggregated": True, "ascend": False, "quick": True, "keep_serving": True,
        "port": 8000, "work_dir": Path("x"),
    }  # fmt: skip
    assert run.parse_arguments(["--no-store"]).no_store


@pytest.mark.parametrize(
    "arguments", [["--port", "99999"], ["--port", "x"], ["--fast"], ["extra"], ["--no-store", "--aggregated"]]
)
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


Options = dict[str, list[str]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Runs the demo against stand-ins; the dict takes options for those of a kind."""
    more: Options = {"alone": [], "with offload": [], "prefill": [], "decode": [], "proxy": []}

    def command(port: int, kind: str, *extra: str) -> list[str]:
        return [sys.executable, str(FAKE), str(port), *extra, *more[kind]]

    def engine(options: ServerOptions) -> list[str]:
        if options.transfer is None:
            kind = "alone" if options.offload is None else "with offload"
        else:
            kind = {"kv_producer": "prefill", "kv_consumer": "decode"}[options.transfer["kv_role"]]
        extra = [] if options.offload is None else ["offload"]
        if "AscendStoreConnector" in str(options.transfer):
            extra.append("stores")
        return command(options.port, kind, *extra)

    monkeypatch.setattr(deployment, "command_line", engine)
    monkeypatch.setattr(deployment, "proxy_command", lambda port, *_: command(port, "proxy"))
    monkeypatch.setattr(run, "_check_environment", lambda _: None)
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


@pytest.mark.parametrize("arguments", [[], ["--no-store"], ["--aggregated"]], ids=str)
def test_success(
    fake: Options, folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    del fake
    handler = signal.getsignal(signal.SIGTERM)
    assert demo(folder, *arguments) == 0
    shown = capsys.readouterr().out
    assert "OK: 6 answers" in shown
    assert "1,000" in shown
    assert "4,000 (4.0x)" in shown
    assert ("prompt tokens pulled from prefill" in shown) == (arguments != ["--aggregated"])
    said = "prefill loaded 100 tokens, 1.0 MiB from its store"
    assert (said in shown) == ("KV tokens that fit, for prefill" in shown) == (not arguments)
    assert json.loads((folder / "report.json").read_text())["failures"] == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_requests_go_to_the_proxy(fake: Options, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests go only to the proxy: the engines themselves would give a wrong answer."""
    fake["prefill"].append("different")
    fake["decode"].append("different")
    assert demo(folder) == 0
    fake["proxy"].append("different")
    assert demo(folder) == 1
    assert "tokens differ from number 16 on" in capsys.readouterr().out


def test_one_different_token_fails(fake: Options, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake["with offload"].append("different")
    assert demo(folder, "--aggregated") == 1
    assert "tokens differ from number 16 on" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["alone", "prefill", "decode", "proxy"])
def test_server_that_ends_is_a_failure_with_its_log(
    fake: Options, folder: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    fake[kind].append("dies")
    assert demo(folder) == 1
    shown = capsys.readouterr().out
    assert "exit status 7" in shown
    assert shown.count("--- end of") == 1, "the others have nothing to do with it"
    assert "fake server with dies" in shown
    assert ("alone:" in shown) is False
    assert kind == "alone" or f"{kind}: the server ended on its own" in shown


def test_a_refused_request_shows_all_logs(
    fake: Options, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake["proxy"].append("refuses")
    assert demo(folder) == 1
    shown = capsys.readouterr().out
    assert "HTTP status 503" in shown
    for name in ("prefill", "decode", "proxy"):
        assert f"{name}.log ---" in shown


def test_server_that_must_be_killed_is_a_failure(
    fake: Options, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "STOP_GRACE_S", 0.5)
    fake["decode"].append("stubborn")
    assert demo(folder) == 1
    assert "prefill + decode: decode: still there" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_servers(
    fake: Options, folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[Server] = []

    class Spy(Server):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)

        def wait_ready(self, deadline_s: float, on_wait: Callable[[], None] = lambda: None) -> None:
            if len(started) < 4:  # the server without offload
                return super().wait_ready(deadline_s, on_wait)
            threading.Timer(0.5, os.kill, (os.getpid(), number)).start()
            time.sleep(30.0)
            return None

    del fake
    monkeypatch.setattr(deployment, "Server", Spy)
    # A test run started in the background ignores SIGINT, and Python then leaves it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert demo(folder) == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 4
    assert not any(Path(f"/proc/{server.pid}").exists() for server in started)


def test_keep_serving_until_ctrl_c(
    fake: Options, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del fake
    checks: list[int] = []

    class Patient(deployment.Deployment):
        def check_alive(self) -> None:
            super().check_alive()
            shown = capsys.readouterr().out
            if "Ctrl-C ends it" in shown:
                checks.append(self.port)
                assert f"curl http://127.0.0.1:{self.port}/v1/completions" in shown
                assert f"curl -s http://127.0.0.1:{self.metrics_port}/metrics" in shown
                assert self.port != self.metrics_port
                assert "4,000 (4.0x)" in shown
                raise KeyboardInterrupt

    monkeypatch.setattr(deployment, "Deployment", Patient)
    assert demo(folder, "--keep-serving") == 0
    assert len(checks) == 1


@pytest.mark.slow
def test_the_real_demo(folder: Path) -> None:
    pytest.importorskip("vllm")
    before = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "vllm_kvoffload.cli.main", "demo", "--quick", "--work-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all equal from one server and from prefill with a store and decode with offload" in result.stdout
    assert re.search(
        r"question: done in .*; prefill loaded [\d,]+ tokens, [\d.]+ MiB from its store", result.stdout
    )
    report = json.loads((folder / "report.json").read_text())
    assert report["comparison"]["tokens"] == 6 * QUICK.answer_tokens
    assert report["with_offload"]["offload"]["misses"] > 0
    assert report["with_offload"]["sources"]["external_kv_transfer"] > 5000
    again = report["with_offload"]["answers"]["again"]
    assert again["cached_tokens"] == QUICK.long_tokens // 64 * 64, "all of the long prompt's whole blocks"
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvoffload-")}
    assert not left
