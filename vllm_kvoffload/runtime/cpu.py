"""The CPU runtime: one daemon thread per named stream, so that side streams run in parallel to the caller.

Fork: threads do not survive a fork and their locks may be held in the child, so every call checks the
process id first and raises RuntimeClosedError in a forked child, which must make a new runtime.

Exit: threads are daemons, so a task that never returns cannot hang the interpreter. Runtimes still open at
exit get `EXIT_DEADLINE_S` to finish queued work.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NoReturn, Protocol

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.runtime.base import (
    DEFAULT_DEADLINE_S,
    Event,
    Runtime,
    RuntimeClosedError,
    RuntimeFault,
    StreamFullError,
    TaskFailedError,
    WaitTimeoutError,
    check_deadline,
)
from vllm_kvoffload.runtime.delay import DelayPlan

logger = get_logger(__name__)

MAX_STREAMS = 32
MAX_PENDING = 8192  # a 78-layer step queues a few hundred items; more than this in flight is a leak
EXIT_DEADLINE_S = 2.0
CANCEL_GRACE_S = 0.5
CALLER_STREAM = "caller"


class _Failure:
    """The first failure of a stream, shared by everything that depends on it."""

    __slots__ = ("error", "seen", "stream", "task")

    def __init__(self, error: BaseException, stream: str, task: str) -> None:
        self.error = error
        self.stream = stream
        self.task = task
        self.seen = False

    def throw(self, awaited: str) -> NoReturn:
        # A new exception for each waiter: one instance raised in several threads would mix their tracebacks.
        self.seen = True
        if isinstance(self.error, RuntimeClosedError):
            raise RuntimeClosedError(f"{awaited}: {self.error}") from self.error
        where = f"task {self.task!r} of stream {self.stream!r}"
        reason = f"{type(self.error).__name__}: {self.error}"
        raise TaskFailedError(f"{awaited}: {where} failed: {reason}", self.stream, self.task) from self.error


class _Item(Protocol):
    label: str

    def run(self, lane: _Lane) -> None: ...


class _Task:
    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...], label: str) -> None:
        self.fn = fn
        self.args = args
        self.label = label

    def run(self, lane: _Lane) -> None:
        index = lane.task_count
        lane.task_count += 1
        if lane.failure is not None:
            return
        lane.pause(index, "before")
        try:
            self.fn(*self.args)
        except BaseException as error:  # SystemExit too: a dead thread would leave waiters to their deadlines
            lane.fail(error, self.label)
        # Delays only the visible completion of the work, not the work itself.
        lane.pause(index, "after")


class _Record:
    def __init__(self, event: CPUEvent) -> None:
        self.event = event
        self.label = f"record {event.label!r}"

    def run(self, lane: _Lane) -> None:
        self.event.complete(lane.failure)


class _WaitFor:
    def __init__(self, event: CPUEvent, deadline_s: float) -> None:
        self.event = event
        self.deadline_s = deadline_s
        self.label = f"wait for {event.describe()}"

    def run(self, lane: _Lane) -> None:
        # A poisoned stream still waits: its later events must not complete while the work they cover, on any
        # stream, still uses its buffers (I-7).
        try:
            failure = self.event.outcome(self.deadline_s)
        except WaitTimeoutError as error:
            lane.fail(error, self.label)
        else:
            lane.failure = lane.failure or failure


class _Recover:
    label = "recover"

    def run(self, lane: _Lane) -> None:
        if lane.failure is not None:
            lane.failure.seen = True
        lane.failure = None


class _Lane:
    """Queue and thread of one stream. `failure` and `task_count` belong to the thread while it lives."""

    def __init__(
        self, owner: object, name: str, max_pending: int, default_deadline_s: float, delays: DelayPlan | None
    ) -> None:
        self.owner = owner
        self.name = name
        self.max_pending = max_pending
        self.default_deadline_s = default_deadline_s
        self.failure: _Failure | None = None
        self.task_count = 0
        self._delays = delays
        self._pid = os.getpid()
        # Reentrant: the garbage collector may call close() on a thread that holds it.
        lock = threading.RLock()
        self._work = threading.Condition(lock)
        self.done = threading.Condition(lock)
        self._items: deque[_Item] = deque()
        self._closing = False
        self._running: tuple[str, float] | None = None
        self.thread = threading.Thread(target=self._loop, name=f"kvoffload-{name}", daemon=True)
        self.thread.start()

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeClosedError(
                f"stream {self.name!r} is of process {self._pid}, this is its forked child {os.getpid()}; "
                "create a CPURuntime in the child"
            )

    def put(self, item: _Item) -> None:
        self.check_process()
        # The lane's own thread is the only one that can make room: waiting for itself would only waste the
        # deadline.
        patience_s = 0.0 if threading.current_thread() is self.thread else self.default_deadline_s
        with self._work:
            if not self.done.wait_for(self._accepts, patience_s):
                raise StreamFullError(
                    f"{item.label!r} not accepted within {patience_s:.3g} s, limit {self.max_pending} items: "
                    f"{self.describe()}"
                )
            if self._closing:
                raise RuntimeClosedError(f"{item.label!r} given to stream {self.name!r} after shutdown")
            self._items.append(item)
            self._work.notify()

    def _accepts(self) -> bool:
        return self._closing or len(self._items) < self.max_pending

    def fail(self, error: BaseException, task: str) -> None:
        logger.error("task %r of stream %r failed", task, self.name, exc_info=error)
        self.failure = self.failure or _Failure(error, self.name, task)

    def pause(self, index: int, edge: Literal["before", "after"]) -> None:
        if self._delays is not None:
            time.sleep(self._delays.delay_s(self.name, index, edge))

    def describe(self) -> str:
        with self._work:
            running, queued = self._running, len(self._items)
        what = f"in {running[0]!r} for {time.monotonic() - running[1]:.2f} s" if running else "idle"
        return f"stream {self.name!r} is {what}, {queued} items queued"

    def close(self) -> None:
        """Reject new work; the thread ends after the queued work. Also called by the garbage collector."""
        if os.getpid() != self._pid:
            return
        with self._work:
            self._closing = True
            self._work.notify_all()
            self.done.notify_all()

    def cancel(self) -> int:
        """Drop the queued items, fail their events and return the number of items."""
        with self._work:
            dropped = list(self._items)
            self._items.clear()
            failure = _Failure(RuntimeClosedError("cancelled by shutdown"), self.name, "shutdown")
            for item in dropped:
                if isinstance(item, _Record):
                    item.event.complete(failure)
        return len(dropped)

    def _loop(self) -> None:
        while (item := self._next()) is not None:
            try:
                item.run(self)
            except BaseException as error:  # raised by the stream itself, such as by its delays
                self.fail(error, item.label)
            del item  # frees the task's arguments before the thread sleeps

    def _next(self) -> _Item | None:
        with self._work:
            self._running = None
            # The only wait without a deadline: it waits for new work, not for a result. close() ends it.
            self._work.wait_for(lambda: bool(self._items) or self._closing)
            if not self._items:
                return None
            item = self._items.popleft()
            self._running = (item.label, time.monotonic())
            if len(self._items) == self.max_pending - 1:
                self.done.notify_all()
            return item


class CPUEvent:
    """A point of a CPU stream (see `base.Event`)."""

    def __init__(self, lane: _Lane, label: str) -> None:
        self.lane = lane
        self.label = label
        self._complete = False
        self._failure: _Failure | None = None

    def describe(self) -> str:
        return f"event {self.label!r} of stream {self.lane.name!r}"

    def query(self) -> bool:
        return self._complete

    def wait(self, deadline_s: float | None = None) -> None:
        default_s = self.lane.default_deadline_s
        failure = self.outcome(default_s if deadline_s is None else check_deadline(deadline_s))
        if failure is not None:
            failure.throw(self.describe())

    def outcome(self, deadline_s: float) -> _Failure | None:
        """Wait, and return the failure of the work before the event, if any. Raises WaitTimeoutError."""
        if not self._complete:
            self.lane.check_process()
            with self.lane.done:
                complete = self.lane.done.wait_for(self.query, deadline_s)
            if not complete:
                raise WaitTimeoutError(self.describe(), deadline_s, self.lane.describe())
        return self._failure

    def complete(self, failure: _Failure | None) -> None:
        with self.lane.done:
            self._failure = failure
            self._complete = True  # last: query() and outcome() read it without the lock
            self.lane.done.notify_all()


class _CallerEvent:
    """A point of the caller's own stream; all earlier work is done when it is recorded."""

    def __init__(self, label: str) -> None:
        self.label = label

    def query(self) -> bool:
        return True

    def wait(self, deadline_s: float | None = None) -> None:
        if deadline_s is not None:
            check_deadline(deadline_s)


