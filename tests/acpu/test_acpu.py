"""The CPU twin's own C++ tests: built with its CMake option and run under sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a compiler"
    ),
]


def build(directory: Path, sanitize: str) -> Path:
    """Builds the twin with all warnings as errors and returns the test program."""
    options = ["-DCMAKE_BUILD_TYPE=Debug", "-DKVOFFLOAD_BUILD_MODULE=OFF", "-DKVOFFLOAD_BUILD_ACPU=ON"]
    options.append(f"-DKVOFFLOAD_SANITIZE={sanitize}")
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(directory), *options],
        ["cmake", "--build", str(directory), "--parallel", "2", "--target", "acpu_tests"],
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    return directory / "csrc" / "acpu" / "acpu_tests"


@pytest.mark.parametrize("sanitize", ["address,undefined"])
def test_twin(tmp_path: Path, sanitize: str) -> None:
    program = build(tmp_path, sanitize)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run([program], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 failures" in result.stdout
    # The harness itself must be able to fail: no test has this name.
    nothing = subprocess.run([program, "no such test"], env=environment, capture_output=True, check=False)
    assert nothing.returncode == 1
