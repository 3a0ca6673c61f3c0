"""connectors/ and proxy/ stand at the repository's top and are parts of `vllm_kvoffload` in every install."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_PACKAGES = ("connectors", "proxy")
# Folders of the repository that would be top-level modules if the repository were on the import path.
GENERIC_NAMES = (*TOP_PACKAGES, "benchmarks", "csrc", "docs", "examples", "scripts", "tests")

# Run outside the repository: what a spawned process (as vLLM's workers are) imports, and from where.
PROBE = """
import importlib, importlib.util, json, multiprocessing, sys

def look(queue, names):
    queue.put({name: importlib.import_module(name).__file__ for name in names})

if __name__ == "__main__":
    names, generic = json.loads(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=look, args=(queue, names))
    child.start()
    found = queue.get(timeout=60)
    child.join(60)
    sys.path.pop(0)  # this script's own folder
    print(json.dumps([found, [name for name in generic if importlib.util.find_spec(name)]]))
"""


def build(hook: str, tree: Path, out: Path, **settings: str) -> Path:
    """Run a build hook as pip does, in `tree`; returns the archive it made in `out`."""
    code = (
        "import json, sys; from scikit_build_core import build\n"
        "hook, out, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])\n"
        "print('made ' + getattr(build, hook)(out, settings))"
    )
    command = [sys.executable, "-c", code, hook, str(out), json.dumps(settings)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.rsplit("made ", 1)[1].strip()


def build_python_part(hook: str, tree: Path, out: Path) -> Path:
    """Without CMake: the same file selection in a second instead of a minute."""
    return build(hook, tree, out, **{"wheel.cmake": "false"})


def sources() -> set[str]:
    """Archive names of all Python files of the package, from the real folders, links not followed."""
    files = {path for path in (ROOT / "vllm_kvoffload").rglob("*.py") if not path.is_symlink()}
    names = {path.relative_to(ROOT).as_posix() for path in files}
    names = {name for name in names if name.split("/")[1] not in TOP_PACKAGES}
    for top in TOP_PACKAGES:
        names |= {
            f"vllm_kvoffload/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / top).rglob("*.py")
        }
    return names


def python_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.endswith(".py")}


def fresh_environment(folder: Path) -> tuple[Path, Path]:
    """(Python, site-packages) of an empty environment that sees nothing of the one running the tests."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    return folder / "bin" / "python", next((folder / "lib").glob("python3*/site-packages"))


def probe(python: Path, folder: Path, names: list[str]) -> tuple[dict[str, str], list[str]]:
    """({module: file} in a spawned process, generic names that can be imported), run in another folder."""
    script = folder / "probe.py"
    script.write_text(PROBE)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), str(script), json.dumps([names, GENERIC_NAMES])]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, generic = json.loads(done.stdout)
    return found, generic


@pytest.mark.parametrize("name", TOP_PACKAGES)
def test_links_are_relative_and_lead_to_the_top_folder(name: str) -> None:
    link = ROOT / "vllm_kvoffload" / name
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name / "__init__.py").is_file()
    assert not (ROOT / name).is_symlink()


@pytest.mark.parametrize("name", TOP_PACKAGES)
def test_this_run_imports_the_top_folder(name: str) -> None:
    code = f"import vllm_kvoffload.{name} as package; print(package.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == ROOT / name / "__init__.py"


