"""The proxy's process: uvicorn with uvloop and httptools, and a drain before it stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn

from vllm_kvoffload.proxy.app import Handler, ProxyApp
from vllm_kvoffload.proxy.asgi import ClientGone, Receive, Scope, Send, respond_failure
from vllm_kvoffload.proxy.core import logger
from vllm_kvoffload.proxy.errors import HttpFailure
from vllm_kvoffload.proxy.settings import ProxySettings

GRACE = 5  # seconds for answers that are out, but not through, when the drain is over


def _config(app: object, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host,
        port=port,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # the access log has who really called
        timeout_graceful_shutdown=GRACE,
        timeout_keep_alive=30,
        backlog=4096,
    )


class ProxyServer(uvicorn.Server):
    """Drains on the first SIGTERM or SIGINT, stops on the second.

    While it drains, decode engines can still post: requests under way may be waiting for their prefill.
    """

    def __init__(self, app: ProxyApp) -> None:
        super().__init__(_config(app, app.settings.host, app.settings.port))
        self._app = app
        self._drain_until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self._drain_until is None:
            self._drain_until = time.monotonic() + self._app.settings.deadlines.drain
            self._app.drain()
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's clock, ten times a second."""
        if self._drain_until is not None and not self.should_exit:
            overdue = time.monotonic() > self._drain_until
            if overdue:
                logger.warning("proxy: %d requests are cut off by the end", len(self._app.running))
            self.should_exit = self._app.idle or overdue
        return await super().on_tick(counter)


class _SideServer(uvicorn.Server):
    """Some endpoints on a port of their own; signals are the other server's."""

    def __init__(self, app: ProxyApp, endpoint: Handler, port: int) -> None:
        async def side(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await endpoint(scope, receive, send)
            except HttpFailure as failure:
                await respond_failure(send, failure)
            except ClientGone:
                return

        super().__init__(_config(side, app.settings.host, port))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: ProxySettings) -> None:
    """Serves until a signal. Raises ``SystemExit`` where a port is taken."""
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
    """The process: logging, event loop, server."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logger.info(
        "proxy: %s, prefill %s, decode %s, decode engines post to %s",
        f"{settings.host}:{settings.port}",
        ", ".join(map(str, settings.prefillers)) or "none yet",
        ", ".join(map(str, settings.decoders)) or "none yet",
        settings.metaserver_origin,
    )
    # Requests make few cycles, and every token makes objects: the collector need not look so often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    loop_factory = uvicorn.Config("", loop="uvloop").get_loop_factory()
    assert loop_factory is not None
    loop = loop_factory()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(serve(settings))
    finally:
        loop.close()
