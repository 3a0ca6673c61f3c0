"""State shared by all requests of a proxy, and the trace of each request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.proxy.balance import Pool
from vllm_kvoffload.proxy.budget import ByteBudget
from vllm_kvoffload.proxy.errors import UpstreamError
from vllm_kvoffload.proxy.http_client import Client, EngineConnection
from vllm_kvoffload.proxy.metrics import Metrics
from vllm_kvoffload.proxy.rendezvous import PendingRendezvous
from vllm_kvoffload.proxy.settings import Address, ProxySettings

logger = get_logger(__name__)
CONTROL_LIMIT = 64 << 20  # limit for answers to short requests; /tokenize has the longest
FORWARDED_SHARE = 4  # of the bytes that may be held, the part for such answers: short texts make long ones


@dataclass
class Trace:
    """A client request's record for the access log and metrics. Times in seconds of the monotonic clock."""

    method: str
    path: str
    request_id: str
    client: str = "-"
    began: float = field(default_factory=time.monotonic)
    first_output: float | None = None
    status: int = 0
    sub_requests: int = 1
    sent_bytes: int = 0
    retries: int = 0
    recomputes: int = 0
    prefill: str = "-"
    decode: str = "-"
    end: str = "ok"

    def line(self) -> str:
        """Returns the access log line."""
        first = "-" if self.first_output is None else f"{1e3 * (self.first_output - self.began):.1f}"
        total = 1e3 * (time.monotonic() - self.began)
        return (
            f"{self.request_id} {self.client} {self.method} {self.path} {self.status} {self.end}"
            f" first_ms={first} total_ms={total:.1f} bytes={self.sent_bytes} sub_requests={self.sub_requests}"
            f" prefill={self.prefill} decode={self.decode} retries={self.retries}"
            f" recomputes={self.recomputes}"
        )


class Core:
    """Settings, engines, connections, expected posts and background tasks of one proxy."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.prefillers = Pool("prefill", settings.prefillers)
        self.decoders = Pool("decode", settings.decoders)
        self.rendezvous = PendingRendezvous()
        self.posts_to = settings.metaserver, settings.failures  # built once: every request contains them
        self.held = ByteBudget(settings.max_held_bytes)
        self.answers = ByteBudget(settings.max_held_bytes // FORWARDED_SHARE)  # of requests without KV
        shortest = min(vars(settings.deadlines).values())
        tls = settings.engine_tls.context() if settings.engine_tls is not None else None
        self.client = Client(settings.deadlines.connect, tick=min(0.5, shortest / 4), tls=tls)
        self.metrics = Metrics((self.prefillers, self.decoders), time.monotonic, self.held)
        self.draining = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pools(self) -> tuple[Pool, Pool]:
        """Prefill and decode pools."""
        return self.prefillers, self.decoders

    @property
    def background(self) -> int:
        """Number of background tasks."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs ``work`` in the background; exceptions are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("proxy: a background task failed", exc_info=error)

    async def exchange(
        self,
        address: Address,
        method: str,
        path: str,
        *,
        body: bytes | Callable[[], bytes] = b"",
        headers: Sequence[tuple[str, str]] = (),
        first: float,
        idle: float,
        hold: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> EngineConnection:
        """Sends a request and returns once its answer has started. Raises ``UpstreamError``.

        ``body``: bytes, or a function that builds them, so that they need not be kept; ``hold``: entered
        while sending.

        An engine may close an idle connection just as a request is sent on it; that request is sent once
        more on a new connection.
        """
        fresh = False
        while True:
            try:
                async with hold():
                    connection = await self.client.request(
                        address,
                        method,
                        path,
                        body=body() if callable(body) else body,
                        headers=headers,
                        first=first,
                        idle=idle,
                        fresh=fresh,
                    )
            except UpstreamError as error:
                error.sent = error.sent or fresh
                raise
            try:
                await connection.start()
            except UpstreamError as error:
                connection.close()
                if not connection.reused or error.deadline or error.down or fresh:
                    raise
                fresh = True
                continue
            except BaseException:
                connection.close()
                raise
            return connection

    async def control(
        self,
        address: Address,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
        seconds: float | None = None,
    ) -> tuple[int, bytes, bytes]:
        """Returns status, body and content type of a short request. Raises ``UpstreamError``."""
        seconds = self.settings.deadlines.control if seconds is None else seconds
        connection = await self.exchange(
            address, method, path, body=body, headers=headers, first=seconds, idle=seconds
        )
        try:
            body = await connection.read_all(CONTROL_LIMIT)
            return connection.status, body, connection.header(b"content-type")
        finally:
            connection.close()

    async def close(self) -> None:
        """Stops background tasks and closes connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.client.close()
