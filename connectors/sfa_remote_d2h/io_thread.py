"""A thread that owns sockets and a state machine's clock; other threads only wake it."""

from __future__ import annotations

import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.wire import MAX_FRAME_BYTES
from vllm_kvoffload.log import QuietLog, get_logger
from vllm_kvoffload.metrics import StatsChannel

logger = get_logger(__name__)

TICK_S = 0.1
STOP_S = 5.0
BACKOFF_S = 1.0
"""Longest pause after an error of a whole round; each pause in a row is twice as long as the last."""

MAX_SOCKETS = 8192
"""Of a context: libzmq's own limit is 1023."""

HANDSHAKE_MS = 5000
KEEPALIVE_S = 60

LATE_S = 1.0
"""A thread that looks so much later than it wants to says so: leases may end meanwhile."""

PUBLISH_S = 0.05
"""Least time between two publications of metrics: with reads in flight there is a round every millisecond."""


IDLE_S = (0.001, 0.01)
"""First and longest wait of a step that computes nothing; each such step waits twice as long as the last."""


class Idle:
    """Lets an engine that only waits for its peer wait for news, instead of taking steps without work.

    An engine with such requests would take one step after the other, on all its cores: its processes spin
    while they wait for each other. The wait is short since a new request is only seen at its end.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._wait_s = IDLE_S[0]

    def tell(self) -> None:
        """There is something for the engine, which ends a wait."""
        self._news.set()

    def begin(self) -> None:
        """Before looking for something: what comes from here on ends the next wait."""
        self._news.clear()

    def worked(self) -> None:
        """A step computed something, or has something to tell."""
        self._wait_s = IDLE_S[0]

    def wait(self) -> None:
        """In a step that has nothing to do."""
        self._news.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, IDLE_S[1])


class IOThread(ABC):
    """Subclasses implement `_round` and `_metrics`, and guard what they share with `lock`.

    Args:
        channel: where the metrics go; it is closed at the end.

    Attributes:
        errors: how many exceptions were caught; the thread goes on after each.
        quiet: rate-limited log for lines that peers can cause.
    """

    def __init__(self, name: str, channel: StatsChannel | None = None) -> None:
        self.lock = threading.Lock()
        self.errors = 0
        self.quiet = QuietLog(__name__)
        self._channel, self._published_at = channel, float("-inf")
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._context.setsockopt(zmq.LINGER, 0)
        self._context.setsockopt(zmq.IPV6, 1)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._stop = False
        self._looked_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to serve."""
        self._looked_at = time.monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread look at once."""
        if not self._stop:
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ends the thread and closes its sockets. Idempotent."""
        if self._stop:
            return
        self.wake()
        self._stop = True
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                logger.error("%s did not end within %g s", self._thread.name, STOP_S)
                return
        self._close()
        if self._channel is not None:
            self._channel.close()
        self._context.destroy(linger=0)
        os.close(self._wake_fd)

    def attempt(self, what: str, function: Callable[..., None], *args: object) -> bool:
        """Calls a function for one item; whether it succeeded. An exception is counted and logged."""
        try:
            function(*args)
            return True
        except Exception as error:
            self.errors += 1
            kind = f"{what} {type(error).__name__}"
            self.quiet.exception(kind, f"{self._thread.name}: {what} failed; going on")
            return False

    def _run(self) -> None:
        pause_s = TICK_S
        while not self._stop:
            try:
                served = self.attempt("a round", self._serve)
            except BaseException:
                logger.critical("%s ends: no KV is handed over any more", self._thread.name, exc_info=True)
                raise
            if served:
                pause_s = TICK_S
            elif not self._stop:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, BACKOFF_S)

    def _serve(self) -> None:
        timeout_s = self._timeout_s()
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        now = time.monotonic()
        late_s, self._looked_at = now - self._looked_at - timeout_s, now
        if late_s >= LATE_S:
            text = "%s runs %.1f s late: its process was stopped, or has too little CPU time; leases may end"
            logger.warning(text, self._thread.name, late_s)
        self._round({item for item in ready if isinstance(item, zmq.Socket)}, now)
        if self._channel is not None and now - self._published_at >= PUBLISH_S:
            self._published_at = now
            self._channel.publish(self._metrics())

    def _timeout_s(self) -> float:
        return TICK_S

    @abstractmethod
    def _round(self, ready: set[zmq.Socket[bytes]], now: float) -> None:
        """Something arrived, another thread woke this one, or time passed."""

    @abstractmethod
    def _metrics(self) -> dict[str, int]:
        """What is published, by the keys of the channel's field set."""

    def _close(self) -> None:  # noqa: B027  # most have nothing else to close
        """Lets go of what the subclass opened; the thread has ended."""


def set_options(socket: zmq.Socket[bytes], queue_length: int) -> None:
    """Sets the options of both sides' sockets. queue_length: messages that libzmq keeps, each way."""
    for option, value in (
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.RCVHWM, queue_length),
        (zmq.SNDHWM, queue_length),
        (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S),
    ):
        socket.setsockopt(option, value)


def send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Never blocks. What can't be sent is lost, which the protocol allows for."""
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        logger.debug("message lost: %s", error)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """The next message that has arrived, if there is one."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def connection_name(session: str) -> bytes:
    """A ZeroMQ identity for one connection of a session. Two connections of one name would take each other's
    messages, and an engine may be connected to under several names."""
    return f"{session}/{secrets.token_hex(4)}".encode()


def is_connection_of(identity: bytes, session: str) -> bool:
    """Whether a connection's name is one of a session's."""
    name = session.encode()
    return identity == name or identity.startswith(name + b"/")


def tcp(host: str, port: int) -> str:
    """A ZeroMQ address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
