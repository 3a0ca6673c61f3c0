"""Events of a soak with their times, in a file and on the terminal."""

from __future__ import annotations

import time
from pathlib import Path


class Journal:
    """begun: time.monotonic() of the soak's start."""

    def __init__(self, path: Path, begun: float) -> None:
        self._file, self._begun = path.open("w", encoding="utf-8"), begun

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._begun:7.1f} s  {text}"
        print(line, file=self._file, flush=True)
        print(line, flush=True)

    def close(self) -> None:
        self._file.close()
