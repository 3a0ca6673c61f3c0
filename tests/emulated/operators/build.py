"""Builds the library that KVOFFLOAD_ASCEND_OPS names on an emulated NPU.

Its binding is csrc/ascendc/torch, compiled against the real torch_npu's headers; its launches run the
kernels of csrc/ascendc on the CPU twin (launches.cpp).
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CSRC, EMULATOR, ASCENDC_TESTS = (
    ROOT / "csrc",
    ROOT / "tools" / "npu_emulator" / "csrc",
    ROOT / "tests" / "ascendc",
)
KERNELS = ("dsa_install", "dsa_plan", "dsa_serve", "dsa_serve_compact", "gather_selection", "host_write")
TWIN = ("core", "global_memory", "launch", "queue", "report")
LIBRARY = "libkvoffload_ascend.so"
WHERE = "import importlib.util as u; [print(u.find_spec(n).submodule_search_locations[0]) for n in {!r}]"


def digest(folders: tuple[Path, ...]) -> str:
    """Changes with any source file of the folders, and with the emulator's headers."""
    found = hashlib.sha256(b"".join((EMULATOR / name).read_bytes() for name in ("arena.h", "stream.h")))
    for path in sorted(
        p for folder in folders for p in folder.rglob("*") if p.suffix in (".h", ".cpp", ".asc")
    ):
        found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def compile_all(commands: list[list[str]]) -> None:
    """Two at a time. Raises RuntimeError with the compiler's messages."""

    def compile_one(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[-4000:]}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, commands))


def build(venv: Path) -> Path:
    """Returns the library's path; builds it unless it was built from these sources. venv: the emulator's."""
    folders = (CSRC / "ascendc", CSRC / "acpu", CSRC / "policies", HERE, ASCENDC_TESTS)
    target = ROOT / "build" / "emulator" / "operators" / digest(folders)
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / LIBRARY).exists():
            _build(venv, target)
    return target / LIBRARY


def _build(venv: Path, target: Path) -> None:
    python = venv / "bin" / "python"
    asked = subprocess.run(
        [str(python), "-c", WHERE.format(("torch", "torch_npu"))], capture_output=True, text=True, check=True
    )
    torch, torch_npu = map(Path, asked.stdout.split())
    emulator = venv / "npu_emulator"
    systems = (torch / "include", torch / "include/torch/csrc/api/include", torch_npu / "include")
    binding = [word for folder in systems for word in ("-isystem", str(folder))]
    stubs = ["-idirafter", str(ASCENDC_TESTS / "host_stubs")]  # of what torch_npu's headers don't have
    twin = [f"-I{CSRC / 'acpu' / 'include'}", f"-I{CSRC / 'acpu'}"]
    sources = {
        **{CSRC / "ascendc" / "torch" / f"{name}.cpp": [*binding, *stubs] for name in ("ops", "tensors")},
        HERE / "launches.cpp": [*twin, f"-I{EMULATOR}", *stubs],
        **{CSRC / "ascendc" / name / "op_kernel" / f"{name}.cpp": twin for name in KERNELS},
        **{CSRC / "acpu" / f"{name}.cpp": twin for name in TWIN},
    }
    objects = {source: target / f"{source.parent.name}_{source.stem}.o" for source in sources}
    compiler = ["g++", "-std=c++20", "-O2", "-fPIC", "-w", "-c"]
    compile_all([[*compiler, str(s), *options, "-o", str(objects[s])] for s, options in sources.items()])
    folders = (torch / "lib", torch_npu / "lib", emulator)
    link = ["g++", "-shared", *map(str, objects.values()), "-o", str(target / LIBRARY), "-pthread"]
    link += [f"-L{folder}" for folder in folders] + [f"-Wl,-rpath,{folder}" for folder in folders]
    link += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_npu", "-l:libnpu_emulator.so"]
    compile_all([[*link, "-Wl,--allow-shlib-undefined"]])
    for path in objects.values():
        path.unlink()
