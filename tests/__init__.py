"""The tests. They import each other as `tests.<area>.<module>`, also in processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The repository: the current directory of child processes that run a module of the tests."""


def import_path(*folders: Path | str) -> str:
    """A PYTHONPATH for child processes: the folders, the repository and what this process has."""
    return os.pathsep.join([*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
