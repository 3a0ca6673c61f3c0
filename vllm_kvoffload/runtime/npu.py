"""The NPU runtime: a side stream is a thread of its own *and* a device stream that is current in it.

A task may work on the host and also queue copies or kernels on the device. It is complete when the thread has
run it and the device has finished the work it queued. Its arguments may then be freed without telling torch's
allocator about streams. Threads, queues, deadlines and failures are those of the CPU runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vllm_kvoffload.runtime.base import (
    DEFAULT_DEADLINE_S,
    Event,
    Runtime,
    Stream,
    WaitTimeoutError,
    check_deadline,
)
from vllm_kvoffload.runtime.cpu import CPURuntime, CPUStream

POLL_S = 0.00005
COMPUTE_STREAM = "compute"


class NPUEvent:
    """A point of the compute stream (see `base.Event`)."""

    def __init__(self, npu: Any, device: int, event: Any, label: str, default_deadline_s: float) -> None:
        self._npu = npu
        self._device = device
        self._event = event
        self.label = label
        self._default_deadline_s = default_deadline_s

    def query(self) -> bool:
        self._npu.set_device(self._device)  # the calling thread may not have selected the device yet
        return bool(self._event.query())

    def wait(self, deadline_s: float | None = None) -> None:
        # torch_npu's Event.synchronize() can't be given a deadline; most events are complete at once.
        limit_s = self._default_deadline_s if deadline_s is None else check_deadline(deadline_s)
        end = time.monotonic() + limit_s
        while not self.query():
            if time.monotonic() >= end:
                raise WaitTimeoutError(f"event {self.label!r} of the compute stream", limit_s, "device busy")
            time.sleep(POLL_S)


class _ComputeStream:
    """The device stream that is current in the calling thread: the model's forward pass."""

    name = COMPUTE_STREAM

    def __init__(self, npu: Any, device: int, default_deadline_s: float) -> None:
        self._npu = npu
        self._device = device
        self._default_deadline_s = default_deadline_s

    def submit(self, fn: Callable[..., object], *args: Any, label: str | None = None) -> None:  # noqa: ARG002
        fn(*args)

    def record(self, label: str | None = None) -> NPUEvent:
        event = self._npu.Event()
        event.record(self._npu.current_stream())
        return NPUEvent(self._npu, self._device, event, label or "unnamed", self._default_deadline_s)

    def wait_event(self, event: Event, deadline_s: float | None = None) -> None:
        # On the host: a side stream's event is complete only after its thread has reached it.
        event.wait(self._default_deadline_s if deadline_s is None else deadline_s)

    def synchronize(self, deadline_s: float | None = None) -> None:
        self.record("synchronize").wait(deadline_s)

    def recover(self) -> None:
        pass


def compute_stream(npu: Any, device: int, default_deadline_s: float = DEFAULT_DEADLINE_S) -> Stream:
    """The stream of the caller's own work on a device, for callers without side streams."""
    return _ComputeStream(npu, device, default_deadline_s)


