"""Stub CANN libraries, so that torch_npu can be imported on a machine without CANN.

    python cann_stub.py TORCH_LIB_FOLDER TORCH_NPU_FOLDER TARGET_FOLDER

They define every otherwise missing symbol that torch_npu requires: functions that return 0, and data of
zeros. There are no devices: `torch.npu.is_available()` is False. Needs nm and readelf (binutils) and a C
compiler.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Calls for which the answer 0 would claim too much. Others may succeed: no test gets that far.
SPECIAL = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 0; return 0; }",
    "aclInit": "int aclInit(const char *path) { (void)path; return 507000; }",
}
# C++ type information and vtables are data; their size is irrelevant as they are never used.
DATA = re.compile(r"_ZT[VIST]")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def symbols(library: Path, kind: str) -> dict[str, str]:
    """Names without their versions, and nm's letter for each. kind: "defined" or "undefined"."""
    command = ["nm", "-D", f"--{kind}-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (line.split()[-2:] for line in listed.splitlines() if len(line.split()) >= 2)
    return {name.split("@")[0]: letter for letter, name in found}


def needed(library: Path) -> set[str]:
    """Names of the libraries that a library wants loaded."""
    listed = subprocess.run(
        ["readelf", "-d", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", listed))


def system_libraries() -> dict[str, Path]:
    """Libraries found by the loader itself."""
    command = ["/sbin/ldconfig", "-p"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = re.findall(r"^\s+(\S+) \(.*\) => (\S+)$", listed, re.MULTILINE)
    return {name: Path(path) for name, path in reversed(pairs)}


def make_stubs(torch_lib: Path, torch_npu: Path, target: Path) -> tuple[list[str], int]:
    """Builds the libraries. Returns their names and how many symbols there are."""
    target.mkdir(parents=True, exist_ok=True)
    wanting = [*torch_npu.glob("_C*.so"), *(torch_npu / "lib").glob("*.so")]
    shipped = {
        path.name: path
        for folder in (torch_lib, torch_npu / "lib", torch_npu.parent / "torch_npu.libs")
        for path in folder.glob("*.so*")
    }
    wanted = set().union(*map(needed, wanting))
    system = system_libraries()
    missing = sorted(name for name in wanted if name not in shipped and name not in system)
    providers = [*shipped.values(), *(system[name] for name in wanted if name in system)]
    defined = set().union(*(symbols(path, "defined") for path in providers))
    undefined = {
        name for path in wanting for name, letter in symbols(path, "undefined").items() if letter == "U"
    }
    absent = sorted(name for name in undefined - defined if not name.startswith(("Py", "_Py")))
    lines = []
    for name in filter(IDENTIFIER.fullmatch, absent):
        plain = f"char {name}[512];" if DATA.match(name) else f"long {name}(void) {{ return 0; }}"
        lines.append(SPECIAL.get(name, plain))
    (target / "cann.c").write_text("\n".join(lines) + "\n")
    (target / "none.c").write_text("int kvoffload_cann_stub;\n")
    compiler = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin"]
    for number, name in enumerate(missing):  # one has them all: the loader looks in every one
        source = target / ("none.c" if number else "cann.c")
        subprocess.run([*compiler, f"-Wl,-soname,{name}", "-o", str(target / name), str(source)], check=True)
    return missing, len(lines)


if __name__ == "__main__":
    print(*make_stubs(*map(Path, sys.argv[1:4])))
