"""Real MemFabric and MemCache without an NPU: stand-ins for the CANN libraries that they load.

The wheels of memfabric_hybrid and memcache_hybrid import anywhere, but nothing starts without CANN.
`activate` builds five small libraries from cann.c and loads them under the names of CANN's; functions that
MemFabric looks up and cann.c lacks fail with a message. Everything else is the real code: metadata,
allocation, eviction, leases, messages. The bytes are moved by the stand-ins' memcpy: real control plane,
stand-in copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "hostsim"
LIBRARIES = ("libascend_hal", "libra", "libtsdclient", "libhccl")
ASCENDCL = "libascendcl"
PACKAGES = ("memfabric_hybrid", "memcache_hybrid")

_SOURCES = ("cann.c", "gate.cpp", "lock.c", "__init__.py")
# How the functions of CANN's libraries are named. They are looked up by name, all at the start, so MemFabric
# has their names among its texts, and doesn't start if one is missing.
_NAME = re.compile(rb"\0((?:acl|rt|hal|ra_|drv|devmm_|svm_|g_devmm_|Hccl|Hcomm|Tsd)[A-Za-z0-9_]+)(?=\0)")
_loaded: list[ctypes.CDLL] = []


def missing() -> str:
    """Why real MemCache can't run here, "" if it can."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent:
        return f"packages {', '.join(absent)} are not installed (pip install '.[store]')"
    compilers = [name for name in ("cc", "c++") if shutil.which(name) is None]
    return f"no {' and no '.join(compilers)} to build the stand-ins of CANN with" if compilers else ""


def build() -> Path:
    """The folder with the libraries, built at the first call for these sources."""
    inputs = [*((HERE / name).read_bytes() for name in _SOURCES), _memfabric().read_bytes()]
    digest = hashlib.sha256(b"".join(inputs)).hexdigest()[:16]
    folder = CACHE / digest
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _build_in(folder)
            (folder / "done").touch()
    return folder


def _build_in(folder: Path) -> None:
    libraries = folder / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    (folder / "absent.c").write_text(_absent_functions())
    flags = ["-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    _run("cc", *flags, "-c", str(HERE / "cann.c"), "-o", str(folder / "cann.o"))
    _run("cc", *flags, "-c", str(folder / "absent.c"), "-o", str(folder / "absent.o"))
    for name in (ASCENDCL, *LIBRARIES):
        # The loader uses this inner name: a request for CANN's library gets the one already loaded.
        names = [f"-Wl,-soname,{name}.so", "-o", str(libraries / f"{name}.so")]
        _run("cc", "-shared", *names, str(folder / "cann.o"), str(folder / "absent.o"))
    gate = ["-std=c++17", "-shared", "-o", str(libraries / "libgate.so"), str(HERE / "gate.cpp")]
    _run("c++", *flags, *gate)
    _run("cc", *flags, "-shared", "-o", str(libraries / "liblock.so"), str(HERE / "lock.c"), "-ldl")


def lock_redirection() -> Path:
    """Library to preload into a MetaService, so that its lock file is in $TMPDIR."""
    return build() / "lib64" / "liblock.so"


def memfabric_libraries() -> Path:
    """The folder of MemFabric's own libraries."""
    spec = find_spec("memfabric_hybrid")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def _memfabric() -> Path:
    return memfabric_libraries() / "libmf_hybm_core.so"


def _absent_functions() -> str:
    """C source of the names that are looked up but not stood in for."""
    defined = set(re.findall(r"^\S.*?(\w+)\(", (HERE / "cann.c").read_text(), re.MULTILINE))
    wanted = sorted({name.decode() for name in _NAME.findall(_memfabric().read_bytes())})
    lines = ["#include <stdio.h>"]
    for name in wanted:
        if name.startswith("g_"):
            lines.append(f"int {name} = -1;")
        elif name not in defined:
            message = f'fprintf(stderr, "hostsim: {name} needs real hardware\\n")'
            lines.append(f"long {name}(void);\nlong {name}(void) {{ {message}; return -1; }}")
    return "\n".join(lines) + "\n"


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


def activate() -> None:
    """Loads the stand-ins into this process, before it imports memfabric_hybrid. Idempotent."""
    if _loaded:
        return
    folder = build()
    os.environ["ASCEND_HOME_PATH"] = str(folder)  # where MemFabric looks for lib64/libascendcl.so
    _loaded.append(ctypes.CDLL(str(folder / "lib64" / "libgate.so"), mode=ctypes.RTLD_GLOBAL))
    _loaded.extend(ctypes.CDLL(str(folder / "lib64" / f"{name}.so")) for name in LIBRARIES)
