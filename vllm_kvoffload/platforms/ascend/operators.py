"""The library of AscendC operators: its source, where it is built, and which one an engine loads.

`kvoffload build-ops` builds it from the source in the package into a folder named after that source, where
engines find it; one of another version of this package is therefore never loaded. Imports neither torch nor
vLLM.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

KERNELS_ENV = "KVOFFLOAD_ASCEND_OPS"
"""Path of a library that is loaded instead of the one that `kvoffload build-ops` made."""
LIBRARY = "libkvoffload_ascend.so"
BUILD = "run kvoffload build-ops (docs/ascend-build.md)"
PACKAGE = Path(__file__).resolve().parents[2]
PARTS = ("ascendc", "policies")


def source_folder() -> Path | None:
    """Returns the folder with the operators' source: of an installed package, or of the source tree."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "ascendc" / "CMakeLists.txt").is_file():
            return folder
    return None


@cache
def source_digest(folder: Path) -> str:
    """Returns 16 hexadecimal characters that change with any file of the source."""
    digest = hashlib.sha256()
    for part in PARTS:
        for path in sorted(path for path in (folder / part).rglob("*") if path.is_file()):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build_folders(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Returns the folders in which the library of this source may be, the preferred one first.

    That is the package itself, for every user of the machine, unless it is a source tree; then the user's
    cache.
    """
    source = source_folder()
    if source is None:
        return []
    name = f"ascend-ops-{source_digest(source)}"
    cached = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-kvoffload" / name
    return [PACKAGE / name, cached] if source.is_relative_to(PACKAGE) else [cached]


def library_path(environ: Mapping[str, str] = os.environ) -> str:
    """Returns the path of the library that engines load, "" if there is none."""
    given = environ.get(KERNELS_ENV, "")
    if given:
        return given
    found = (folder / LIBRARY for folder in build_folders(environ))
    return next((str(path) for path in found if path.is_file()), "")
