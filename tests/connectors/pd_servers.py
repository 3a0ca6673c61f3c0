"""Starts prefill servers, decode servers and proxies: the real programs, in any number."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from vllm_kvoffload.demo.client import events, read_metrics
from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import (
    HOST,
    MODEL_NAME,
    Server,
    ServerOptions,
    command_line,
    free_ports,
    proxy_command,
    transfer_options,
)

LEASE_S = 5.0
REQUEST_S = 60.0
READY_S = 300.0
TOLERANCE = 1e-4
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

Topologies = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Proxies by name: the numbers of their prefill servers and of their decode servers."""


@dataclass(frozen=True)
class Engine:
    """How one server is started. transfer: fields of `--kv-transfer-config`."""

    tp_size: int = 1
    arguments: tuple[str, ...] = ()
    transfer: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    """Returns status and body; a stream's events are merged into an unstreamed answer."""

    status: int
    body: dict[str, Any]

    @property
    def choice(self) -> dict[str, Any]:
        return self.body["choices"][0]

    @property
    def tokens(self) -> list[str]:
        return self.choice["logprobs"]["tokens"]

    @property
    def cached_tokens(self) -> int:
        return (self.body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def completion(prompt: Any, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    """A greedy completion with logprobs, whose tokens are shown as ids."""
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def chat(text: str, max_tokens: int = 12, **more: Any) -> dict[str, Any]:
    """The same as a chat."""
    body = completion(None, max_tokens, logprobs=True, top_logprobs=2, **more)
    messages = [{"role": "system", "content": "Answer from the text."}, {"role": "user", "content": text}]
    return {**{key: value for key, value in body.items() if key != "prompt"}, "messages": messages}


def path_of(body: Mapping[str, Any]) -> str:
    return CHATS if "messages" in body else COMPLETIONS


def post(
    port: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Answer:
    """Sends a request and waits for all of its answer."""
    url = f"http://{HOST}:{port}{path_of(body)}"
    answer = httpx.post(url, json=body, headers=dict(headers or {}), timeout=timeout_s)
    if answer.status_code == 200 and body.get("stream"):
        return Answer(200, folded(answer.content))
    return Answer(answer.status_code, answer.json() if answer.content else {})


def folded(stream: bytes) -> dict[str, Any]:
    """Merges the events of a stream into the form of an unstreamed answer."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    found = list(events(stream.splitlines(keepends=True)))
    assert found[-1] == "[DONE]", found[-1]
    for data in found[:-1]:
        event = json.loads(data)
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            _append(choices.setdefault(piece["index"], {"index": piece["index"]}), piece)
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def _append(choice: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Adds an event's piece to a choice: texts and lists grow, the rest is replaced."""
    for key, value in piece.items():
        target = "message" if key == "delta" else key
        if value is None:
            choice.setdefault(target, None)
        elif isinstance(value, dict) and target in ("message", "logprobs"):
            if choice.get(target) is None:
                choice[target] = {}
            _append(choice[target], value)
        elif isinstance(value, (str, list)) and choice.get(target) and target not in LATEST:
            choice[target] = choice[target] + value
        else:
            choice[target] = value


LATEST = ("role", "finish_reason", "index", "stop_reason")
NOT_COMPARED = {"id", "created", "kv_transfer_params", "system_fingerprint", "prompt_tokens_details"}


def check_same(answer: Answer, reference: Answer) -> None:
    """Returns an answer without names, times and cached counts; log-probabilities rounded to TOLERANCE."""
    assert (answer.status, reference.status) == (200, 200), (answer.body, reference.body)
    differences = list(_differences(answer.body, reference.body, ""))
    assert not differences, differences[:3]


def _differences(a: Any, b: Any, where: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted((a.keys() | b.keys()) - NOT_COMPARED):
            yield from _differences(a.get(key), b.get(key), f"{where}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif isinstance(a, float) and isinstance(b, float):
        if abs(a - b) >= TOLERANCE:
            yield f"{where}: {a} is not {b}"
    elif a != b:
        yield f"{where}: {a!r} is not {b!r}"


def metric(server: Server, name: str) -> float:
    """Sum of a metric's samples."""
    return sum(sample.value for sample in read_metrics(server.port, 30.0).get(name, ()))


def wait_for(condition: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Seconds until it holds."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < deadline_s, what
        time.sleep(0.1)
    return time.monotonic() - begin


def wait_free(server: Server, deadline_s: float) -> float:
    """Seconds until a server holds no KV block and runs no request."""
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")
    return wait_for(lambda: not any(metric(server, name) for name in names), deadline_s, "blocks are held")


def reset(server: Server, external: bool = True) -> bool:
    """Returns the answer of `/reset_prefix_cache`."""
    url = f"http://{HOST}:{server.port}/reset_prefix_cache?reset_external={str(external).lower()}"
    return httpx.post(url, timeout=30).json()["success"]


def kill(server: Server, sig: int = signal.SIGKILL) -> None:
    """To the server and everything that it started."""
    for process in session_and_descendants(server.pid):
        os.kill(process.pid, sig)


class Fleet:
    """Servers and proxies; :func:`fleet` starts and ends them. Servers may be started again on their ports.

    lease_s: of all engines. arguments: of all engines.
    """

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        *,
        prefill: Sequence[Engine] = (Engine(),),
        decode: Sequence[Engine] = (Engine(),),
        topologies: Topologies | None = None,
        lease_s: float = LEASE_S,
        arguments: Sequence[str] = (),
    ) -> None:
        self._checkpoint, self._folder = checkpoint, folder
        self._engines = {"prefill": prefill, "decode": decode}
        self._topologies = topologies or {"1P1D": ((0,), (0,))}
        self._lease_s, self._arguments = lease_s, tuple(arguments)
        ports = iter(free_ports(len(prefill) + 2 * len(decode) + len(self._topologies)))
        self._ports = {role: [next(ports) for _ in engines] for role, engines in self._engines.items()}
        self._kv_ports = [next(ports) for _ in decode]
        self._proxy_ports = {name: next(ports) for name in self._topologies}
        self._starts = 0
        self.prefill: dict[int, Server] = {}
        self.decode: dict[int, Server] = {}
        self.proxies: dict[str, Server] = {}

    @property
    def servers(self) -> list[Server]:
        """All, as they are now."""
        return [*self.prefill.values(), *self.decode.values(), *self.proxies.values()]

    def start(self) -> None:
        """Starts everything and waits until it serves."""
        for number in range(len(self._engines["prefill"])):
            self.start_prefill(number)
        for number in range(len(self._engines["decode"])):
            self.start_decode(number)
        for name, (prefill, decode) in self._topologies.items():
            command = proxy_command(
                self._proxy_ports[name],
                [self._ports["prefill"][number] for number in prefill],
                [self._ports["decode"][number] for number in decode],
            )
            command += ["--probe-interval", "1", "--first-output-timeout", "120"]
            log = self._folder / f"proxy-{name}.log"
            self.proxies[name] = Server(command, log, self._proxy_ports[name])
        for server in self.servers:
            server.wait_ready(READY_S)

    def start_prefill(self, number: int = 0) -> Server:
        self.prefill[number] = self._server("prefill", number, self._kv_ports[0], None)
        return self.prefill[number]

    def start_decode(self, number: int = 0) -> Server:
        offload = {"topk_buffer_size": 128, "dram_size_per_dp_GB": 1}
        self.decode[number] = self._server("decode", number, self._kv_ports[number], offload)
        return self.decode[number]

    def _server(self, role: str, number: int, kv_port: int, offload: dict[str, Any] | None) -> Server:
        engine, port = self._engines[role][number], self._ports[role][number]
        kv_role = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        times = {"lease_s": self._lease_s, "request_s": REQUEST_S}
        options = ServerOptions(
            self._checkpoint,
            32 << 20,
            port,
            offload,
            transfer={**transfer_options(kv_role, kv_port, **times), **engine.transfer},
            max_model_len=2048,
            max_num_seqs=4,
            max_num_batched_tokens=256,
        )
        command = [*command_line(options), "--tensor-parallel-size", str(engine.tp_size)]
        command += [*self._arguments, *engine.arguments]
        self._starts += 1
        # One thread each: several engines share few cores with the tests.
        fixed = {"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}  # the latter for /reset_prefix_cache
        with patch.dict(os.environ, {**fixed, **engine.environment}):
            return Server(command, self._folder / f"{role}-{number}-{self._starts}.log", port)

    def stop(self) -> None:
        """Ends everything, at once: vLLM takes seconds for it."""
        with ThreadPoolExecutor(max(1, len(self.servers))) as threads:
            list(threads.map(lambda server: server.stop(30.0), self.servers))

    def ask(self, body: Mapping[str, Any], topology: str = "1P1D", timeout_s: float = 120) -> Answer:
        """Through a proxy."""
        return post(self.proxies[topology].port, body, timeout_s=timeout_s)

    def reference(self, body: Mapping[str, Any]) -> Answer:
        """From a prefill server alone, which is an engine without offload, and with nothing cached."""
        server = self.prefill[max(self.prefill)]
        return post(server.port, {**body, "cache_salt": uuid.uuid4().hex})

    def check(self, body: Mapping[str, Any], topology: str = "1P1D") -> Answer:
        """The proxy's answer, which must be the reference's."""
        answer = self.ask(body, topology)
        check_same(answer, self.reference(body))
        return answer

    def orphan(self, body: Mapping[str, Any], number: int = 0, topology: str = "1P1D") -> Answer:
        """Sends a request directly to a decode server: the proxy does not know it, so it is never
        prefilled."""
        url = f"http://{HOST}:{self.proxies[topology].port}/v1/metaserver"
        params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": url}
        headers = {"X-Request-Id": uuid.uuid4().hex}
        return post(self.decode[number].port, {**body, "kv_transfer_params": params}, headers)


@contextmanager
def fleet(checkpoint: Path, folder: Path, **options: Any) -> Iterator[Fleet]:
    """Running servers and proxies; options as for :class:`Fleet`."""
    made = Fleet(checkpoint, folder, **options)
    try:
        made.start()
        yield made
    finally:
        made.stop()
