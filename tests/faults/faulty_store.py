"""A store with planted faults, inside a prefill server's own processes.

`plant` puts it between the connector and the real store, which does what it always does. A fault is a file in
a folder that the test shares with the server: in force while the file is there, as often as the file says.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

COPY_DEADLINE_S = 3.0
"""The pipeline's, which is 30 s where no test waits for it."""

HANG_S = 90.0
FILLER_BYTES = 1 << 16
FILLER = 0x3F
"""Of every byte of other objects: 0.7 as float32, so that it doesn't look like memory that was never used."""


def plant(folder: str) -> None:
    """Every store that this process makes from now on has the faults of a folder."""
    from vllm_kvoffload import store
    from vllm_kvoffload.layerwise.pipeline import PipelineLimits

    make = store.make_store

    def make_faulty(backend: str, *, role: str, **more: Any) -> FaultyStore:
        if backend == "memcache":
            from tests import hostsim

            hostsim.activate()
        return FaultyStore(make(backend, role=role, **more), role, Path(folder))

    store.make_store = make_faulty
    defaults = list(PipelineLimits.__init__.__defaults__)
    defaults[list(PipelineLimits.__dataclass_fields__).index("deadline_s")] = COPY_DEADLINE_S
    PipelineLimits.__init__.__defaults__ = tuple(defaults)


class FaultyStore:
    """See `vllm_kvoffload.store.Store`. role: of this process; the scheduler's looks up, others copy."""

    def __init__(self, store: Any, role: str, folder: Path) -> None:
        self.name = store.name
        self._store, self._role, self._folder = store, role, folder
        self._lock = threading.Lock()
        self._hits: dict[int, int] = {}
        self._open: set[tuple[str, int]] = set()
        self._filler: list[Any] = []
        self._numbers = itertools.count()
        self._note_open()

    # ------------------------------------------------------------------------------------------ interface

    def register(self, regions: Sequence[Any]) -> None:
        self._store.register(regions)

    def lookup(self, keys: Sequence[str]) -> int:
        return 0 if self._hit("down") else self._store.lookup(keys)

    def open_read(self, keys: Sequence[str], lease_s: float) -> list[Any]:
        self._refuse_if_down()
        if keys and self._hit("evicted"):
            self._store.finish_write(taken := self._take_all_room(), [False] * len(taken))
        found = self._store.open_read(keys, lease_s)
        self._opened("read", found)
        return found

    def close_read(self, objects: Sequence[Any]) -> None:
        self._store.close_read(objects)
        self._closed("read", objects)

    def open_write(self, keys: Sequence[str], nbytes: int) -> list[Any]:
        self._refuse_if_down()
        if self._hit("full"):
            self._filler += self._take_all_room()
        elif self._filler:
            given, self._filler = self._filler, []
            self._store.finish_write(given, [False] * len(given))
        granted = self._store.open_write(keys, nbytes)
        self._opened("write", granted)
        return granted

    def finish_write(self, objects: Sequence[Any], ok: Sequence[bool]) -> list[bool]:
        try:
            self._refuse_if_down()
            return self._store.finish_write(objects, ok)
        finally:
            self._closed("write", objects)

    def copy(self, spans: Any, direction: str) -> None:
        from vllm_kvoffload.store import CopySpans, StoreError

        self._refuse_if_down()
        if self._hit(f"{direction}_hangs"):
            end = time.monotonic() + HANG_S
            while (self._folder / f"{direction}_hangs").exists() and time.monotonic() < end:
                time.sleep(0.02)
        if options := self._hit("slow"):
            time.sleep(options["seconds"])
        if self._hit(f"{direction}_fails"):
            half = len(spans) // 2
            columns = (spans.object_address, spans.local_address, spans.nbytes)
            self._store.copy(CopySpans(*(column[:half] for column in columns)), direction)
            raise StoreError(f"planted: {direction} fails half-way")
        self._store.copy(spans, direction)

    def close(self) -> None:
        self._store.close()

    # --------------------------------------------------------------------------------------------- faults

    def _hit(self, name: str) -> dict[str, Any] | None:
        """Options of a fault that is in force; its hit is counted where the test looks."""
        try:
            options: dict[str, Any] = json.loads((self._folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        number, times = options["number"], options["times"]
        with self._lock:
            hits = self._hits.get(number, 0)
            if times is not None and hits >= times:
                return None
            self._hits[number] = hits + 1
            with open(self._folder / f"hits-{number}", "ab") as file:
                file.write(b"x")
        return options

    def _refuse_if_down(self) -> None:
        from vllm_kvoffload.store import StoreUnavailableError

        if self._hit("down"):
            raise StoreUnavailableError("planted: the store is down")

    def _take_all_room(self) -> list[Any]:
        """All room that is not pinned: its objects are evicted, and their bytes reused."""
        from vllm_kvoffload.store import WriteObject

        taken: list[Any] = []
        count = 64
        while count:
            keys = [f"filler.{self._role}.{next(self._numbers)}" for _ in range(count)]
            granted = [
                result
                for result in self._store.open_write(keys, FILLER_BYTES)
                if isinstance(result, WriteObject)
            ]
            for object_ in granted:
                ctypes.memset(object_.address, FILLER, object_.nbytes)
            taken += granted
            count = count if granted else count // 2  # the local store gives all or nothing
        return taken

    # ------------------------------------------------------------------------------------------- open objects

    def _opened(self, kind: str, results: Sequence[Any]) -> None:
        with self._lock:
            self._open |= {(kind, result.handle) for result in results if hasattr(result, "handle")}
        self._note_open()

    def _closed(self, kind: str, objects: Sequence[Any]) -> None:
        with self._lock:
            self._open -= {(kind, object_.handle) for object_ in objects}
        self._note_open()

    def _note_open(self) -> None:
        with self._lock, suppress(FileNotFoundError):  # at the very end the test has removed the folder
            draft = self._folder / f".open-{self._role}"
            counts = {kind: sum(name == kind for name, _ in self._open) for kind in ("read", "write")}
            draft.write_text(json.dumps(counts), encoding="utf-8")
            os.replace(draft, self._folder / f"open-{self._role}")
