"""The demo's OpenAI client: sends one request, reads a whole or a streamed answer, and reads /metrics.

Uses plain HTTP of the standard library. Requests token ids (`return_token_ids`, an extension of vLLM):
texts can be equal where tokens differ.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvoffload.demo.server import HOST, MODEL_NAME

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_END = "[DONE]"


class RequestError(RuntimeError):
    """A request was refused, or its answer is incomplete."""


@dataclass(frozen=True)
class Request:
    """One request. `prompt` is a text for /v1/completions, or messages for /v1/chat/completions."""

    name: str
    prompt: str | list[dict[str, str]]
    max_tokens: int
    stream: bool = False

    @property
    def path(self) -> str:
        """Path of the endpoint."""
        return "/v1/completions" if isinstance(self.prompt, str) else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """The JSON object to send: greedy, with token ids and log-probabilities."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "stream": self.stream,
        }
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if isinstance(self.prompt, str):
            return {**body, "prompt": self.prompt, "logprobs": 0}
        return {**body, "messages": self.prompt, "logprobs": True, "top_logprobs": 0}


@dataclass
class DemoAnswer:
    """A received answer. Times in seconds from sending; `first_s` is 0 for an answer that was not
    streamed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0

    def take(self, message: Mapping[str, Any]) -> None:
        """Adds a chunk of a stream, or a whole response. Raises RequestError for an error object."""
        if "error" in message:
            raise RequestError(f"the server answered {message['error']}")
        usage = message.get("usage")
        if usage:
            self.prompt_tokens = usage["prompt_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in message.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            content = choice.get("message") or choice.get("delta") or {}
            self.text += choice.get("text") or content.get("content") or ""
            logprobs = choice.get("logprobs") or {}
            self.logprobs += logprobs.get("token_logprobs") or ()
            self.logprobs += [token["logprob"] for token in logprobs.get("content") or ()]


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """Data of the server-sent events in a stream's lines: `data` fields joined, comments and others left out.

    An event ends with an empty line; one cut off by the end of the stream is dropped, as the standard says.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))


def send(
    port: int, request: Request, deadline_s: float, on_tokens: Callable[[int], None] = lambda _: None
) -> DemoAnswer:
    """Sends a request to HOST and waits for all of the answer; `on_tokens` gets each count of new tokens.

    Raises RequestError: refused, cut off, without token ids, or not finished after `deadline_s`.
    """
    start_s = time.monotonic()
    connection = http.client.HTTPConnection(HOST, port, timeout=deadline_s)
    try:
        body = json.dumps(request.body())
        connection.request("POST", request.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = response.read(2000).decode("utf-8", "replace")
            raise RequestError(f"{request.name}: HTTP status {response.status}: {text}")
        answer = DemoAnswer()
        for message in _messages(response, request):
            answer.take(message)
            elapsed_s = time.monotonic() - start_s
            if request.stream and answer.token_ids and not answer.first_s:
                answer.first_s = elapsed_s
            if elapsed_s > deadline_s:
                raise RequestError(f"{request.name}: not finished after {deadline_s:.0f} s")
            on_tokens(len(answer.token_ids))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"{request.name}: {error!r}") from error
    finally:
        connection.close()
    answer.total_s = time.monotonic() - start_s
    if not answer.token_ids or len(answer.token_ids) != len(answer.logprobs):
        counts = f"{len(answer.token_ids)} token ids, {len(answer.logprobs)} log-probabilities"
        raise RequestError(f"{request.name}: incomplete answer: {counts}")
    return answer


def _messages(response: http.client.HTTPResponse, request: Request) -> Iterator[dict[str, Any]]:
    if not request.stream:
        yield json.loads(response.read())
        return
    for data in events(response):
        if data == _END:
            return
        yield json.loads(data)
    raise RequestError(f"{request.name}: the stream ended before its end mark")


@dataclass(frozen=True)
class Sample:
    """A line of /metrics."""

    labels: Mapping[str, str]
    value: float


def parse_metrics(text: str) -> dict[str, list[Sample]]:
    """Samples by name from Prometheus' text format."""
    samples: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match:
            sample = Sample(dict(_LABEL.findall(match[2] or "")), float(match[3]))
            samples.setdefault(match[1], []).append(sample)
    return samples


def read_metrics(port: int, deadline_s: float) -> dict[str, list[Sample]]:
    """Reads the server's /metrics. Raises RequestError."""
    connection = http.client.HTTPConnection(HOST, port, timeout=deadline_s)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RequestError(f"/metrics: HTTP status {response.status}")
        return parse_metrics(response.read().decode("utf-8"))
    except (OSError, http.client.HTTPException) as error:
        raise RequestError(f"/metrics: {error!r}") from error
    finally:
        connection.close()
