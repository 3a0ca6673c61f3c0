"""Starts the emulator when a program imports torch_npu, and puts in what has no kernel on a CPU.

``install`` is called from a .pth file at the start of every process of the environment, so it imports nothing
but the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

LIBRARIES = Path(sys.prefix) / "npu_emulator"
DEFAULTS = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch_npu is imported by those who want it
    "TASK_QUEUE_ENABLE": "0",  # calls reach the streams in the order of the program
}


def load_cann() -> None:
    """Loads the emulated CANN libraries: the dynamic loader then finds them by their names."""
    for path in sorted(LIBRARIES.glob("lib*.so")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def start_device(module: types.ModuleType) -> None:
    """After torch_npu has been imported: its operators run on the CPU."""
    import torch

    from npu_emulator import device

    torch.version.cann = "9.1.0"  # type: ignore[attr-defined]  # there is no CANN that could be asked
    device.install(module)


def pretend_torchvision(_: types.ModuleType) -> None:
    """Text models import it in passing, and its wheels don't fit a CPU build of torch."""
    from transformers.utils.import_utils import is_torchvision_available

    if is_torchvision_available() or "torchvision" in sys.modules:
        return
    parent: types.ModuleType | None = None
    for name in ("torchvision", "transforms", "v2", "functional"):
        made = types.ModuleType(name if parent is None else f"{parent.__name__}.{name}")
        made.__path__ = []
        sys.modules[made.__name__] = made
        if parent is not None:
            setattr(parent, name, made)
        parent = made


def replace_triton(module: types.ModuleType) -> None:
    """Triton kernels in plain code."""
    from npu_emulator import triton_kernels

    triton_kernels.replace(module)


BEFORE: dict[str, Callable[[], None]] = {"torch_npu": load_cann}
AFTER: dict[str, Callable[[types.ModuleType], None]] = {
    "torch_npu": start_device,
    "transformers.utils": pretend_torchvision,
    "vllm.v1.worker.block_table": replace_triton,
}


class _Loader(Loader):
    """The real loader, with something to do before and after it."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        if spec.name in BEFORE:
            BEFORE[spec.name]()
        return self._real.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._real.exec_module(module)
        AFTER[module.__name__](module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


class _Finder(MetaPathFinder):
    """Finds the modules of AFTER, by the other finders."""

    def __init__(self) -> None:
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AFTER or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Does nothing with NPU_EMULATOR=0, or before the libraries are built."""
    if os.environ.get("NPU_EMULATOR") == "0" or not (LIBRARIES / "operators.so").exists():
        return
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
