"""`kvoffload build-ops` with a stand-in for CMake, as CANN is not here; and what it made is found."""

from __future__ import annotations

import shutil
import stat
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from vllm_kvoffload.cli import operators as command
from vllm_kvoffload.cli.main import app
from vllm_kvoffload.platforms.ascend import operators

ROOT = Path(__file__).resolve().parents[2]
CMAKE = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*arguments, file=log)
if arguments[0] == "--build":
    if {code}:
        sys.exit({code})
    (pathlib.Path(arguments[1]) / "libkvoffload_ascend.so").write_text("built")
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An NPU host with everything that the build needs; the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/cann")
    monkeypatch.delenv(operators.KERNELS_ENV, raising=False)
    monkeypatch.setattr(command, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setattr(command, "device_type", lambda: "A3")
    make_cmake(tmp_path, monkeypatch)
    operators.source_digest.cache_clear()
    yield tmp_path / "cache"
    operators.source_digest.cache_clear()


def make_cmake(folder: Path, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    (folder / "bin").mkdir(exist_ok=True)
    path = folder / "bin" / "cmake"
    path.write_text(CMAKE.format(python=sys.executable, log=str(folder / "log"), code=code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder / "bin"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["build-ops", *arguments])
    return result.exit_code, result.output


def test_it_is_built_and_found(cache: Path) -> None:
    assert operators.library_path() == ""
    code, output = run("--jobs", "3")
    assert code == 0, output
    found = Path(operators.library_path())
    assert found.is_relative_to(cache)
    assert found.read_text() == "built"
    assert f"built {found}" in output
    configure, build = (cache.parent / "log").read_text().splitlines()
    assert f"-S {ROOT / 'csrc' / 'ascendc'} " in configure
    assert "-DKVOFFLOAD_SOC=ascend910_93" in configure
    assert f"-DPython3_EXECUTABLE={sys.executable}" in configure
    assert build.endswith("--parallel 3")
    assert sorted(path.name for path in found.parent.iterdir()) == [operators.LIBRARY]


def test_the_variable_comes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run()[0] == 0
    assert Path(operators.library_path()).is_relative_to(cache)
    monkeypatch.setenv(operators.KERNELS_ENV, "/opt/ops.so")
    assert operators.library_path() == "/opt/ops.so"


def test_a_library_of_another_source_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade of the package."""
    package = tmp_path / "site" / "vllm_kvoffload"
    for part in operators.PARTS:
        shutil.copytree(ROOT / "csrc" / part, package / "csrc" / part)
    monkeypatch.setattr(operators, "PACKAGE", package)
    assert run("--soc", "ascend910b")[0] == 0
    found = Path(operators.library_path())
    assert found.parent.parent == package  # for every user of the machine
    (package / "csrc" / "policies" / "policies.h").write_text("// changed")
    operators.source_digest.cache_clear()
    assert operators.library_path() == ""
    assert not cache.exists()


def test_a_package_that_this_user_may_not_write_to(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "vllm_kvoffload"
    for part in operators.PARTS:
        shutil.copytree(ROOT / "csrc" / part, package / "csrc" / part)
    monkeypatch.setattr(operators, "PACKAGE", package)
    allowed = command.os.access
    monkeypatch.setattr(
        command.os,
        "access",
        lambda path, mode: not Path(path).is_relative_to(package) and allowed(path, mode),
    )
    assert run()[0] == 0
    assert Path(operators.library_path()).is_relative_to(cache)


def test_another_folder(cache: Path, tmp_path: Path) -> None:
    code, output = run("--out", str(tmp_path / "here"))
    assert code == 0
    assert f"export KVOFFLOAD_ASCEND_OPS={tmp_path / 'here' / operators.LIBRARY}" in output
    assert operators.library_path() == ""
    assert not cache.exists()


def test_what_is_missing_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--soc='ascend310': must be ascend910b or ascend910_93" in run("--soc", "ascend310")[1]
    monkeypatch.setattr(command, "device_type", lambda: "")
    assert "--soc=None: must be" in run()[1]
    monkeypatch.setattr(command, "device_type", lambda: "A2")
    make_cmake(tmp_path, monkeypatch, code=2)
    code, output = run()
    assert code == 1
    assert "cmake --build ended with 2" in output
    (tmp_path / "bin" / "cmake").unlink()
    assert "cmake='not found'" in run()[1]
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "torch_npu" else SimpleNamespace())
    assert "torch_npu='not installed'" in run()[1]
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert "ASCEND_HOME_PATH=None: the build needs CANN" in run()[1]
    monkeypatch.setattr(command, "source_folder", lambda: None)
    assert "this installation has no csrc/ascendc" in run()[1]
    assert operators.library_path() == ""
    assert not (cache / "vllm-kvoffload").exists() or not any(cache.rglob("*.so"))


def test_the_source_is_in_the_wheel(tmp_path: Path) -> None:
    """All of it: every file that a file of it includes."""
    sys.path.insert(0, str(Path(__file__).parent))
    from test_packaging import build_python_part

    wheel = build_python_part("build_wheel", ROOT, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        f"vllm_kvoffload/csrc/{path.relative_to(ROOT / 'csrc').as_posix()}"
        for part in operators.PARTS
        for path in (ROOT / "csrc" / part).rglob("*")
        if path.is_file()
    }
    assert {name for name in names if name.startswith("vllm_kvoffload/csrc/")} == expected
    assert "vllm_kvoffload/csrc/ascendc/CMakeLists.txt" in expected
    assert "vllm_kvoffload/csrc/policies/policies.h" in expected
