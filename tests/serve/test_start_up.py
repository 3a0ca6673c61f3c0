"""`vllm serve` with bad input, and after SIGKILL: one clear line, nothing left in shared memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.demo.processes import mapped_segments, session_and_descendants

START_DEADLINE_S = 240
EXIT_DEADLINE_S = 60
OFFLOAD = {"enabled": True, "topk_buffer_size": 256, "dram_size_per_dp_GB": 1}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("models") / "glm-tiny", MODELS["glm-tiny"])


def command(model: Path, offload: dict[str, Any], port: int, *options: str) -> list[str]:
    vllm = str(Path(sys.executable).with_name("vllm"))
    defaults = {
        "--max-model-len": "2048",
        "--max-num-seqs": "4",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--dtype": "float32",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--additional-config": json.dumps({"sparse_kv_offload_config": offload}),
    }
    defaults.update(zip(options[::2], options[1::2], strict=True))
    return [
        vllm,
        "serve",
        str(model),
        "--enforce-eager",
        *(word for pair in defaults.items() for word in pair),
    ]


@contextlib.contextmanager
def serving(words: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process group of its own, which is gone at the end."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the whole group, without vLLM's message queues, which no one then removes from /dev/shm."""
    mapped = mapped_segments(session_and_descendants(process.pid))
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(EXIT_DEADLINE_S)
    for path in mapped:
        if path.name.startswith(("psm_", "sem.mp-")):
            path.unlink(missing_ok=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    health = f"http://127.0.0.1:{port}/health"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the server ended with {process.returncode}:\n{log.read_text()[-3000:]}")
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(health, timeout=5),
        ):
            return
        time.sleep(0.5)
    pytest.fail(f"the server was not ready after {START_DEADLINE_S} s:\n{log.read_text()[-3000:]}")


def our_shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").glob("kvoffload*")}


def ask(port: int, model: Path) -> str:
    body = {"model": str(model), "prompt": "A hot pool keeps", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["text"])


REFUSALS = {
    "hot pool smaller than a choice": (
        {**OFFLOAD, "topk_buffer_size": 32},
        (),
        ("topk_buffer_size=32", "index_topk 64", "set it to 64"),
    ),
    "more host memory than the machine has": (
        {**OFFLOAD, "dram_size_per_dp_GB": 1 << 20},
        ("--kv-cache-memory-bytes", str(1 << 40)),
        ("dram_size_per_dp_GB", "bytes"),
    ),
    "too little device memory": (
        OFFLOAD,
        ("--kv-cache-memory-bytes", str(1 << 20)),
        ("kv_cache_memory_bytes=1048576", "Fix: raise"),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_ends_with_one_clear_line(case: str, model: Path, tmp_path: Path) -> None:
    offload, options, expected = REFUSALS[case]
    before, log = our_shared_memory(), tmp_path / "log"
    with serving(command(model, offload, free_port(), *options), log) as process:
        code = process.wait(START_DEADLINE_S)
    lines = log.read_text().splitlines()
    ours = [line for line in lines if line.startswith("vllm-kvoffload: ")]
    assert code not in (0, None)
    assert len(ours) == 1, lines[-20:]
    for words in expected:
        assert words in ours[0]
    assert not any("Traceback" in line for line in lines)
    assert our_shared_memory() == before


def test_nothing_is_left_after_sigkill_nor_after_sigterm(model: Path, tmp_path: Path) -> None:
    """The first server is killed; the second gives the same answer and ends with SIGTERM."""
    before, texts = our_shared_memory(), []
    for end in (kill, terminate):
        port, log = free_port(), tmp_path / f"log-{end.__name__}"
        with serving(command(model, OFFLOAD, port), log) as process:
            wait_ready(process, port, log)
            texts.append(ask(port, model))
            end(process)
            assert our_shared_memory() == before
    assert texts[0] == texts[1]
    assert texts[0]


def terminate(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, after which the whole group must end."""
    process.send_signal(signal.SIGTERM)
    process.wait(EXIT_DEADLINE_S)
    deadline = time.monotonic() + EXIT_DEADLINE_S
    while _group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _group_lives(process.pid)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
