"""The device interface used by the rest of the project: streams, events and the errors of waiting for them.

A *stream* runs the work given to it in order; two streams are ordered only by events. An *event* marks a
point of one stream and is recorded once; since it exists only after `record()`, a wait can only name
earlier work and no cycle of waits can be built. The same program runs on every runtime: on CPU a stream is
a thread that calls the submitted functions, on an NPU a thread with a device stream of its own current. So a
submitted function must do nothing but its copies or kernels, and its arguments belong to the stream until an
event says otherwise.

Failures: a task that raises poisons its stream. Later tasks of that stream do not run, events recorded
later carry the failure, a stream that waits for such an event is poisoned too, and every waiter gets
`TaskFailedError` with the task's own exception as `__cause__`. `Stream.recover()` ends this for work
submitted after it, so that a failure can be confined to one request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

DEFAULT_DEADLINE_S = 30.0


class RuntimeFault(RuntimeError):
    """Base class of this package's errors."""


class TaskFailedError(RuntimeFault):
    """A task, or work that depends on it, failed. `__cause__` is the exception that the task raised.

    Attributes: `stream`, `task`: origin of the exception, which may differ from the stream waited for.
    """

    def __init__(self, message: str, stream: str, task: str) -> None:
        super().__init__(message)
        self.stream = stream
        self.task = task


class WaitTimeoutError(RuntimeFault, TimeoutError):
    """A wait reached its deadline. Attributes: `awaited` (label of the event), `deadline_s`."""

    def __init__(self, awaited: str, deadline_s: float, state: str) -> None:
        super().__init__(f"{awaited} not complete after {deadline_s:.3g} s: {state}")
        self.awaited = awaited
        self.deadline_s = deadline_s


class StreamFullError(RuntimeFault):
    """A stream's queue stayed full until the deadline: its work is stuck or slower than its callers."""


class RuntimeClosedError(RuntimeFault):
    """The runtime was shut down (or belongs to the parent of this forked process)."""


def check_deadline(deadline_s: float) -> float:
    """Return `deadline_s` if it bounds a wait (I-10); raise ValueError otherwise."""
    if not (math.isfinite(deadline_s) and deadline_s >= 0):
        raise ValueError(f"deadline_s={deadline_s}: expected a finite number of seconds >= 0; 0 polls")
    return float(deadline_s)


@runtime_checkable
class Event(Protocol):
    """A point of one stream, recorded once."""

    @property
    def label(self) -> str:
        """Name used in error messages."""

    def query(self) -> bool:
        """True when all work before the event is finished, failed or skipped. Never blocks, never raises."""

    def wait(self, deadline_s: float | None = None) -> None:
        """Block the calling thread until the event is complete.

        `deadline_s`: seconds, finite; None means the runtime's default.
        Raises TaskFailedError, WaitTimeoutError, RuntimeClosedError (cancelled by shutdown), ValueError.
        """


@runtime_checkable
class Stream(Protocol):
    """An ordered queue of work."""

    @property
    def name(self) -> str:
        """Name within its runtime."""

    def submit(self, fn: Callable[..., object], *args: Any, label: str | None = None) -> None:
        """Run `fn(*args)` after all earlier work of this stream. Discards its result; keeps its exception.

        Raises StreamFullError, RuntimeClosedError.
        """

    def record(self, label: str | None = None) -> Event:
        """Mark this point: the event is complete when everything submitted so far is."""

    def wait_event(self, event: Event, deadline_s: float | None = None) -> None:
        """Hold later work of this stream until `event` is complete.

        Does not block the caller, except on `Runtime.current_stream()` of a runtime whose caller *is* the
        stream. A deadline (counted from when the stream reaches the wait) that passes poisons the stream.
        Raises ValueError for an event of another runtime.
        """

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Block until everything submitted so far is complete. Raises as `Event.wait`."""

    def recover(self) -> None:
        """Forget the failure, if any, for work submitted from now on; work before this point stays failed."""


def join_events(events: Iterable[Event], stream: Stream, deadline_s: float) -> bool:
    """Waits for all events of a stream, recovers the stream and returns whether none had failed.

    Raises WaitTimeoutError.
    """
    complete = True
    for event in events:
        try:
            event.wait(deadline_s)
        except TaskFailedError:
            complete = False
    if not complete:
        stream.recover()
    return complete


@runtime_checkable
class Runtime(Protocol):
    """Named streams of one device."""

    def stream(self, name: str) -> Stream:
        """The stream of that name, created on first use."""

    def current_stream(self) -> Stream:
        """The stream of the caller's own work (the model's forward pass)."""

    def synchronize(self, deadline_s: float | None = None) -> None:
        """Wait for every stream within one deadline; the first failure is raised after all waits (I-7)."""

    def shutdown(self, deadline_s: float | None = None) -> None:
        """Finish queued work, cancel the rest at the deadline, free the streams. Idempotent.

        Raises WaitTimeoutError naming the stuck work, TaskFailedError for a failure not yet reported.
        """
