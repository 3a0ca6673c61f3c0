"""Decode's HTTP posts to the proxy: one rendezvous per request, and notices of failed receives.

One thread with an event loop serves any number of posts. The proxy answers a rendezvous only after prefill
has finished, so posts are long-lived and must block neither the scheduler nor each other.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from vllm_kvoffload.foreign_text import printable, shown
from vllm_kvoffload.hostnames import HostError
from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.settings.hosts import HostList

logger = get_logger(__name__)

TRIES = 4
BACKOFF_S = 0.2
CONNECT_S = 5.0
STOP_S = 5.0

NOTICE_TRIES = 2
NOTICE_S = 5.0
"""Deadline of a failure notice including retries: the proxy waits about a second for one."""

MAX_NOTICES = 256
"""Maximum failure notices in flight; further ones are dropped, since the request fails regardless."""

MAX_CONNECTIONS = 2048
"""Maximum concurrent connections; less if a quarter of the process's open-file limit is less."""

MAX_URL = 2048
MAX_ERROR = 200
"""Maximum length of a library's error message, which may quote a server's output."""

LOOKUPS = 4
"""Threads that look up known names, and the same number for names not resolved before."""


class RendezvousError(ValueError):
    """The address must not be used."""


def check_url(url: object, hosts: HostList) -> str:
    """Returns the URL, rebuilt from its parts. Raises RendezvousError if it is not http or its host is not
    listed."""
    if not isinstance(url, str) or len(url) > MAX_URL or not url.isascii() or not url.isprintable():
        raise RendezvousError(f"{shown(url)} is no http address")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RendezvousError(f"{shown(url)} is no http address") from error
    plain = not set(url) & set(' "<>\\^`{|}') and "@" not in parts.netloc and not parts.fragment
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain or port == 0:
        raise RendezvousError(f"{shown(url)} is no http address")
    try:
        host = hosts.check(parts.hostname)
    except HostError as error:
        raise RendezvousError(f"{shown(url)}: {error}") from error
    place = f"[{host}]" if ":" in host else host
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{place}{'' if port is None else f':{port}'}{parts.path or '/'}{query}"


