"""The package index, for tests of what can be installed: plain pip, nothing installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 540
AARCH64 = (
    "--platform=manylinux_2_28_aarch64",
    "--platform=manylinux_2_17_aarch64",
    "--platform=manylinux2014_aarch64",
    "--only-binary=:all:",
)


def pip(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs pip in the repository, with one try for each index."""
    settings = {"PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "15", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")}
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        cwd=ROOT,
        env={**clean, **settings, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@cache
def unreachable() -> str:
    """Why nothing can be fetched from the package index, "" if it answers."""
    ran = pip("install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "memfabric-hybrid")
    return "" if ran.returncode == 0 else f"the package index can't be reached: {ran.stderr.strip()[-200:]}"


def require_index() -> None:
    """Skips the test, naming the reason, where the package index can't be reached."""
    if unreachable():
        pytest.skip(unreachable())


def resolve(report: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `pip install` of these arguments would install: metadata by lower-case name.

    Raises AssertionError with pip's words if it can't be resolved.
    """
    ran = pip("install", "-q", "--dry-run", "--ignore-installed", "--report", str(report), *arguments)
    assert ran.returncode == 0, f"pip install {' '.join(arguments)}:\n{ran.stderr[-3000:]}"
    found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {metadata["name"].lower().replace("_", "-"): metadata for metadata in found}


def download(requirement: str, folder: Path, *options: str, **environ: str) -> list[Path]:
    """A wheel from the index; skips the test if the index has none for this machine."""
    require_index()
    chosen = options or ("--only-binary=:all:",)
    ran = pip("download", "-q", "--no-deps", *chosen, "-d", str(folder), requirement, **environ)
    if ran.returncode:
        pytest.skip(f"the package index has no {requirement} for this machine: {ran.stderr.strip()[-200:]}")
    return list(folder.iterdir())


def download_source(requirement: str, folder: Path) -> list[Path]:
    """vllm-ascend's source archive; for its metadata pip runs its set-up, which builds nothing so."""
    tools = folder / "tools"
    wanted = ("setuptools", "setuptools-scm", "wheel")
    ran = pip("install", "-q", "--no-compile", "--target", str(tools), *wanted)
    if ran.returncode:
        pytest.skip(f"the package index has no setuptools: {ran.stderr.strip()[-200:]}")
    name = requirement.partition("==")[0]
    options = ("--no-build-isolation", f"--no-binary={name}")
    settings = {"PYTHONPATH": str(tools), "SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}
    return download(requirement, folder / "files", *options, **settings)


def unpack(requirement: str, folder: Path) -> Path:
    """A wheel from the index, unpacked; skips the test if the index has none for this machine."""
    for wheel in download(requirement, folder / "files"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    return folder / "site"
