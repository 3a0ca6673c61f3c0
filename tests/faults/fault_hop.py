"""Sits between decode's rendezvous posts and the proxy: redirects prefill to the relay, delays or alters
posts.

The proxy is started with `--advertise-host 127.0.0.2` and listens at 127.0.0.1 only, so that the same port of
127.0.0.2 is free for the hop.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.2"
PROXY = "127.0.0.1"
FORWARD_S = 120.0
FAILED = "/failed"
"""Notices of failed requests, which are passed on as they are."""


@dataclass(eq=False)
class Plan:
    """Rules for the posts of one request.

    status: answered instead of the proxy, 0 for the connection's end without an answer; None: the proxy is
    asked. lose_answer: the proxy's first answer is not told. changes: fields of the message.
    arrived: set by the first post. go: nothing happens before it is set.
    """

    status: int | None = None
    lose_answer: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    arrived: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    posts: int = 0


def _passing() -> Plan:
    plan = Plan()
    plan.go.set()
    return plan


class Hop:
    """Serves at HOST:port for the proxy at PROXY:port."""

    def __init__(self, port: int, relay_port: int) -> None:
        self._port, self._relay_port = port, relay_port
        self.secret = ""
        """Of decode's start, as the last rendezvous told it."""
        self._next: deque[Plan] = deque()
        self._plans: dict[str, Plan] = {}
        self._lock = threading.Lock()

    def plan(self, hold: bool = False, **what: Any) -> Plan:
        """For the next request that posts."""
        made = Plan(**what) if hold else replace(_passing(), **what)
        with self._lock:
            self._next.append(made)
        return made

    @property
    def planned(self) -> int:
        """Plans that wait for their request."""
        with self._lock:
            return len(self._next)

    def release_all(self) -> None:
        """Nothing is held, and nothing planned, any more."""
        with self._lock:
            for plan in [*self._plans.values(), *self._next]:
                plan.go.set()
            self._plans.clear()
            self._next.clear()

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        hop = self

        class Handler(BaseHTTPRequestHandler):  # HTTP/1.0: no connection stays open
            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = hop.answer(message, self.path)
                if status:
                    self.send_response(status)
                    self.send_header("Content-Length", "0")
                    self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_args: Any) -> None:  # decode went away meanwhile
                pass

        server = Server((HOST, self._port), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.release_all()
            server.shutdown()
            server.server_close()
            thread.join(5)

    def answer(self, message: dict[str, Any], path: str) -> int:
        """Status of a post, 0 for none."""
        if path.endswith(FAILED):
            return self._pass_on(message, path)
        self.secret = message.get("remote_secret", "")
        plan = self._plan_of(message["request_id"])
        plan.arrived.set()
        plan.go.wait(FORWARD_S)
        if plan.status is not None:
            return plan.status
        status = self._pass_on({**message, "remote_port": self._relay_port, **plan.changes}, path)
        return 0 if plan.lose_answer and plan.posts == 1 else status

    def _pass_on(self, message: dict[str, Any], path: str) -> int:
        connection = http.client.HTTPConnection(PROXY, self._port, timeout=FORWARD_S)
        try:
            connection.request("POST", path, json.dumps(message), {"Content-Type": "application/json"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def _plan_of(self, request_id: str) -> Plan:
        with self._lock:
            plan = self._plans.get(request_id)
            if plan is None:
                plan = self._next.popleft() if self._next else _passing()
                self._plans[request_id] = plan
            plan.posts += 1
            return plan
