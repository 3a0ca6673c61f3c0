"""A stand-in for `vllm serve` that the demo's tests start: python fake_server.py PORT [option ...].

Options: "slow" is never ready, "dies" ends at once with status 7, "stubborn" ignores SIGTERM, "children" has
a child in a session of its own, "leaks" maps and leaves a file in /dev/shm, "different" answers other tokens,
"refuses" answers 503, "offload" has more KV tokens, "stores" has too, and found more in its store whenever it
is asked.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

METRICS = """# HELP vllm:cache_config_info about
vllm:cache_config_info{block_size="64",kv_cache_size_tokens="%d"} 1.0
vllm:kvoffload_hits_total{engine="0",rank="0"} 9.0
vllm:kvoffload_misses_total{engine="0",rank="0"} 1.0
vllm:kvoffload_device_bytes{engine="0",rank="0"} 1e+06
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 30.0
"""
STORE_METRICS = """vllm:kvoffload_store_hit_tokens_total{engine="0",rank="0"} %(reads)d00.0
vllm:kvoffload_store_loaded_bytes_total{engine="0",rank="0"} %(reads)de+06
vllm:kvoffload_store_needed_bytes_total{engine="0",rank="0"} %(reads)de+06
"""


class Handler(BaseHTTPRequestHandler):
    options: frozenset[str] = frozenset()
    reads = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._reply(503 if "slow" in self.options else 200, b"")
        text = METRICS % (1000 if self.options.isdisjoint({"offload", "stores"}) else 4000)
        if "stores" in self.options:
            Handler.reads += 1
            text += STORE_METRICS % {"reads": Handler.reads}
        return self._reply(200, text.encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "refuses" in self.options:
            return self._reply(503, b"no engine")
        tokens = list(range(request["max_tokens"]))
        if "different" in self.options:
            tokens[-1] += 1
        chat = "messages" in request
        choice: dict[str, Any] = {"token_ids": tokens, "text": "ok", "finish_reason": "length"}
        values = [-0.5] * len(tokens)
        choice["logprobs"] = (
            {"content": [{"logprob": v} for v in values]} if chat else {"token_logprobs": values}
        )
        whole = {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": len(tokens)}}
        if not request["stream"]:
            return self._reply(200, json.dumps(whole).encode())
        return self._reply(200, f": hello\n\ndata: {json.dumps(whole)}\n\ndata: [DONE]\n\n".encode())

    def _reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def main(port: int, options: frozenset[str]) -> None:
    print("fake server with", *sorted(options), flush=True)
    if "dies" in options:
        sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in options else lambda *_: sys.exit(0))
    if "children" in options:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        Path(f"child-{port}.pid").write_text(str(child.pid))
    if "leaks" in options:
        fd = os.open(f"/dev/shm/kvoffload-test-{os.getpid()}", os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(fd, 4096)
        Handler.mapped = mmap.mmap(fd, 4096)  # type: ignore[attr-defined]
    Handler.options = options
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), frozenset(sys.argv[2:]))
