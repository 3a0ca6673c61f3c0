"""The emulator's environment, if it has been made: `make emulator`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / "build" / "emulator" / "venv"
ROUNDS = 20  # of streams_child.py


def environment() -> Path:
    """Its Python. Skips the test if there is none."""
    python = VENV / "bin" / "python"
    if not (VENV / "npu_emulator" / "operators.so").exists():
        pytest.skip("no emulated NPU: `make emulator` makes its environment in build/emulator")
    return python


def child(
    python: Path, script: str, *arguments: str, timeout_s: float = 250, **settings: str
) -> subprocess.CompletedProcess[str]:
    """One process in the environment."""
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VLLM_PLUGINS")}
    return subprocess.run(
        [str(python), str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
        env={
            **environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            **settings,
        },
    )
