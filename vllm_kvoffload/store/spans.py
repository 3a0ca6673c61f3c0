"""Local memory that copies may touch, and copies by this process's own processor."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from vllm_kvoffload.store.base import CopySpans, Direction, Int64Array, StoreError
from vllm_kvoffload.transfer.base import Region
from vllm_kvoffload.transfer.spans import RegionTable


class LocalMemory:
    """Registered regions. `ranges`: int64 [R, 2], start and end of each, in order of address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[Region] = []
        self.ranges: Int64Array = RegionTable([]).ranges

    def add(self, regions: Sequence[Region]) -> None:
        """Raises StoreError: a region is empty or overlaps another one; nothing was added then."""
        with self._lock:
            try:
                self.ranges = RegionTable([*self._regions, *regions]).ranges
            except ValueError as error:
                raise StoreError(f"register: {error}") from error
            self._regions.extend(regions)


def copy_checked(
    spans: CopySpans, direction: Direction, object_ranges: Int64Array, local_ranges: Int64Array
) -> None:
    """Copies with the GIL released. Raises StoreError: a span is out of bounds; nothing was copied then."""
    from vllm_kvoffload.ops import copy_spans  # brings torch, which a client that never copies can do without

    try:
        if direction == "save":
            copy_spans(spans.object_address, spans.local_address, spans.nbytes, object_ranges, local_ranges)
        else:
            copy_spans(spans.local_address, spans.object_address, spans.nbytes, local_ranges, object_ranges)
    except ValueError as error:
        hint = "object or local memory that is not open or registered"
        raise StoreError(f"{direction}: {error}; {hint}") from error