class Rendezvous:
    """Posts in flight. deadline_s: longest time for one, including retries and the wait for prefill."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._posts: dict[str, Future[None]] = {}
        self._notices: set[Future[None]] = set()
        self._answers: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._log = RateLimitedLog(__name__)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._session: Any = None
        self._lookups: list[ThreadPoolExecutor] = []

    def post(self, req_id: str, url: str, body: Mapping[str, Any]) -> None:
        """Starts a post. `take_answers` returns its result later."""
        loop = self._started()
        self._posts[req_id] = asyncio.run_coroutine_threadsafe(self._run(req_id, url, dict(body)), loop)

    def notify(self, url: str, body: Mapping[str, Any]) -> bool:
        """Starts a post whose answer is ignored; returns False if too many are in flight."""
        self._notices = {notice for notice in self._notices if not notice.done()}
        if len(self._notices) >= MAX_NOTICES:
            return False
        loop = self._started()
        self._notices.add(asyncio.run_coroutine_threadsafe(self._tell(url, dict(body)), loop))
        return True

    def cancel(self, req_id: str) -> None:
        """Cancels a post; it is not reported."""
        post = self._posts.pop(req_id, None)
        if post is not None:
            post.cancel()

    def take_answers(self) -> list[tuple[str, str]]:
        """Returns (request, "" or an error) of the posts that ended since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return [(req_id, error) for req_id, error in answers if self._posts.pop(req_id, None) is not None]

    @property
    def num_posts(self) -> int:
        """Number of posts whose answer has not been taken."""
        return len(self._posts)

    def close(self) -> None:
        """Cancels all posts and stops the thread."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        for req_id in list(self._posts):
            self.cancel(req_id)
        for notice in self._notices:
            notice.cancel()
        self._notices.clear()
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._close_session(), loop)
            thread.join(STOP_S)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            loop.set_exception_handler(_log_error)
            thread = threading.Thread(
                target=self._serve, args=(loop,), name="kvoffload-rendezvous", daemon=True
            )
            thread.start()
            self._loop, self._thread = loop, thread
        return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            try:
                loop.run_forever()
                break
            except BaseException:
                # A BaseException leaves the loop even from a task; the other posts must continue.
                logger.exception("kvoffload-rendezvous: going on after an error")
                if loop.is_closed():
                    break
                time.sleep(BACKOFF_S)
        for lookups in self._lookups:
            lookups.shutdown(wait=False, cancel_futures=True)
        loop.close()

    async def _close_session(self) -> None:
        try:
            session, self._session = self._session, None
            if session is not None:
                await session.close()
        finally:
            asyncio.get_running_loop().stop()

    async def _run(self, req_id: str, url: str, body: dict[str, Any]) -> None:
        error = await self._attempts(url, body, TRIES, self._deadline_s)
        if error:
            where = urlsplit(url).netloc
            self._log.warning(f"{where}: {error}", f"rendezvous of {shown(req_id)} at {where}: {error}")
        with self._lock:
            self._answers.append((req_id, error))

    async def _tell(self, url: str, body: dict[str, Any]) -> None:
        error = await self._attempts(url, body, NOTICE_TRIES, NOTICE_S)
        if error:
            logger.debug("failure notice to %s: %s", urlsplit(url).netloc, error)

    async def _attempts(self, url: str, body: dict[str, Any], tries: int, deadline_s: float) -> str:
        try:
            return await asyncio.wait_for(self._tries(url, body, tries), deadline_s)
        except (asyncio.TimeoutError, TimeoutError):
            return f"the metaserver did not answer within {deadline_s:g} s"
        except asyncio.CancelledError:
            raise
        except Exception as unexpected:
            logger.exception("post to %s", urlsplit(url).netloc)
            return f"posting to the metaserver failed: {type(unexpected).__name__}"

    async def _tries(self, url: str, body: dict[str, Any], tries: int) -> str:
        import aiohttp

        if self._session is None:
            self._session = self._make_session()
        error = ""
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2**attempt)
            try:
                async with self._session.post(url, json=body, allow_redirects=False) as answer:
                    if answer.status < 300:
                        return ""
                    return f"the metaserver answered {answer.status}"
            except aiohttp.InvalidURL:
                return "the metaserver's address can't be used"
            except aiohttp.ClientConnectorError as refused:
                error = f"the metaserver can't be reached: {printable(str(refused), MAX_ERROR)}"
            except aiohttp.ClientError as broken:
                error = f"the connection to the metaserver broke: {printable(repr(broken), MAX_ERROR)}"
        return error

    def _make_session(self) -> Any:
        """A server costs at most one connection until the deadline: only the head of its answer is used."""
        import aiohttp

        most = min(MAX_CONNECTIONS, max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._lookups = [ThreadPoolExecutor(LOOKUPS, f"kvoffload-names-{n}") for n in range(2)]
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(
                limit=most, limit_per_host=most // 2, resolver=_resolver(*self._lookups)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=4096,
        )


def _resolver(known: ThreadPoolExecutor, new: ThreadPoolExecutor) -> Any:
    """Resolves names on threads, such that unknown names cannot delay known ones."""
    import socket

    from aiohttp import ThreadedResolver

    class Resolver(ThreadedResolver):
        def __init__(self) -> None:
            super().__init__()
            self._found: set[str] = set()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> Any:
            look_up = partial(
                socket.getaddrinfo, host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            threads = known if host in self._found else new
            lines = await asyncio.get_running_loop().run_in_executor(threads, look_up)
            self._found.add(host)
            numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
            return [
                {
                    "hostname": host,
                    "host": where[0],
                    "port": where[1],
                    "family": found,
                    "proto": proto,
                    "flags": numeric,
                }
                for found, _, proto, _, where in lines
            ]

    return Resolver()


def _log_error(_loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    logger.error(
        "kvoffload-rendezvous: %s", context.get("message", "an error"), exc_info=context.get("exception")
    )
