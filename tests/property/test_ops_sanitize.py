"""The core built apart from Python, fuzzed for a moment: under sanitizers, and for aarch64 in an emulator."""

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


CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = next(filter(shutil.which, ("qemu-aarch64", "qemu-aarch64-static")), "qemu-aarch64")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not all(map(shutil.which, ("cmake", CROSS_COMPILER, EMULATOR))),
    reason=f"needs cmake, {CROSS_COMPILER} and {EMULATOR}",
)
def test_neon_writes_the_same_bytes(tmp_path: Path) -> None:
    options = ["-DKVOFFLOAD_BUILD_MODULE=OFF", "-DKVOFFLOAD_BUILD_FUZZ=ON", "-DCMAKE_BUILD_TYPE=Release"]
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    compiler = f"-DCMAKE_CXX_COMPILER={CROSS_COMPILER}"
    root = SCRIPT.parents[1]
    for command in (
        ["cmake", "-S", str(root), "-B", str(tmp_path), *options, *target, compiler],
        ["cmake", "--build", str(tmp_path), "--parallel", "2"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    command = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(tmp_path / "ops_fuzz"), "300"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "neon: 300 rounds" in result.stdout
