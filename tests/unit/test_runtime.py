"""The CPU runtime: order, failures, deadlines, shutdown, threads, fork and interpreter exit."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from vllm_kvoffload.runtime import (
    CPURuntime,
    Event,
    Runtime,
    RuntimeClosedError,
    RuntimeFault,
    Stream,
    StreamFullError,
    TaskFailedError,
    WaitTimeoutError,
)
from vllm_kvoffload.runtime.cpu import MAX_STREAMS

pytestmark = pytest.mark.timeout(30)


def stream_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvoffload-")]


def wait_until_gone(timeout_s: float = 2.0) -> list[threading.Thread]:
    end = time.monotonic() + timeout_s
    while (left := stream_threads()) and time.monotonic() < end:
        time.sleep(0.005)
    return left


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    assert not stream_threads()
    yield
    if wait_until_gone(0.2):
        gc.collect()  # slow with torch loaded, so not always
        assert not wait_until_gone()


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    with CPURuntime(default_deadline_s=5) as runtime:
        yield runtime


def fail(message: str = "disk on fire") -> None:
    raise KeyError(message)


def test_implements_the_protocols(runtime: CPURuntime) -> None:
    stream = runtime.stream("a")
    assert isinstance(runtime, Runtime)
    for s in (stream, runtime.current_stream()):
        assert isinstance(s, Stream)
        assert isinstance(s.record(), Event)


def test_a_stream_runs_in_order_on_its_own_thread(runtime: CPURuntime) -> None:
    log: list[int] = []
    idents: set[int] = set()
    stream = runtime.stream("a")
    for i in range(200):
        stream.submit(lambda i=i: (log.append(i), idents.add(threading.get_ident())))
    stream.synchronize()
    assert log == list(range(200))
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_streams_run_beside_each_other(runtime: CPURuntime) -> None:
    barrier = threading.Barrier(2)  # breaks unless both tasks are running at the same time
    runtime.stream("a").submit(barrier.wait, 2.0)
    runtime.stream("b").submit(barrier.wait, 2.0)
    runtime.synchronize()


def test_same_name_is_the_same_stream(runtime: CPURuntime) -> None:
    gate, log = threading.Event(), []
    runtime.stream("a").submit(gate.wait, 5)
    runtime.stream("a").submit(log.append, 1)
    time.sleep(0.02)
    assert log == []
    gate.set()
    runtime.stream("a").synchronize()
    assert log == [1]


def test_event_marks_its_point_and_no_later_one(runtime: CPURuntime) -> None:
    gate, log = threading.Event(), []
    stream = runtime.stream("a")
    stream.submit(log.append, "first")
    event = stream.record("first done")
    stream.submit(gate.wait, 5)
    late = stream.record()
    event.wait()
    assert event.query()
    assert not late.query()
    assert log == ["first"]
    gate.set()
    late.wait()


def test_wait_event_orders_two_streams_without_blocking_the_caller(runtime: CPURuntime) -> None:
    gate, log = threading.Event(), []
    a, b = runtime.stream("a"), runtime.stream("b")
    a.submit(gate.wait, 5)
    a.submit(log.append, "a")
    b.wait_event(a.record())
    b.submit(log.append, "b")
    assert log == []
    gate.set()
    b.synchronize()
    assert log == ["a", "b"]


def test_event_timeout_names_what_was_awaited_and_what_runs_instead(runtime: CPURuntime) -> None:
    gate = threading.Event()
    stream = runtime.stream("h2d")
    stream.submit(gate.wait, 5, label="copy of layer 3")
    event = stream.record("layer 3 loaded")
    start = time.monotonic()
    with pytest.raises(
        WaitTimeoutError, match=r"'layer 3 loaded' of stream 'h2d'.*in 'copy of layer 3'"
    ) as info:
        event.wait(0.05)
    assert 0.05 <= time.monotonic() - start < 1
    assert info.value.deadline_s == 0.05
    assert "layer 3 loaded" in info.value.awaited
    assert isinstance(info.value, TimeoutError)
    gate.set()
    event.wait()  # a wait that timed out spoils nothing


def test_a_stream_that_waits_past_its_deadline_fails_instead_of_hanging(runtime: CPURuntime) -> None:
    gate, log = threading.Event(), []
    a, b = runtime.stream("a"), runtime.stream("b")
    a.submit(gate.wait, 5)
    b.wait_event(a.record("never"), deadline_s=0.03)
    b.submit(log.append, "must not run: its input never came")
    with pytest.raises(TaskFailedError, match="'never'") as info:
        b.synchronize()
    assert isinstance(info.value.__cause__, WaitTimeoutError)
    assert log == []
    gate.set()
    a.synchronize()


@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan"), -1.0])
def test_unbounded_waits_are_refused(runtime: CPURuntime, deadline_s: float) -> None:
    stream = runtime.stream("a")
    event = stream.record()
    for call in (event.wait, stream.synchronize, runtime.synchronize, runtime.shutdown):
        with pytest.raises(ValueError, match="deadline_s"):
            call(deadline_s)
    with pytest.raises(ValueError, match="deadline_s"):
        stream.wait_event(event, deadline_s)
    with pytest.raises(ValueError, match="deadline_s"):
        CPURuntime(default_deadline_s=deadline_s)


def test_failure_reaches_every_waiter_again_and_again(runtime: CPURuntime) -> None:
    a, b = runtime.stream("a"), runtime.stream("b")
    log: list[str] = []
    before = a.record()
    a.submit(fail, label="copy")
    a.submit(log.append, "depends on the copy")
    event = a.record("copied")
    b.wait_event(event)
    b.submit(log.append, "depends on it too")
    before.wait()  # work before the failure is fine
    for _ in range(2):
        for wait in (event.wait, a.synchronize, b.synchronize, runtime.synchronize):
            with pytest.raises(TaskFailedError, match=r"task 'copy' of stream 'a' failed: KeyError") as info:
                wait()
            assert isinstance(info.value.__cause__, KeyError)
            assert (info.value.stream, info.value.task) == ("a", "copy")
    assert log == []


def test_a_failure_on_one_stream_leaves_others_alone(runtime: CPURuntime) -> None:
    log: list[int] = []
    runtime.stream("a").submit(fail)
    runtime.stream("b").submit(log.append, 1)
    runtime.stream("b").synchronize()
    assert log == [1]
    with pytest.raises(TaskFailedError):
        runtime.synchronize()


def test_a_poisoned_stream_still_waits_for_others_before_its_events_complete(runtime: CPURuntime) -> None:
    gate = threading.Event()
    a, b = runtime.stream("a"), runtime.stream("b")
    b.submit(gate.wait, 5)
    a.submit(fail)
    a.wait_event(b.record())
    event = a.record()
    with pytest.raises(WaitTimeoutError):
        event.wait(0.05)  # b still uses its buffers
    gate.set()
    with pytest.raises(TaskFailedError):
        event.wait()


def test_the_first_failure_of_a_stream_is_the_one_reported(runtime: CPURuntime) -> None:
    a, b = runtime.stream("a"), runtime.stream("b")
    a.submit(fail, label="first")
    b.submit(fail, label="second")
    a.wait_event(b.record())
    with pytest.raises(TaskFailedError, match="task 'first' of stream 'a'"):
        a.synchronize()
    with pytest.raises(TaskFailedError, match="task 'second' of stream 'b'"):
        b.synchronize()


def test_a_timeout_does_not_hide_the_failure_before_it(runtime: CPURuntime) -> None:
    gate = threading.Event()
    a, b = runtime.stream("a"), runtime.stream("b")
    b.submit(gate.wait, 5)
    a.submit(fail, label="first")
    a.wait_event(b.record(), deadline_s=0.01)
    with pytest.raises(TaskFailedError, match="task 'first'"):
        a.synchronize()
    gate.set()


def test_recover_confines_a_failure(runtime: CPURuntime) -> None:
    stream, log = runtime.stream("a"), []
    stream.submit(fail)
    stream.submit(log.append, "skipped")
    failed = stream.record()
    stream.recover()
    stream.submit(log.append, "next request")
    stream.synchronize()
    assert log == ["next request"]
    with pytest.raises(TaskFailedError):
        failed.wait()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_even_exits_do_not_kill_the_thread(runtime: CPURuntime, error: type[BaseException]) -> None:
    def leave() -> None:
        raise error

    stream = runtime.stream("a")
    stream.submit(leave)
    with pytest.raises(TaskFailedError) as info:
        stream.synchronize()
    assert isinstance(info.value.__cause__, error)
    stream.recover()
    stream.synchronize()


def test_a_failure_nobody_waits_for_is_logged_and_raised_by_shutdown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = CPURuntime()
    runtime.stream("a").submit(fail, label="copy")
    with caplog.at_level(logging.ERROR), pytest.raises(TaskFailedError, match="copy"):
        runtime.shutdown()
    assert "task 'copy' of stream 'a' failed" in caplog.text
    runtime.shutdown()


def test_context_manager_lets_the_first_error_out() -> None:
    with pytest.raises(ZeroDivisionError), CPURuntime() as runtime:
        runtime.stream("a").submit(fail) or 1 / 0


def test_events_of_another_runtime_are_refused(runtime: CPURuntime) -> None:
    with CPURuntime() as other:
        event = other.stream("x").record("foreign")
        with pytest.raises(ValueError, match="'foreign'"):
            runtime.stream("a").wait_event(event)


def test_bounds() -> None:
    gate = threading.Event()
    with CPURuntime(default_deadline_s=0.05, max_pending=2) as runtime:
        stream = runtime.stream("a")
        stream.submit(gate.wait, 5, label="stuck")
        while not stream._lane._running:
            time.sleep(0.001)
        stream.submit(int)
        stream.submit(int, label="last")
        with pytest.raises(StreamFullError, match=r"limit 2 items.*'stuck'"):
            stream.submit(int)
        gate.set()
        stream.submit(int)  # waits for room, there is some soon
        for i in range(MAX_STREAMS - 1):
            runtime.stream(f"s{i}")
        with pytest.raises(RuntimeFault, match="exist already"):
            runtime.stream("one too many")
    for bad in ("", "caller"):
        with pytest.raises(ValueError, match="stream name"):
            runtime.stream(bad)
    with pytest.raises(ValueError, match="max_pending"):
        CPURuntime(max_pending=0)


def test_a_task_that_fills_its_own_stream_fails_at_once() -> None:
    with CPURuntime(default_deadline_s=5, max_pending=1) as runtime:
        stream = runtime.stream("a")
        stream.submit(lambda: [stream.submit(int) for _ in range(2)])
        start = time.monotonic()
        with pytest.raises(TaskFailedError) as info:
            stream.synchronize()
        assert isinstance(info.value.__cause__, StreamFullError)
        assert time.monotonic() - start < 1


def test_arguments_are_released_before_the_stream_idles(runtime: CPURuntime) -> None:
    class Buffer:
        freed = threading.Event()

        def __del__(self) -> None:
            self.freed.set()

    runtime.stream("a").submit(id, Buffer())
    assert Buffer.freed.wait(1)


def test_caller_stream_is_the_calling_thread(runtime: CPURuntime) -> None:
    log: list[object] = []
    gate = threading.Event()
    caller, side = runtime.current_stream(), runtime.stream("side")
    caller.submit(lambda: log.append(threading.get_ident()))
    assert log == [threading.get_ident()]
    event = caller.record("computed")
    assert event.query()
    side.wait_event(event)
    side.submit(gate.wait, 5)
    loaded = side.record()
    with pytest.raises(WaitTimeoutError):
        caller.wait_event(loaded, 0.02)
    gate.set()
    caller.wait_event(loaded)
    with pytest.raises(KeyError):
        caller.submit(fail)
    side.submit(fail)
    with pytest.raises(TaskFailedError):
        caller.wait_event(side.record())


def test_shutdown_finishes_queued_work_joins_and_is_idempotent() -> None:
    log: list[int] = []
    runtime = CPURuntime()
    a, b = runtime.stream("a"), runtime.stream("b")
    a.submit(time.sleep, 0.03)
    a.submit(log.append, 1)
    b.wait_event(a.record())
    b.submit(log.append, 2)
    last = b.record()
    runtime.shutdown()
    assert log == [1, 2]
    assert not stream_threads()
    last.wait(0)
    runtime.shutdown()
    for call in (lambda: a.submit(int), a.record, a.recover, a.synchronize, runtime.synchronize):
        with pytest.raises(RuntimeClosedError):
            call()
    with pytest.raises(RuntimeClosedError):
        runtime.stream("a")


def test_shutdown_of_a_stuck_task_is_bounded_and_frees_every_waiter() -> None:
    gate = threading.Event()
    runtime = CPURuntime()
    a, b = runtime.stream("a"), runtime.stream("b")
    a.submit(gate.wait, 20, label="stuck copy")
    event = a.record("never")
    b.wait_event(event)
    dependent = b.record("depends")
    outcome: list[BaseException] = []

    def waiter() -> None:
        try:
            dependent.wait(20)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=waiter)
    thread.start()
    start = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"'stuck copy'.*still running: \['a'\]"):
        runtime.shutdown(0.05)
    assert time.monotonic() - start < 2
    thread.join(2)
    assert not thread.is_alive()
    assert isinstance(outcome[0], RuntimeClosedError)
    with pytest.raises(RuntimeClosedError, match="cancelled"):
        event.wait()
    with pytest.raises(WaitTimeoutError):
        runtime.shutdown(0)  # still says so while it is true
    gate.set()
    runtime.shutdown()


def test_shutdown_from_a_task_is_refused(runtime: CPURuntime) -> None:
    runtime.stream("a").submit(runtime.shutdown)
    with pytest.raises(TaskFailedError, match="wait for itself"):
        runtime.stream("a").synchronize()
    runtime._closed = False


def test_no_thread_leaks_over_many_runtimes() -> None:
    for i in range(30):
        runtime = CPURuntime(default_deadline_s=2)
        for name in "abc":
            runtime.stream(name).submit(fail if i % 3 == 0 else int)
        if i % 3 == 0:
            with pytest.raises(TaskFailedError):
                runtime.shutdown()
        else:
            runtime.shutdown()
        assert not stream_threads()


def test_a_dropped_runtime_ends_its_threads_after_their_work() -> None:
    log: list[int] = []
    stream = CPURuntime().stream("a")
    gc.collect()
    assert len(stream_threads()) == 1  # the stream keeps its runtime
    stream.submit(time.sleep, 0.02)
    stream.submit(log.append, 1)
    del stream
    gc.collect()
    assert not wait_until_gone()
    assert log == [1]


def test_forked_child_gets_an_error_not_a_hang(runtime: CPURuntime) -> None:
    gate = threading.Event()
    stream = runtime.stream("a")
    stream.submit(gate.wait, 5)
    event = stream.record()
    pid = os.fork()
    if pid == 0:  # no pytest machinery in here
        status = 0
        for call in (event.wait, stream.synchronize, runtime.synchronize, lambda: runtime.stream("b")):
            try:
                call()
                status = 1
            except RuntimeClosedError:
                pass
        runtime.shutdown()
        with CPURuntime() as own:
            own.stream("a").synchronize(2)
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.set()
    event.wait()


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("threading.Event().wait", "at exit"),
        ("lambda: (time.sleep(0.2), print('finished', flush=True))", "finished"),
    ],
)
def test_interpreter_exit_is_bounded(task: str, expected: str) -> None:
    program = (
        "import threading, time, vllm_kvoffload.runtime.cpu as cpu\n"
        "cpu.EXIT_DEADLINE_S = 0.5\n"
        f"runtime = cpu.CPURuntime(); runtime.stream('a').submit({task})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True
    )
    assert expected in done.stdout + done.stderr


def test_a_stream_outlives_an_error_of_its_own(runtime: CPURuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of a task: it fails what comes after, as one of a task does, and can be recovered from."""
    stream = runtime.stream("s")
    lane = stream._lane
    with monkeypatch.context() as patch:
        patch.setattr(lane, "pause", lambda *_: 1 / 0)
        stream.submit(print)
        with pytest.raises(TaskFailedError, match="division"):
            stream.synchronize(10)
    stream.recover()
    done: list[int] = []
    stream.submit(done.append, 1)
    stream.synchronize(10)
    assert done == [1]
    assert lane.thread.is_alive()
