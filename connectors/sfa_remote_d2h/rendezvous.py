"""Decode's posts to the proxy's metaserver: one thread with an event loop, for any number of them.

The proxy answers when prefill is through, so posts last; none may block the scheduler or another post.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from vllm_kvoffload.log import get_logger

logger = get_logger(__name__)

TRIES = 4
BACKOFF_S = 0.2
CONNECT_S = 5.0
STOP_S = 5.0


class RendezvousError(ValueError):
    """A metaserver address that must not be used."""


def check_url(url: object, hosts: tuple[str, ...]) -> str:
    """The address, if it is one. hosts: those allowed, empty for any. Raises RendezvousError."""
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise RendezvousError(f"metaserver {url!r} is no http address")
    if hosts and parts.hostname not in hosts:
        raise RendezvousError(f"metaserver host {parts.hostname} is not in metaserver_hosts")
    return parts.geturl()


class Rendezvous:
    """Posts in flight. deadline_s: longest time for one, tries and waiting for prefill included."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._posts: dict[str, Future[None]] = {}
        self._answers: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: Any = None

    def post(self, req_id: str, url: str, body: Mapping[str, Any]) -> None:
        """Starts a post. Its answer is among `take_answers` later."""
        loop = self._started()
        self._posts[req_id] = asyncio.run_coroutine_threadsafe(self._run(req_id, url, dict(body)), loop)

    def cancel(self, req_id: str) -> None:
        """Ends a post; nothing is told about it any more."""
        post = self._posts.pop(req_id, None)
        if post is not None:
            post.cancel()

    def take_answers(self) -> list[tuple[str, str]]:
        """(request, "" or an error) of the posts that ended since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return [(req_id, error) for req_id, error in answers if self._posts.pop(req_id, None) is not None]

    @property
    def num_posts(self) -> int:
        """Posts whose answer was not taken yet."""
        return len(self._posts)

    def close(self) -> None:
        """Ends all posts and the thread."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        for req_id in list(self._posts):
            self.cancel(req_id)
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._close_session(), loop)
            thread.join(STOP_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._serve, args=(self._loop,), name="kvoffload-rendezvous", daemon=True
            )
            self._thread.start()
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.close()

    async def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        asyncio.get_running_loop().stop()

    async def _run(self, req_id: str, url: str, body: dict[str, Any]) -> None:
        try:
            error = await asyncio.wait_for(self._tries(url, body), self._deadline_s)
        except (asyncio.TimeoutError, TimeoutError):
            error = f"the metaserver did not answer within {self._deadline_s:g} s"
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            logger.exception("rendezvous of %s", req_id)
            error = repr(unexpected)
        if error:
            logger.warning("rendezvous of %s at %s: %s", req_id, url, error)
        with self._lock:
            self._answers.append((req_id, error))

    async def _tries(self, url: str, body: dict[str, Any]) -> str:
        import aiohttp

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        error = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2**attempt)
            try:
                async with self._session.post(url, json=body, allow_redirects=False) as answer:
                    if answer.status < 300:
                        return ""
                    return f"the metaserver answered {answer.status}"
            except aiohttp.ClientConnectorError as refused:
                error = f"the metaserver can't be reached: {refused}"
            except aiohttp.ClientError as broken:
                error = f"the connection to the metaserver broke: {broken!r}"
        return error
