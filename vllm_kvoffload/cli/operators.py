"""`kvoffload build-ops`: builds the AscendC operators on this machine, where engines then find them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from vllm_kvoffload.platforms.ascend.memfabric_kernels import device_type
from vllm_kvoffload.platforms.ascend.operators import LIBRARY, build_folders, source_folder
from vllm_kvoffload.settings.errors import ConfigError

SOCS = {"A2": "ascend910b", "A3": "ascend910_93"}
"""The names of CANN for the device types of vllm-ascend."""
CANN = "ASCEND_HOME_PATH"


def build_ops(
    *,
    soc: Annotated[
        str | None, typer.Option(help="ascend910b (A2) or ascend910_93 (A3). Default: vllm-ascend's.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the library. Default: where engines look for it.")
    ] = None,
) -> None:
    """Builds the AscendC operators, with CANN, torch and torch_npu of this machine."""
    try:
        path = build(soc, jobs, out)
    except ConfigError as error:
        typer.echo(f"kvoffload build-ops: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(f"built {path}")
    if out is not None:
        typer.echo(f"engines load it with: export KVOFFLOAD_ASCEND_OPS={path}")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("build-ops")(build_ops)


def build(soc: str | None, jobs: int, out: Path | None) -> Path:
    """Builds the library and returns its path. Raises ConfigError."""
    source = source_folder()
    if source is None:
        rule = "this installation has no csrc/ascendc"
        raise ConfigError("vllm-kvoffload", "no source", rule, "install it again from a whole source tree")
    chosen = chosen_soc(soc)
    check_tools()
    target = out if out is not None else writable_folder()
    with tempfile.TemporaryDirectory(prefix="kvoffload-ops-") as work:
        _cmake("-S", str(source / "ascendc"), "-B", work, f"-DKVOFFLOAD_SOC={chosen}",
               f"-DPython3_EXECUTABLE={sys.executable}")  # fmt: skip
        _cmake("--build", work, "--parallel", str(jobs))
        made = Path(work) / LIBRARY
        if not made.is_file():
            raise ConfigError("cmake", "no library", f"{LIBRARY} was not made", "see its output above")
        target.mkdir(parents=True, exist_ok=True)
        # Renamed within the folder, so that an engine that starts now finds all of it or nothing.
        part = target / f".{LIBRARY}.{os.getpid()}"
        shutil.copyfile(made, part)
        part.replace(target / LIBRARY)
    return target / LIBRARY


def chosen_soc(soc: str | None) -> str:
    """Returns CANN's name of the NPU. Raises ConfigError."""
    found = soc or SOCS.get(device_type(), "")
    if found not in SOCS.values():
        rule = f"must be {' or '.join(SOCS.values())}"
        raise ConfigError(
            "--soc", found or None, rule, "name this machine's: A2 is ascend910b, A3 ascend910_93"
        )
    return found


def check_tools() -> None:
    """Raises ConfigError if something is missing that the build needs."""
    if not os.environ.get(CANN):
        raise ConfigError(CANN, None, "the build needs CANN", "source <CANN>/set_env.sh first")
    for module in ("torch", "torch_npu"):
        if find_spec(module) is None:
            rule, fix = "the operators are built against it", "use the Python of vllm-ascend's image"
            raise ConfigError(module, "not installed", rule, fix)
    if shutil.which("cmake") is None:
        raise ConfigError("cmake", "not found", "the build needs it", "pip install cmake")


def writable_folder() -> Path:
    """Returns the first folder in which engines look and that this user may write to. Raises ConfigError."""
    folders = build_folders()
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    shown = ", ".join(map(str, folders))
    raise ConfigError("--out", None, f"this user may not write to {shown}", "name a folder with --out")


def _cmake(*arguments: str) -> None:
    ran = subprocess.run(["cmake", *arguments], check=False)
    if ran.returncode:
        rule = f"cmake {arguments[0]} ended with {ran.returncode}"
        raise ConfigError("cmake", arguments[0], rule, "see its output above, and docs/ascend-build.md")