class NPUStream:
    """A thread with a device stream (see `base.Stream`)."""

    def __init__(
        self, lane: CPUStream, npu: Any, device: int, stream: Any, default_deadline_s: float
    ) -> None:
        self._lane = lane
        self._npu = npu
        self._device = device
        self._stream = stream
        self._default_deadline_s = default_deadline_s

    @property
    def name(self) -> str:
        return self._lane.name

    def submit(self, fn: Callable[..., object], *args: Any, label: str | None = None) -> None:
        name = label or str(getattr(fn, "__qualname__", fn))
        self._lane.submit(self._run, fn, args, label=name)

    def _run(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._npu.set_device(self._device)  # a new thread starts on device 0
        with self._npu.stream(self._stream):
            fn(*args)
            self._stream.synchronize()

    def record(self, label: str | None = None) -> Event:
        return self._lane.record(label)

    def wait_event(self, event: Event, deadline_s: float | None = None) -> None:
        if not isinstance(event, NPUEvent):
            self._lane.wait_event(event, deadline_s)
            return
        limit_s = self._default_deadline_s if deadline_s is None else check_deadline(deadline_s)
        self._lane.submit(event.wait, limit_s, label=f"wait for {event.label!r}")

    def synchronize(self, deadline_s: float | None = None) -> None:
        self._lane.synchronize(deadline_s)

    def recover(self) -> None:
        self._lane.recover()


class DeviceLane:
    """A device stream without a thread: kernels are queued on it without a wait on the host.

    Memory that they read or write must not be touched until the compute stream has joined them.
    """

    def __init__(self, npu: Any, device: int, default_deadline_s: float) -> None:
        self._npu = npu
        self._device = device
        self._default_deadline_s = default_deadline_s
        self._stream = npu.Stream()

    def submit(self, launch: Callable[..., object], *args: Any) -> Any:
        """Calls ``launch``, whose kernels run after all work queued on the compute stream so far. Returns an
        event for :meth:`join`."""
        before, after = self._npu.Event(), self._npu.Event()
        before.record(self._npu.current_stream())
        self._stream.wait_event(before)
        with self._npu.stream(self._stream):
            launch(*args)
        after.record(self._stream)
        return after

    def join(self, event: Any) -> None:
        """Makes work queued on the compute stream from now on run after the event."""
        self._npu.current_stream().wait_event(event)

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Blocks until all kernels are done. Raises WaitTimeoutError."""
        event = self._npu.Event()
        event.record(self._stream)
        NPUEvent(self._npu, self._device, event, "lane", self._default_deadline_s).wait(deadline_s)


class NPURuntime:
    """Streams of one NPU (see `base.Runtime`).

    `npu`: torch.npu, or its substitute in tests. `device`: index of the streams' device. `threads`: the
    runtime whose threads run the tasks; it is shut down with this one.
    """

    def __init__(
        self,
        npu: Any,
        device: int,
        threads: CPURuntime | None = None,
        default_deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        self._npu = npu
        self._device = device
        self._threads = threads or CPURuntime(default_deadline_s=default_deadline_s)
        self._default_deadline_s = check_deadline(default_deadline_s)
        self._compute = _ComputeStream(npu, device, default_deadline_s)
        self._streams: dict[str, NPUStream] = {}
        self._lanes: list[DeviceLane] = []

    def stream(self, name: str) -> NPUStream:
        """See `base.Runtime`. Raises as `CPURuntime.stream`; called by one thread."""
        known = self._streams.get(name)
        if known is None:
            lane = self._threads.stream(name)
            stream = self._npu.Stream()
            known = NPUStream(lane, self._npu, self._device, stream, self._default_deadline_s)
            self._streams[name] = known
        return known

    def current_stream(self) -> _ComputeStream:
        return self._compute

    def lane(self) -> DeviceLane:
        """A new device stream for work that the host queues without waiting."""
        lane = DeviceLane(self._npu, self._device, self._default_deadline_s)
        self._lanes.append(lane)
        return lane

    def synchronize(self, deadline_s: float | None = None) -> None:
        start = time.monotonic()
        limit_s = self._default_deadline_s if deadline_s is None else check_deadline(deadline_s)
        self._threads.synchronize(limit_s)
        for synchronize in (*(lane.synchronize for lane in self._lanes), self._compute.synchronize):
            synchronize(max(0.0, limit_s - (time.monotonic() - start)))

    def shutdown(self, deadline_s: float | None = None) -> None:
        with ExitStack() as stack:  # closes all of them even if one fails
            stack.callback(self._threads.shutdown, deadline_s)
            stack.callback(self._lanes.clear)
            # Kernels may still read memory that is freed next.
            stack.callback(self._compute.synchronize, deadline_s)
            for lane in self._lanes:
                stack.callback(lane.synchronize, deadline_s)


_conforms: type[Runtime] = NPURuntime  # checked by mypy