def test_wheel_holds_the_package_and_nothing_generic(tmp_path: Path) -> None:
    wheel = build_python_part("build_wheel", ROOT, tmp_path)
    assert python_files(wheel) == sources()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.split("/")[0] for name in names}
        assert all((info.external_attr >> 28) == 8 for info in archive.infolist()), "regular files only"
    assert tops == {"vllm_kvoffload", next(top for top in tops if top.endswith(".dist-info"))}
    assert "vllm_kvoffload/py.typed" in names
    assert "vllm_kvoffload/ops/_C.pyi" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_source_archive_keeps_links_and_gives_the_same_wheel(tmp_path: Path) -> None:
    archive = build_python_part("build_sdist", ROOT, tmp_path)
    with tarfile.open(archive) as tar:
        members = {member.name.split("/", 1)[1]: member for member in tar.getmembers() if "/" in member.name}
    shutil.unpack_archive(archive, tmp_path / "tree")
    for name in TOP_PACKAGES:
        assert members[f"vllm_kvoffload/{name}"].linkname == f"../{name}"
        assert f"{name}/__init__.py" in members
        assert f"vllm_kvoffload/{name}/__init__.py" not in members, "nothing twice"
    assert "CMakeLists.txt" in members
    assert any(name.startswith("csrc/cpu/") for name in members)
    (tree,) = (tmp_path / "tree").iterdir()
    assert python_files(build_python_part("build_wheel", tree, tmp_path)) == sources()


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    """A copy of how the repository is laid out and packaged, that a test may change."""
    tree = tmp_path / "repository"
    for name in ("vllm_kvoffload", "vllm_kvoffload/ops", *TOP_PACKAGES, "tests", "scripts"):
        (tree / name).mkdir(parents=True)
        (tree / name / "__init__.py").touch()
    for name in TOP_PACKAGES:
        (tree / "vllm_kvoffload" / name).symlink_to(f"../{name}")
    for name in ("pyproject.toml", "LICENSE"):
        (tree / name).write_bytes((ROOT / name).read_bytes())
    (tree / "README.md").touch()
    (tree / "vllm_kvoffload" / "py.typed").touch()
    (tree / "connectors" / "multi.py").touch()
    return tree


def test_editable_install_serves_spawned_processes_from_the_repository(
    small_tree: Path, tmp_path: Path
) -> None:
    wheel = build_python_part("build_editable", small_tree, tmp_path)
    python, site_packages = fresh_environment(tmp_path / "environment")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    # Written after the install: editing must not need another one.
    (small_tree / "connectors" / "later.py").touch()
    (small_tree / "proxy" / "new_package").mkdir()
    (small_tree / "proxy" / "new_package" / "__init__.py").touch()
    expected = {
        "vllm_kvoffload": "vllm_kvoffload/__init__.py",
        "vllm_kvoffload.ops": "vllm_kvoffload/ops/__init__.py",
        "vllm_kvoffload.connectors": "connectors/__init__.py",
        "vllm_kvoffload.connectors.multi": "connectors/multi.py",
        "vllm_kvoffload.connectors.later": "connectors/later.py",
        "vllm_kvoffload.proxy.new_package": "proxy/new_package/__init__.py",
    }
    found, generic = probe(python, tmp_path, list(expected))
    assert found == {name: str(small_tree / path) for name, path in expected.items()}
    assert generic == []


def test_probe_would_see_generic_names(small_tree: Path, tmp_path: Path) -> None:
    python, site_packages = fresh_environment(tmp_path / "environment")
    (site_packages / "repository.pth").write_text(f"{small_tree}\n")
    _, generic = probe(python, tmp_path, ["vllm_kvoffload"])
    assert set(generic) == {*TOP_PACKAGES, "scripts", "tests"}


def test_mypy_sees_both_packages_from_a_checkout(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}", str(program)]

    def check(module: str) -> subprocess.CompletedProcess[str]:
        program.write_text(f"import vllm_kvoffload.{module}\n")
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    for name in TOP_PACKAGES:
        assert check(name).returncode == 0, check(name).stdout
    assert check("not_there").returncode == 1


def test_pyproject_names_no_file_that_is_missing() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for key in ("readme", "license-files"):
        line = re.search(rf"^{key} = (.*)$", text, re.MULTILINE)
        assert line is not None
        for name in re.findall(r'"([^"]+)"', line.group(1)):
            assert (ROOT / name).is_file(), f"{key}: {name}"


@pytest.mark.slow
def test_wheel_from_source_archive_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    archive = build("build_sdist", ROOT, tmp_path)
    shutil.unpack_archive(archive, tmp_path / "tree")
    (tree,) = (tmp_path / "tree").iterdir()
    wheel = build("build_wheel", tree, tmp_path)
    python, site_packages = fresh_environment(tmp_path / "environment")
    with zipfile.ZipFile(wheel) as unpacked:
        unpacked.extractall(site_packages)
    # numpy, torch and msgspec come from the environment that runs the tests, behind our own copy.
    import torch

    (site_packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    names = ["vllm_kvoffload.ops._C", *(f"vllm_kvoffload.{name}" for name in TOP_PACKAGES)]
    found, generic = probe(python, tmp_path, names)
    assert all(Path(file).is_relative_to(site_packages) for file in found.values()), found
    assert generic == []
