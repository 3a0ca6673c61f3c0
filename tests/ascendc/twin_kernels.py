"""The AscendC kernels on the CPU twin, called with torch tensors; and the library they come from."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "kernels-twin"
SCHEDULES = ("eager", "lazy", "lazy_reverse")
IN, IN_OUT, OUT = 0, 1, 2
LINE = 64
UB_BYTES = 192 * 1024
REPORT_INTS = 8
TEXT_BYTES = 1 << 20
WORK = ("scalar_reads", "scalar_writes", "vectors", "copies", "copied_bytes", "flags")


class RefusedError(Exception):
    """The tiling's refusal."""


class Argument(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("use", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    ]


@dataclass
class Ran:
    """Reports of the twin, the synchronisation sites the run called (``key -> names of the calls``), and the
    estimated cost."""

    reports: list[str]
    sites: dict[str, set[str]] = field(default_factory=dict)
    phases: list[int] = field(
        default_factory=list
    )  # cycles between two SyncAll calls, by the twin's cost model
    work: dict[str, int] = field(default_factory=dict)  # of all cores


def build() -> Path:
    """Builds the library unless it is up to date; ``KVOFFLOAD_KERNELS_TWIN`` names one built elsewhere."""
    given = os.environ.get("KVOFFLOAD_KERNELS_TWIN")
    if given:
        return Path(given)
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVOFFLOAD_BUILD_ACPU=ON", "-DKVOFFLOAD_BUILD_MODULE=OFF"]
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), *generator, *options]
    compile_ = ["cmake", "--build", str(BUILD), "--target", "kvoffload_kernels_twin", "-j", "2"]
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:  # tests of another folder may build it too, in another process
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, compile_):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return BUILD / "tests" / "ascendc" / "libkvoffload_kernels_twin.so"


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins on a line, as the device allocator's memory does."""
    size = tensor.numel() * tensor.element_size()
    raw = torch.empty(size + LINE, dtype=torch.uint8)
    start = -raw.data_ptr() % LINE
    copy = raw[start : start + size].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    return copy


class Kernels:
    """The library's functions. ``drop`` names one synchronisation site whose effect is taken away."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def tile(self, op: str, shape: tuple[int, ...], cores: int) -> dict[str, int]:
        text = ctypes.create_string_buffer(TEXT_BYTES)
        code = self._library.kernels_tile(
            op.encode(), (ctypes.c_int64 * len(shape))(*shape), len(shape), cores, text, TEXT_BYTES
        )
        if code == 2:
            raise RefusedError(text.value.decode())
        assert code == 0, code
        return {name: int(value) for name, value in map(str.split, text.value.decode().splitlines())}

    def run(
        self,
        op: str,
        args: list[tuple[str, torch.Tensor | None, int]],
        shape: tuple[int, ...],
        cores: int,
        schedule: str,
        drop: str = "",
        ub_bytes: int = UB_BYTES,
    ) -> Ran:
        packed = (Argument * len(args))()
        for i, (name, tensor, use) in enumerate(args):
            if tensor is None or tensor.numel() == 0:
                packed[i] = Argument(None, 0, use, name.encode())
                continue
            assert tensor.data_ptr() % LINE == 0, name
            packed[i] = Argument(
                tensor.data_ptr(), tensor.numel() * tensor.element_size(), use, name.encode()
            )
        text = ctypes.create_string_buffer(TEXT_BYTES)
        code = self._library.kernels_run(
            op.encode(),
            packed,
            len(args),
            (ctypes.c_int64 * len(shape))(*shape),
            len(shape),
            cores,
            SCHEDULES.index(schedule),
            ub_bytes,
            drop.encode(),
            text,
            TEXT_BYTES,
        )
        if code == 2:
            raise RefusedError(text.value.decode())
        assert code == 0, code
        return parse(text.value.decode())


def parse(text: str) -> Ran:
    ran = Ran([])
    for line in text.splitlines():
        if line.startswith("R "):
            ran.reports.append(line[2:])
        elif line.startswith("C "):
            ran.phases.append(int(line[2:]))
        elif line.startswith("W "):
            ran.work = dict(zip(WORK, map(int, line[2:].split()), strict=True))
        else:
            _, key, api, _ = line.rsplit(" ", 3)
            ran.sites.setdefault(key, set()).add(api)
    return ran


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
