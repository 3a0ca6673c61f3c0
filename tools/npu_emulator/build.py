"""Builds the emulator's libraries: python build.py --target DIR, with the Python of the environment.

Every symbol that torch_npu requires and no library has becomes a stand-in: a function that fails with
"feature unsupported", except for those whose success claims nothing, and data of zeros.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
CORE = ("arena", "stream", "acl", "compiler", "hccl")
CORE_LIBRARY, STAND_INS = "libnpu_emulator.so", "libnpu_emulator_stand_ins.so"
WARNINGS = ("-Wall", "-Wextra", "-Werror")
UNSUPPORTED = 207000  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT: torch_npu does without some, and raises for others
HARMLESS = re.compile(
    r"Msprof|aclAppLog|aclFinalize|aclmdl\w*Dump|aclDestroy|aclopDestroy|rtDevBinary|rtFunction"
)
DATA = re.compile(r"_ZT[VIST]")  # C++ type information and vtables; nothing looks at their size
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def symbols(library: Path, kind: str) -> dict[str, str]:
    """Names without their versions, and nm's letter for each. kind: "defined" or "undefined"."""
    command = ["nm", "-D", f"--{kind}-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (line.split()[-2:] for line in listed.splitlines() if len(line.split()) >= 2)
    return {name.split("@")[0]: letter for letter, name in found}


def needed(library: Path) -> set[str]:
    """Names of the libraries that a library wants loaded."""
    command = ["readelf", "-d", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed))


def system_libraries() -> dict[str, Path]:
    """Libraries found by the loader itself."""
    command = ["/sbin/ldconfig", "-p"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", listed, re.MULTILINE)
    return {name: Path(path) for name, path in reversed(pairs)}


def package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"build: {name} isn't installed in this environment")
    return Path(spec.origin).parent


def compile_library(target: Path, sources: list[Path], *options: str) -> None:
    """One shared library. Raises SystemExit with the compiler's messages."""
    command = ["g++", "-std=c++17", "-O1", "-g1", "-fPIC", "-shared", *map(str, sources), *options]
    done = subprocess.run(
        [*command, f"-Wl,-soname,{target.name}", "-o", str(target), "-pthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"build: {target.name}:\n{done.stderr[-6000:]}")


def stand_ins(names: list[str]) -> str:
    """C++ source of the symbols."""
    lines = ['#include "trace.h"', 'extern "C" {']
    for name in names:
        if DATA.match(name):
            lines.append(f"char {name}[512];")
        elif HARMLESS.match(name):
            lines.append(f"long {name}() {{ return 0; }}")
        else:
            lines.append(f'long {name}() {{ return npu_emulator_unsupported("{name}", {UNSUPPORTED}); }}')
    return "\n".join([*lines, "}", ""])


def build_cann(torch: Path, torch_npu: Path, target: Path) -> int:
    """CANN's libraries. Returns the number of stand-ins."""
    include = ("-isystem", str(torch / "include"), "-isystem", str(torch_npu / "include"))
    core = [SOURCES / f"{name}.cpp" for name in CORE]
    compile_library(target / CORE_LIBRARY, core, *WARNINGS, *include)
    wanting = [*torch_npu.glob("_C*.so"), *(torch_npu / "lib").glob("*.so")]
    folders = (torch / "lib", torch_npu / "lib", torch_npu.parent / "torch_npu.libs")
    shipped = {path.name: path for folder in folders for path in folder.glob("*.so*")}
    wanted = set().union(*map(needed, wanting))
    system = system_libraries()
    missing = sorted(n for n in wanted if n not in shipped and n not in system)
    providers = [*shipped.values(), *(system[n] for n in wanted if n in system), target / CORE_LIBRARY]
    defined = set().union(*(symbols(path, "defined") for path in providers))
    undefined = {n for path in wanting for n, letter in symbols(path, "undefined").items() if letter == "U"}
    absent = sorted(
        n for n in undefined - defined if not n.startswith(("Py", "_Py")) and IDENTIFIER.fullmatch(n)
    )
    (target / "stand_ins.cpp").write_text(stand_ins(absent))
    compile_library(target / STAND_INS, [target / "stand_ins.cpp"], f"-I{SOURCES}", "-fno-builtin")
    # The loader and dlsym look into what a library depends on: CANN's names need nothing of their own.
    (target / "empty.cpp").write_text("extern const int npu_emulator_empty = 0;\n")
    both = (
        "-Wl,--no-as-needed",
        f"-L{target}",
        f"-l:{CORE_LIBRARY}",
        f"-l:{STAND_INS}",
        "-Wl,-rpath,$ORIGIN",
    )
    for name in missing:
        compile_library(target / name, [target / "empty.cpp"], *both)
    return len(absent)


def build_operators(torch: Path, torch_npu: Path, target: Path) -> None:
    """The library that runs operators of the device on the CPU."""
    include = [
        torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", torch_npu / "include",
        Path(sysconfig.get_paths()["include"]),
    ]  # fmt: skip
    folders = [torch / "lib", torch_npu / "lib", target]
    compile_library(
        target / "operators.so",
        [SOURCES / "operators.cpp"],
        "-std=c++20",
        *WARNINGS,
        *(word for folder in include for word in ("-isystem", str(folder))),
        *(f"-L{folder}" for folder in folders),
        *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_npu", f"-l:{CORE_LIBRARY}"),
        *(f"-Wl,-rpath,{folder}" for folder in folders),
        "-Wl,--allow-shlib-undefined",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    target: Path = parser.parse_args().target.resolve()
    target.mkdir(parents=True, exist_ok=True)
    torch, torch_npu = package("torch"), package("torch_npu")
    count = build_cann(torch, torch_npu, target)
    build_operators(torch, torch_npu, target)
    print(f"{target}: libraries with {count} stand-ins")


if __name__ == "__main__":
    main()
