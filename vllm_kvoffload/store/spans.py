"""Registered local memory, and copies between it and objects in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from vllm_kvoffload.store.base import CopySpans, Direction, Int64Array, StoreError
from vllm_kvoffload.transfer.base import Region
from vllm_kvoffload.transfer.spans import RegionTable


class DeviceCopies(Protocol):
    """Copies between objects in host memory and memory of a device."""

    def copy(self, spans: CopySpans, direction: Direction, object_ranges: Int64Array) -> None:
        """Copies all bytes, blocking. The caller has checked all bounds.

        object_ranges: int64 [R, 2], memory of the objects. Raises ValueError: unknown device memory.
        """


class LocalMemory:
    """Registered regions, with the copies for device memory; None: only host memory can be registered.

    `table`: the regions' bounds. `ranges`: the bounds as int64 [R, 2].
    """

    def __init__(self, devices: DeviceCopies | None = None) -> None:
        self._lock = threading.Lock()
        self.devices = devices
        self.regions: list[Region] = []
        self.table = RegionTable([])
        self.ranges: Int64Array = self.table.ranges

    def add(self, regions: Sequence[Region]) -> None:
        """Registers regions. Raises StoreError: a region is empty, overlaps another one, or is on a device
        without copies; nothing was added then."""
        others = sorted({region.device for region in regions} - {"host"})
        if others and self.devices is None:
            raise StoreError(f"register: this client reaches host memory only, not {', '.join(others)}")
        with self._lock:
            try:
                table = RegionTable([*self.regions, *regions])
            except ValueError as error:
                raise StoreError(f"register: {error}") from error
            self.regions = [*self.regions, *regions]
            self.table, self.ranges = table, table.ranges


def by_device(addresses: Int64Array, regions: Sequence[Region]) -> list[tuple[str, Any]]:
    """Groups spans by the device of their region; every address must lie in a region."""
    ordered = sorted(regions, key=lambda region: region.address)
    starts = np.array([region.address for region in ordered], dtype=np.int64)
    at = np.searchsorted(starts, addresses, side="right") - 1
    devices = np.array([region.device for region in ordered])[at] if ordered else np.array([])
    return [(str(device), np.flatnonzero(devices == device)) for device in np.unique(devices)]


def copy_checked(spans: CopySpans, direction: Direction, objects: RegionTable, local: LocalMemory) -> None:
    """Copies with the GIL released. Raises StoreError: a span is out of bounds; nothing was copied then."""
    try:
        if local.devices is None:
            copy_host(spans, direction, objects.ranges, local.ranges)
        else:
            _copy_by_device(spans, direction, objects, local, local.devices)
    except ValueError as error:
        hint = "object or local memory that is not open or registered"
        raise StoreError(f"{direction}: {error}; {hint}") from error


def copy_host(
    spans: CopySpans, direction: Direction, object_ranges: Int64Array, local_ranges: Int64Array
) -> None:
    """Copies within host memory. Raises ValueError: a span is out of the ranges, int64 [R, 2] each."""
    from vllm_kvoffload.ops import copy_spans  # imports torch, which a client that never copies doesn't need

    if direction == "save":
        copy_spans(spans.object_address, spans.local_address, spans.nbytes, object_ranges, local_ranges)
    else:
        copy_spans(spans.local_address, spans.object_address, spans.nbytes, local_ranges, object_ranges)


def _copy_by_device(
    spans: CopySpans, direction: Direction, objects: RegionTable, local: LocalMemory, devices: DeviceCopies
) -> None:
    table, regions = local.table, local.regions
    for what, known, addresses in (
        ("object", objects, spans.object_address),
        ("local", table, spans.local_address),
    ):
        bad = known.find_outside(addresses, spans.nbytes)
        if bad is not None:
            raise ValueError(f"span {bad}: {what} memory {int(addresses[bad]):#x}+{int(spans.nbytes[bad])}")
    for device, chosen in by_device(spans.local_address, regions):
        part = CopySpans(spans.object_address[chosen], spans.local_address[chosen], spans.nbytes[chosen])
        if device == "host":
            copy_host(part, direction, objects.ranges, table.ranges)
        else:
            devices.copy(part, direction, objects.ranges)