class CPUStream:
    """A stream with a thread of its own (see `base.Stream`)."""

    def __init__(self, runtime: CPURuntime, lane: _Lane) -> None:
        self._runtime = runtime  # keeps the thread alive while anyone holds the stream
        self._lane = lane

    @property
    def name(self) -> str:
        return self._lane.name

    def submit(self, fn: Callable[..., object], *args: Any, label: str | None = None) -> None:
        self._lane.put(_Task(fn, args, label or str(getattr(fn, "__qualname__", fn))))

    def record(self, label: str | None = None) -> CPUEvent:
        event = CPUEvent(self._lane, label or "unnamed")
        self._lane.put(_Record(event))
        return event

    def wait_event(self, event: Event, deadline_s: float | None = None) -> None:
        deadline_s = self._lane.default_deadline_s if deadline_s is None else check_deadline(deadline_s)
        if isinstance(event, _CallerEvent):
            return
        if not isinstance(event, CPUEvent) or event.lane.owner is not self._lane.owner:
            raise ValueError(f"event {event.label!r} is not of the runtime of stream {self.name!r}")
        self._lane.put(_WaitFor(event, deadline_s))

    def synchronize(self, deadline_s: float | None = None) -> None:
        self.record("synchronize").wait(deadline_s)

    def recover(self) -> None:
        self._lane.put(_Recover())


