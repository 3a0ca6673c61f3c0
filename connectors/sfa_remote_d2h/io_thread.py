"""Base of the threads that own sockets and drive a state machine's clock; other threads only wake them."""

from __future__ import annotations

import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from vllm_kvoffload.connectors.sfa_remote_d2h.wire import MAX_FRAME_BYTES
from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.metrics import StatsChannel

logger = get_logger(__name__)

TICK_S = 0.1
STOP_S = 5.0
BACKOFF_S = 1.0
"""Longest pause after a round that raised an error; the pause doubles with each error in a row."""

MAX_SOCKETS = 8192
"""Per context; libzmq's default limit is 1023."""

HANDSHAKE_MS = 5000
KEEPALIVE_S = 60

LATE_S = 1.0
"""The thread logs a delay of more than this, since leases may expire meanwhile."""

PUBLISH_S = 0.05
"""Shortest time between two publications of metrics: with reads in flight there is a round every
millisecond."""


IDLE_S = (0.001, 0.01)
"""First and longest wait of a step that computes nothing; the wait doubles with each such step."""


class Idle:
    """Lets an engine that only waits for its peer sleep briefly instead of running empty steps.

    Without it such an engine would run one step after the other on all its cores, because its processes
    spin while they wait for each other. The wait is short because a new request is noticed only at its
    end.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._wait_s = IDLE_S[0]

    def tell(self) -> None:
        """Signals that there is a result for the engine, which ends a wait."""
        self._news.set()

    def begin(self) -> None:
        """Call before checking for results: a signal after this call ends the next wait."""
        self._news.clear()

    def worked(self) -> None:
        """The step computed something or has a result: the next wait is short again."""
        self._wait_s = IDLE_S[0]

    def wait(self) -> None:
        """Waits in a step that has no work."""
        self._news.wait(self._wait_s)
        self._wait_s = min(2 * self._wait_s, IDLE_S[1])


class IOThread(ABC):
    """Runs a thread. Subclasses implement `_round` and `_metrics`, and guard shared state with `lock`.

    Args:
        channel: receives the metrics; closed at the end.

    Attributes:
        errors: number of exceptions caught; the thread continues after each.
        limited_log: rate-limited log for lines that peers can trigger.
    """

    def __init__(self, name: str, channel: StatsChannel | None = None) -> None:
        self.lock = threading.Lock()
        self.errors = 0
        self.limited_log = RateLimitedLog(__name__)
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
        """Starts the thread."""
        self._looked_at = time.monotonic()
        self._thread.start()

    def wake(self) -> None:
        """Makes the thread run a round at once."""
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
        """Calls a function for one item and returns whether it succeeded. Exceptions are counted and
        logged."""
        try:
            function(*args)
            return True
        except Exception as error:
            self.errors += 1
            kind = f"{what} {type(error).__name__}"
            self.limited_log.exception(kind, f"{self._thread.name}: {what} failed; going on")
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
        """Runs one round: a message arrived, another thread woke this one, or time passed."""

    @abstractmethod
    def _metrics(self) -> dict[str, int]:
        """Returns the metrics to publish, by the keys of the channel's field set."""

    def _close(self) -> None:  # noqa: B027  # most subclasses have nothing else to close
        """Releases the subclass's resources after the thread has ended."""


def set_options(socket: zmq.Socket[bytes], queue_length: int) -> None:
    """Sets the socket options shared by both sides. queue_length: messages that libzmq queues in each
    direction."""
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
    """Sends without blocking. Messages that cannot be sent are lost, which the protocol tolerates."""
    try:
        socket.send_multipart(frames, flags=zmq.NOBLOCK)
    except zmq.ZMQError as error:
        logger.debug("message lost: %s", error)


def receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    """Returns the next message that has arrived, None if there is none."""
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def connection_name(session: str) -> bytes:
    """Returns a ZeroMQ identity for one connection of a session. Connections with equal names would take
    each other's messages, and an engine may be reached under several names."""
    return f"{session}/{secrets.token_hex(4)}".encode()


def is_connection_of(identity: bytes, session: str) -> bool:
    """Whether a connection's name belongs to a session."""
    name = session.encode()
    return identity == name or identity.startswith(name + b"/")


def tcp(host: str, port: int) -> str:
    """Formats a ZeroMQ address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
