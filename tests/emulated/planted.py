"""Bugs that a test plants in the real adapter before an engine starts: `plant(name)`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def missing_stream_wait() -> None:
    """Compact delivery: installs don't wait for the compute stream, which gathers the rows they copy."""
    from vllm_kvoffload.runtime import npu

    def submit(self: npu.DeviceLane, launch: Callable[..., object], *args: Any) -> Any:
        after = self._npu.Event()
        with self._npu.stream(self._stream):
            launch(*args)
        after.record(self._stream)
        return after

    npu.DeviceLane.submit = submit  # type: ignore[method-assign]


def buffer_not_refilled() -> None:
    """A graph is replayed over the batch of the first replay."""
    from vllm_kvoffload.platforms.ascend.delivery import KernelDelivery

    place, kept = KernelDelivery.place, {}

    def first(self: KernelDelivery, step: Any) -> Any:
        if self._parts.partitions.live and "batch" in kept:
            return kept["batch"]
        batch = place(self, step)
        if self._parts.partitions.live:
            kept["batch"] = batch
        return batch

    KernelDelivery.place = first  # type: ignore[method-assign]


def lease_ignored() -> None:
    """A new request finds the rows of the partition's former owner."""
    from vllm_kvoffload.sparse.hot_pool import HotPool

    HotPool.reset_partition = lambda *_: None  # type: ignore[method-assign]


def wrong_block_table() -> None:
    """Each request is given the blocks of the next one in its batch."""
    from vllm_kvoffload.platforms.ascend import offload

    describe = offload.describe_pass

    def rolled(metadata: Any) -> Any:
        found = describe(metadata)
        table = found.batch.block_table.roll(1, dims=0)
        return replace(found, batch=replace(found.batch, block_table=table))

    offload.describe_pass = rolled


def host_reads_device_memory() -> None:
    """Sequence lengths are read at their address instead of copied."""
    from vllm_kvoffload.platforms.ascend import offload

    describe = offload.describe_pass

    def direct(metadata: Any) -> Any:
        ctypes.c_int32.from_address(metadata.seq_lens.data_ptr()).value  # noqa: B018
        return describe(metadata)

    offload.describe_pass = direct


def capture_waits() -> None:
    """The host asks for a plan's counters in each layer, also while a graph is captured."""
    from vllm_kvoffload.platforms.ascend.kernels import DeviceCounters

    count_plan = DeviceCounters.count_plan

    def asks(self: DeviceCounters, plan: Any) -> None:
        plan.stats.cpu()
        count_plan(self, plan)

    DeviceCounters.count_plan = asks  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        missing_stream_wait,
        buffer_not_refilled,
        lease_ignored,
        wrong_block_table,
        host_reads_device_memory,
        capture_waits,
    )
}


def plant(name: str) -> None:
    """Raises KeyError for an unknown name."""
    BUGS[name]()
