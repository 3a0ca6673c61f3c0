"""`kvoffload demo --ascend` on the emulated NPU: engines and proxy as a user starts them, by `vllm serve`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.emulator_env import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def demo(python: Path, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What it printed, and its report."""
    command = [str(python), "-m", "vllm_kvoffload.cli.main", "demo", "--ascend", "--quick", *options]
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--work-dir", str(folder)],
        capture_output=True, text=True, check=False, timeout=850, env={**environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout, json.loads((folder / "report.json").read_text())


def test_prefill_with_a_store_and_decode(tmp_path: Path) -> None:
    """Prefill through shared buffers with the local store, decode over MemFabric, and the proxy: the tokens
    of an engine without the offload."""
    printed, report = demo(environment(), tmp_path)
    assert "emulated" in printed
    assert report["failures"] == []
    assert report["comparison"]["tokens"] == 48
    together = report["with_offload"]
    assert together["sources"]["external_kv_transfer"] > 1000
    assert together["offload"]["misses"] > 0
    assert together["store"]["again"]["store_hit_tokens"] >= 256