class _CallerStream:
    """The calling thread as a stream: `submit` runs the work itself and raises its exceptions.

    A side stream can therefore not overtake the caller's earlier work. A test for a missing wait in that
    direction passes a named stream to the code under test as its compute stream.
    """

    name = CALLER_STREAM

    def __init__(self, default_deadline_s: float) -> None:
        self._default_deadline_s = default_deadline_s

    def submit(self, fn: Callable[..., object], *args: Any, label: str | None = None) -> None:  # noqa: ARG002
        fn(*args)

    def record(self, label: str | None = None) -> _CallerEvent:
        return _CallerEvent(label or "unnamed")

    def wait_event(self, event: Event, deadline_s: float | None = None) -> None:
        event.wait(self._default_deadline_s if deadline_s is None else deadline_s)

    def synchronize(self, deadline_s: float | None = None) -> None:
        if deadline_s is not None:
            check_deadline(deadline_s)

    def recover(self) -> None:
        pass


class CPURuntime:
    """Streams on threads (see `base.Runtime`). Also a context manager that shuts the runtime down.

    `delays`: random-delay mode; None reads KVOFFLOAD_RUNTIME_DELAY (`seed[:max_ms]`), unset means no delays.
    `max_pending`: items a stream holds before `submit` waits for room; `default_deadline_s` bounds that wait
    too.
    Raises ValueError for a bad argument or variable.
    """

    def __init__(
        self,
        delays: DelayPlan | None = None,
        default_deadline_s: float = DEFAULT_DEADLINE_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending}: expected at least 1")
        self._default_deadline_s = check_deadline(default_deadline_s)
        self._delays = delays if delays is not None else DelayPlan.from_env(os.environ)
        if self._delays is not None:
            logger.warning("random-delay mode is on: %s", self._delays)
        self._max_pending = max_pending
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._lanes: dict[str, _Lane] = {}
        self._owner = object()
        self._caller = _CallerStream(self._default_deadline_s)
        # Lanes must not refer to the runtime, or it would never be collected and its threads would never end.
        weakref.finalize(self, _close_lanes, self._lanes).atexit = False
        _live.add(self)

    def stream(self, name: str) -> CPUStream:
        """See `base.Runtime`.

        Raises RuntimeClosedError, ValueError for the reserved or an empty name, RuntimeFault above
        MAX_STREAMS: names must be few and fixed, not generated per request.
        """
        if not name or name == CALLER_STREAM:
            raise ValueError(f"stream name {name!r}: expected a name, and not {CALLER_STREAM!r}")
        self._check_open()
        with self._lock:
            self._check_open()
            if name not in self._lanes:
                if len(self._lanes) >= MAX_STREAMS:
                    raise RuntimeFault(
                        f"stream {name!r}: {MAX_STREAMS} streams exist already: {list(self._lanes)}"
                    )
                self._lanes[name] = _Lane(
                    self._owner, name, self._max_pending, self._default_deadline_s, self._delays
                )
            return CPUStream(self, self._lanes[name])

    def current_stream(self) -> _CallerStream:
        return self._caller

    def synchronize(self, deadline_s: float | None = None) -> None:
        self._check_open()
        end = time.monotonic() + self._deadline(deadline_s)
        with self._lock:
            lanes = list(self._lanes.values())
        events = [CPUStream(self, lane).record("synchronize") for lane in lanes]
        errors: list[RuntimeFault] = []
        for event in events:
            try:
                event.wait(max(0.0, end - time.monotonic()))
            except RuntimeFault as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def shutdown(self, deadline_s: float | None = None) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads
        deadline_s = self._deadline(deadline_s)
        with self._lock:
            self._closed = True
            lanes = list(self._lanes.values())
        if any(lane.thread is threading.current_thread() for lane in lanes):
            raise RuntimeFault("shutdown called by a task of the runtime: it would wait for itself")
        _close_lanes(self._lanes)
        unfinished = _join(lanes, deadline_s)
        if unfinished:
            state = "; ".join(lane.describe() for lane in unfinished)
            cancelled = sum(lane.cancel() for lane in unfinished)
            stuck = [lane.name for lane in _join(unfinished, CANCEL_GRACE_S)]
            state += f"; {cancelled} items cancelled, still running: {stuck or 'none'}"
            raise WaitTimeoutError("shutdown", deadline_s, state)
        for lane in lanes:
            if lane.failure is not None and not lane.failure.seen:
                lane.failure.throw("shutdown")

    def __enter__(self) -> CPURuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.shutdown()
        except RuntimeFault:
            if error is None:  # the propagating error says more than its consequences, which are logged
                raise
            logger.exception("shutdown after %r", error)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeClosedError(
                f"the runtime is of process {self._pid}; create one in this forked child"
            )
        if self._closed:
            raise RuntimeClosedError("the runtime was shut down")

    def _deadline(self, deadline_s: float | None) -> float:
        return self._default_deadline_s if deadline_s is None else check_deadline(deadline_s)


def _join(lanes: list[_Lane], deadline_s: float) -> list[_Lane]:
    """Join the lanes' threads within one deadline and return those still alive."""
    end = time.monotonic() + deadline_s
    for lane in lanes:
        lane.thread.join(max(0.0, end - time.monotonic()))
    return [lane for lane in lanes if lane.thread.is_alive()]


def _close_lanes(lanes: dict[str, _Lane]) -> None:
    for lane in list(lanes.values()):
        lane.close()


_conforms: type[Runtime] = CPURuntime  # checked by mypy
_live: weakref.WeakSet[CPURuntime] = weakref.WeakSet()


@atexit.register
def _shutdown_at_exit() -> None:
    for runtime in list(_live):
        try:
            runtime.shutdown(EXIT_DEADLINE_S)
        except RuntimeFault as error:
            logger.error("at exit: %s", error)
