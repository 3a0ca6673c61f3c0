"""The core under address, undefined-behaviour and thread sanitizers: a build and a short fuzz run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "sanitize.sh"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_core_is_clean(tmp_path: Path, sanitizer: str) -> None:
    environment = os.environ | {"BUILD_DIR": str(tmp_path), "SANITIZERS": sanitizer}
    command = ["sh", str(SCRIPT), "60"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "portable: 60 rounds on 2 threads" in result.stdout
