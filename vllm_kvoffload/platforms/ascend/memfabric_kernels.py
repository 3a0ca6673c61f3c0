"""MemFabric's copy kernels: a library that its packages lack until it is built on the machine.

Without it MemFabric can be imported, but `offload.initialize` returns -1. Releases from 1.2.1 on hold its
source and an empty file in its place, and load it from there; 1.2.0 holds neither and loads it from a folder
that a variable names. Does not import MemFabric.
"""

from __future__ import annotations

import os
import re
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from vllm_kvoffload.settings.errors import ConfigError

PACKAGE = "memfabric_hybrid"
LIBRARY = "libmf_hybm_accoffload.so"
EXTEND = "MEMFABRIC_HYBRID_EXTEND_LIB_PATH"
SELF_BUILT = (1, 2, 1)
"""First release with `mfcli`, which builds the library."""
UPGRADE = "pip install --no-deps memfabric-hybrid==1.3.0 memcache-hybrid==1.3.0"
BUILD = (
    "mfcli kernel install, on the A3 machine itself with CANN, torch and torch_npu, by a user that may write "
    "to the package's folder (it builds nothing for A2)"
)


def find_kernels(folder: Path | None, release: tuple[int, ...], extend: str) -> Path | None:
    """Returns the built library, None if there is none.

    folder: of the package, None if it is not installed. extend: value of the variable, "" if not set.
    """
    if release < SELF_BUILT:
        folder = Path(extend) if extend else None
        path = folder / LIBRARY if folder is not None else None
    else:
        path = folder / "lib" / LIBRARY if folder is not None else None
    return path if path is not None and path.is_file() and path.stat().st_size else None


def how_to_build(release: tuple[int, ...]) -> str:
    """What to do where the library is missing."""
    if release < SELF_BUILT:
        return (
            f"{UPGRADE}, whose kernels can be built: {BUILD}; or export {EXTEND}, if it was built from source"
        )
    return BUILD


def kernels_problem() -> ConfigError | None:
    """Why the installed MemFabric can't be the host pool's memory, None if its library is there."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None  # a source build, of which nothing is known
    release = tuple(map(int, re.findall(r"\d+", version)[:3]))
    spec = find_spec(PACKAGE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if find_kernels(folder, release, os.environ.get(EXTEND, "")) is not None:
        return None
    rule = f"its copy kernels ({LIBRARY}) are not built: offload.initialize would return -1"
    if device_type() == "A2":
        rule = f"{rule}; there are none for A2"
        fix = "let decode run on A3; on A2 an engine can prefill, or do both parts itself"
        return ConfigError(PACKAGE, version, rule, fix)
    return ConfigError(PACKAGE, version, rule, f"run {how_to_build(release)}")


def device_type() -> str:
    """The kind of NPU that vllm-ascend was built for, such as "A2" or "A3"; "" if it does not say."""
    try:
        return str(getattr(import_module("vllm_ascend._build_info"), "__device_type__", ""))
    except ImportError:
        return ""
