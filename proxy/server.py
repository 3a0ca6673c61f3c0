"""The proxy's process: uvicorn with uvloop and httptools, and a drain before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from vllm_kvoffload.proxy.app import Handler, ProxyApp
from vllm_kvoffload.proxy.asgi import Receive, Scope, Send
from vllm_kvoffload.proxy.core import logger
from vllm_kvoffload.proxy.edge import edge
from vllm_kvoffload.proxy.settings import ProxySettings

HANDSHAKE = 10.0  # seconds for a client's TLS handshake
GRACE = 5  # seconds after the drain for answers that are not completely sent


def _config(app: Any, host: str, port: int, settings: ProxySettings | None = None) -> uvicorn.Config:
    """``settings``: if ``app`` is not a ``ProxyApp``, which has its own."""
    settings = settings or app.settings
    assert settings is not None
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=edge(settings),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the access log shows the direct peer
        timeout_graceful_shutdown=GRACE,
        timeout_keep_alive=30,
        backlog=4096,
    )
    config.load()
    if settings.tls is not None:
        config.ssl = settings.tls.context()
    return config


class Loop(uvloop.Loop):
    """uvloop with a short TLS handshake deadline: connections are not counted before it ends."""

    async def create_server(self, *arguments: Any, **options: Any) -> Any:
        """Same as asyncio's."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE
        return await super().create_server(*arguments, **options)


def raise_descriptor_limit(connections: int) -> None:
    """Raises the soft limit of open files as far as needed and allowed; warns if that is not enough.

    A request uses up to four descriptors: its client, decode, prefill, and decode's post.
    """
    needed = 4 * connections + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    reached = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < needed:
        logger.warning(
            "proxy: %d files can be open, and --max-connections %d may need %d; raise `ulimit -n`,"
            " or lower --max-connections to %d",
            soft,
            connections,
            needed,
            max(1, (soft - 256) // 4),
        )


class _Lines(logging.Formatter):
    """The standard log format; formats each second's timestamp once, since every request logs a line."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._text = time.strftime("%Y-%m-%d %H:%M:%S", self.converter(second))
        return f"{self._text},{int(record.msecs):03d}"


def _set_up_logging() -> None:
    """Logs ``INFO`` and above to stderr, without collecting unused record fields."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # As in "Optimization" of Python's logging HOWTO: caller, thread and process of a record.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class ProxyServer(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT, stops on the second.

    While draining, decode engines can still post: running requests may await their prefill.
    """

    def __init__(self, app: ProxyApp) -> None:
        super().__init__(_config(app, app.settings.host, app.settings.port))
        self._app = app
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._app.settings.deadlines.drain
            self._app.drain()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn's clock, ten times a second."""
        if self._drain_until is not None and not self.should_exit:
            overdue = time.monotonic() > self._drain_until
            if overdue:
                logger.warning("proxy: %d requests are cut off by the end", len(self._app.running))
            self.should_exit = self._app.idle or overdue
        return await super().on_tick(counter)


class _SideServer(uvicorn.Server):
    """Serves some endpoints on a port of their own; the main server handles signals."""

    def __init__(self, app: ProxyApp, endpoint: Handler, port: int) -> None:
        async def side(scope: Scope, receive: Receive, send: Send) -> None:
            await app.guarded(endpoint, scope, receive, send)

        super().__init__(_config(side, app.settings.host, port, app.settings))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ProxySettings) -> None:
    """Serves until a signal. Raises ``SystemExit`` if a port is taken."""
    app = ProxyApp(settings)
    server = ProxyServer(app)
    app.start()
    sides = [
        _SideServer(app, endpoint, port)
        for endpoint, port in ((app.admin, settings.admin_port), (app.metaserver, settings.metaserver_port))
        if port is not None
    ]
    side_tasks = [asyncio.create_task(side.serve()) for side in sides]
    try:
        await server.serve()
    finally:
        for side in sides:
            side.should_exit = True
        await asyncio.gather(*side_tasks, return_exceptions=True)
        await app.stop()


def run(settings: ProxySettings) -> None:
    """Runs the process: logging, event loop, server."""
    _set_up_logging()
    logger.info(
        "proxy: %s, prefill %s, decode %s, decode engines post to %s",
        f"{settings.scheme}://{settings.host}:{settings.port}",
        ", ".join(map(str, settings.prefillers)) or "none yet",
        ", ".join(map(str, settings.decoders)) or "none yet",
        settings.metaserver_origin,
    )
    # Requests create few cycles, and every token creates objects: collect garbage less often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    raise_descriptor_limit(settings.limits.connections)
    loop = Loop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve(settings))
    finally:
        loop.close()
