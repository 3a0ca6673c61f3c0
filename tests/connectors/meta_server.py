"""A stand-in for the proxy's metaserver, as seen by decode."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetaServer(ThreadingHTTPServer):
    """Answers `status` once `gate` is set; the first `dropped` connections are closed without an answer."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.status, self.dropped, self.endless = [], 200, 0, False
        self.gate, self.stopped, self.cut_off = (threading.Event() for _ in range(3))
        self.gate.set()
        self.url = f"http://127.0.0.1:{self.server_port}/v1/metaserver"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.dropped:
            self.server.dropped -= 1
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.server.bodies.append(body)
        self.server.gate.wait(20)
        self.send_response(self.server.status)
        self.end_headers()
        while self.server.endless and not self.server.stopped.is_set():
            try:
                self.wfile.write(bytes(1 << 20))
            except OSError:
                self.server.cut_off.set()
                break

    def log_message(self, *_args):
        pass


@contextmanager
def meta_server() -> Iterator[MetaServer]:
    """A running one."""
    made = MetaServer()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        made.gate.set()
        made.stopped.set()
        made.shutdown()
        made.server_close()
