"""A prefill server, a decode server, and as much of a proxy as it takes to bring a request to both."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import MODEL_NAME, Server, ServerOptions, command_line, free_port

CONNECTOR = "SfaRemoteD2HConnector"
LEASE_S = 5.0
REQUEST_S = 60.0
READY_S = 240.0


def transfer_config(role: str, port: int, lease_s: float = LEASE_S, **options: Any) -> str:
    extra = {"transfer_backend": "nixl", "use_layerwise": True, "lease_s": lease_s, "request_s": REQUEST_S}
    fields = {"kv_connector": CONNECTOR, "kv_role": role, "kv_port": port, "kv_connector_extra_config": extra}
    return json.dumps({**fields, **options})


@dataclass
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> list[str]:
        return self.body["choices"][0]["logprobs"]["tokens"]

    @property
    def logprobs(self) -> list[float]:
        return self.body["choices"][0]["logprobs"]["token_logprobs"]

    @property
    def finish_reason(self) -> str:
        return self.body["choices"][0]["finish_reason"]


def post(
    port: int, path: str, body: dict[str, Any], headers: dict[str, str], timeout_s: float = 120
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        content = {"Content-Type": "application/json", **headers}
        connection.request("POST", path, json.dumps(body), content)
        answer = connection.getresponse()
        text = answer.read()
        return Answer(answer.status, json.loads(text) if text else {})
    finally:
        connection.close()


def metric(port: int, name: str) -> float:
    """Sum of a metric's samples."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


@dataclass
class MetaServer:
    """Sends the prompt of a posted request to prefill, and answers when that is through.

    hold: prefill is not asked while it is cleared. messages: what decode posted.
    """

    prefill_port: int
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    hold: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.hold.set()

    @contextmanager
    def serve(self):
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(owner.dispatch(message))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/metaserver"
        finally:
            server.shutdown()
            server.server_close()

    def dispatch(self, message: dict[str, Any]) -> int:
        self.messages.append(message)
        parent = message["request_id"].removeprefix("cmpl-").rsplit("-", 1)[0]
        if parent not in self.bodies:
            return 404
        self.hold.wait(60)
        body = {**self.bodies[parent], "max_tokens": 1, "kv_transfer_params": message}
        try:
            answer = post(self.prefill_port, "/v1/completions", body, {"X-Request-Id": parent})
        except OSError:
            return 502
        return 200 if answer.status == 200 else 502


class Pair:
    """Both servers. `prefill` and `decode` may be stopped and started again on their ports.

    tp_sizes: of prefill and decode. arguments: of both. options: fields of their `--kv-transfer-config`.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        url: str,
        ports: tuple[int, int, int],
        *,
        tp_sizes: tuple[int, int] = (1, 1),
        arguments: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self._tp_sizes, self._arguments = tp_sizes, arguments
        self._checkpoint, self._folder, self._url = checkpoint, folder, url
        self.prefill_port, self.decode_port, self.kv_port = ports
        self.meta: MetaServer
        self._options = options
        self._starts = 0

    def _server(self, role: str, port: int, tp_size: int, offload: dict[str, Any] | None) -> Server:
        self._starts += 1
        options = ServerOptions(
            self._checkpoint,
            32 << 20,
            port,
            offload,
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=256,
        )
        command = [
            *command_line(options),
            "--kv-transfer-config",
            transfer_config(role, self.kv_port, **self._options),
            "--tensor-parallel-size",
            str(tp_size),
            *self._arguments,
        ]
        return Server(command, self._folder / f"{role}-{self._starts}.log", port)

    def start_prefill(self) -> Server:
        self.prefill = self._server("kv_producer", self.prefill_port, self._tp_sizes[0], None)
        return self.prefill

    def start_decode(self) -> Server:
        offload = {"topk_buffer_size": 128, "dram_size_per_dp_GB": 1}
        self.decode = self._server("kv_consumer", self.decode_port, self._tp_sizes[1], offload)
        return self.decode

    def ask(self, prompt: list[int], max_tokens: int = 12, timeout_s: float = 120) -> Answer:
        """Through decode, whose KV comes from prefill."""
        parent = uuid.uuid4().hex
        body = completion(prompt, max_tokens)
        self.meta.bodies[parent] = body
        params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": self._url}
        sent = {**body, "kv_transfer_params": params}
        return post(self.decode_port, "/v1/completions", sent, {"X-Request-Id": parent}, timeout_s)

    def reference(self, prompt: list[int], max_tokens: int = 12) -> Answer:
        """From the prefill server alone, which is an engine without offload."""
        return post(self.prefill_port, "/v1/completions", completion(prompt, max_tokens), {})


def kill(server: Server, sig: int = signal.SIGKILL) -> None:
    """To the server and everything that it started."""
    for process in session_and_descendants(server.pid):
        os.kill(process.pid, sig)


@contextmanager
def pair(checkpoint: Path, folder: Path, **options: Any):
    """A running pair; options as for :class:`Pair`."""
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    os.environ["OMP_NUM_THREADS"] = "1"  # two engines share few cores with the tests
    prefill_port, decode_port = free_port(), free_port()
    meta = MetaServer(prefill_port)
    with ExitStack() as stack:
        url = stack.enter_context(meta.serve())
        made = Pair(checkpoint, folder, url, (prefill_port, decode_port, free_port()), **options)
        made.meta = meta
        stack.callback(lambda: [server.stop(20) for server in (made.prefill, made.decode)])
        made.start_prefill(), made.start_decode()
        for server in (made.prefill, made.decode):
            server.wait_ready(READY_S)
        yield made
