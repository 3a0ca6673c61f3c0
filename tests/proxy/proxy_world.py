"""A proxy in this process between fake engines that imitate vLLM, including the post to /v1/metaserver.

An engine's n-th word is " w<n>", n counting the words of its prompt: an answer that goes on elsewhere with
the right prompt has the right words.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from vllm_kvoffload.proxy import server as proxy_server
from vllm_kvoffload.proxy.app import ProxyApp
from vllm_kvoffload.proxy.settings import Address, Deadlines, proxy_settings

FAST = Deadlines(
    connect=1, first_output=3, idle=1.5, answer=4, prefill=2, client_stall=1.5, control=1, drain=5
)
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Exchange:
    """One request on a fake engine."""

    engine: FakeEngine
    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def chat(self) -> bool:
        return "chat" in self.path

    @property
    def external_id(self) -> str:
        parent = self.headers["x-request-id"]
        return f"chatcmpl-{parent}" if self.chat else f"cmpl-{parent}-0"

    @property
    def words(self) -> int:
        """Of the prompt."""
        if self.chat:
            return sum(len(str(m["content"]).split()) for m in self.body["messages"])
        prompt = self.body["prompt"]
        return len(prompt) if isinstance(prompt, list) else len(prompt.split())

    async def respond(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        await self.writer.drain()

    async def start_stream(self) -> None:
        self.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, value: object) -> None:
        await self.raw(f"data: {json.dumps(value)}\n\n".encode())

    def choice(self, text: str, finish: str | None = None, stop: str | None = None) -> dict[str, Any]:
        made: dict[str, Any] = {"index": 0, "finish_reason": finish, "stop_reason": stop, "logprobs": None}
        made |= {"delta": {"content": text}} if self.chat else {"text": text}
        return made

    def shell(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.external_id, "created": 7, "model": "m", "choices": choices}

    def usage(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.words,
            "completion_tokens": tokens,
            "total_tokens": self.words + tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.words - 1
            },  # decode counts pulled tokens as cached
        }

    async def word(self, index: int, finish: str | None = None, stop: str | None = None) -> None:
        await self.event(self.shell([self.choice(f" w{self.words + index}", finish, stop)]))

    async def end_stream(self, tokens: int) -> None:
        if (self.body.get("stream_options") or {}).get("include_usage"):
            await self.event({**self.shell([]), "usage": self.usage(tokens)})
        await self.raw(b"data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def abort(self) -> None:
        self.writer.transport.abort()

    async def post(self, **changes: Any) -> int:
        """The rendezvous post; its status."""
        message = {
            "request_id": self.external_id,
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_engine_id": "d",
            "remote_host": "10.0.0.1",
            "remote_port": 20050,
            "remote_tp_size": 1,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
            **changes,
        }
        async with self.engine.world.post_threads, httpx.AsyncClient(timeout=10) as client:
            answer = await client.post(self.body["kv_transfer_params"]["metaserver"], json=message)
            return answer.status_code

    async def notice(self, failure: str, error: str = "why", **more: Any) -> int:
        """Decode's notice that it didn't get the KV; its status."""
        message = {"request_id": self.external_id, "failure": failure, "error": error, **more}
        async with httpx.AsyncClient(timeout=10) as client:
            answer = await client.post(self.body["kv_transfer_params"]["failures"], json=message)
            return answer.status_code

    async def rendezvous(self, **changes: Any) -> None:
        """Posts and waits for the KV, for ever if there is none: vLLM-Ascend takes an error for delivered."""
        kv = self.engine.world.kv.setdefault(self.external_id, asyncio.Event())
        await self.post(**changes)
        await kv.wait()


Behaviour = Callable[[Exchange], Awaitable[None]]


async def decode(exchange: Exchange) -> None:
    """A decode engine without faults."""
    tokens = exchange.body.get("max_tokens") or exchange.body.get("max_completion_tokens") or 4
    if exchange.body.get("stream"):
        await exchange.start_stream()
    await exchange.rendezvous()
    if exchange.body.get("stream"):
        for index in range(tokens):
            await exchange.word(index, "length" if index + 1 == tokens else None)
        await exchange.end_stream(tokens)
        return
    text = "".join(f" w{exchange.words + i}" for i in range(tokens))
    choice = exchange.choice(text, "length")
    if exchange.chat:
        choice["message"] = {"role": "assistant", **choice.pop("delta")}
    await exchange.respond(200, {**exchange.shell([choice]), "usage": exchange.usage(tokens)})


async def prefill(exchange: Exchange) -> None:
    """A prefill engine without faults: 2 tokens of every prompt are in its prefix cache."""
    exchange.engine.world.kv.setdefault(exchange.external_id, asyncio.Event()).set()
    usage = {"prompt_tokens": exchange.words, "prompt_tokens_details": {"cached_tokens": 2}}
    await exchange.respond(200, {**exchange.shell([]), "usage": usage})


class FakeEngine:
    """Listens; ``behaviours`` are used one per request, then ``usual``."""

    def __init__(self, world: World, usual: Behaviour) -> None:
        self.world = world
        self.usual = usual
        self.behaviours: list[Behaviour] = []
        self.exchanges: list[Exchange] = []
        self.port = free_port()
        self.healthy = True
        self.tokenizes = True
        self.tokens: Behaviour | None = None  # of /tokenize, instead of its usual answer
        self.frozen = False  # takes connections and requests, answers nothing, as after SIGSTOP
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> Address:
        return Address(HOST, self.port)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connection, HOST, self.port)

    async def die(self) -> None:
        """As if the process was killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return False
        line, *rest = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (field.partition(":") for field in rest)}
        method, path, _ = line.split(" ")
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        while self.frozen:
            await asyncio.sleep(0.02)
        exchange = Exchange(self, method, path, headers, json.loads(raw) if raw else {}, writer)
        if method == "GET":
            await exchange.respond(200 if self.healthy else 503, {"data": [{"id": "m"}]})
            return True
        if path == "/tokenize" and self.tokens is not None:
            await self.tokens(exchange)
            return not writer.transport.is_closing()
        if path == "/tokenize":
            status = 200 if self.tokenizes else 404
            await exchange.respond(status, {"tokens": [9] * len(exchange.body["prompt"].split())})
            return True
        self.exchanges.append(exchange)
        behaviour = self.behaviours.pop(0) if self.behaviours else self.usual
        work = asyncio.ensure_future(behaviour(exchange))
        closed = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([work, closed], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            work.cancel()
            closed.cancel()
            raise
        if work.done() and isinstance(work.exception(), ConnectionError):
            exchange.gone.set()  # noticed by a write
        if work.done():
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)
            work.result()
            return not writer.transport.is_closing()
        exchange.gone.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return False


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class World:
    """Engines, a proxy and a client."""

    def __init__(self, prefillers: int = 1, decoders: int = 1, **settings: Any) -> None:
        self.kv: dict[str, asyncio.Event] = {}
        self.post_threads = asyncio.Semaphore(32)  # a vLLM-Ascend decode engine has as many
        self.prefillers = [FakeEngine(self, prefill) for _ in range(prefillers)]
        self.decoders = [FakeEngine(self, decode) for _ in range(decoders)]
        self.settings = proxy_settings(
            host=HOST,
            port=free_port(),
            prefillers=tuple(e.address for e in self.prefillers),
            decoders=tuple(e.address for e in self.decoders),
            **{"deadlines": FAST, "probe_interval": 0, **settings},
        )
        self.app = ProxyApp(self.settings)
        self.url = f"http://{HOST}:{self.settings.port}"

    @property
    def p(self) -> FakeEngine:
        return self.prefillers[0]

    @property
    def d(self) -> FakeEngine:
        return self.decoders[0]

    async def complete(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """One request that isn't streamed."""
        if "chat" not in path:
            body = {"prompt": "a b c", **body}
        return await self.client.post(path, json={"model": "m", **body})

    async def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed request, [DONE] as {"done": True}."""
        answer = await self.complete(path, stream=True, **body)
        assert answer.status_code == 200, answer.text
        return events(answer.text)

    async def settle(self) -> None:
        """Waits until nothing is under way; fails where something stays."""
        for _ in range(100):
            if self.busy() == self.nothing:
                return
            await asyncio.sleep(0.03)
        raise AssertionError(f"left behind: {self.busy()}")

    nothing = (0, 0, 0, 0, 0, 0, 0)

    def busy(self) -> tuple[int, ...]:
        core = self.app.core
        loads = [
            (
                sum(i.load_tokens for i in pool.instances.values()),
                sum(i.requests for i in pool.instances.values()),
            )
            for pool in core.pools
        ]
        tasks, connections = core.background, core.client.connections[0]
        return (*loads[0], *loads[1], len(core.rendezvous), tasks, connections + len(self.app.running))


def events(text: str) -> list[dict[str, Any]]:
    made = []
    for block in text.strip().split("\n\n"):
        assert block.startswith("data: "), block
        payload = block[6:]
        made.append({"done": True} if payload == "[DONE]" else json.loads(payload))
    return made


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice's events."""
    parts = []
    for event in found:
        for choice in event.get("choices") or ():
            if choice["index"] == index:
                parts.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(parts)


def words(first: int, count: int) -> str:
    return "".join(f" w{i}" for i in range(first, first + count))


@contextlib.asynccontextmanager
async def world(prefillers: int = 1, decoders: int = 1, **settings: Any) -> AsyncIterator[World]:
    """Everything started; at the end nothing may be left behind."""
    made = World(prefillers, decoders, **settings)
    for engine in (*made.prefillers, *made.decoders):
        await engine.start()
    made.app.start()
    server = _Server(proxy_server._config(made.app, HOST, made.settings.port))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with httpx.AsyncClient(base_url=made.url, timeout=20) as made.client:
            yield made
            made.app.core.draining = True
            expected = 1 if made.settings.probe_interval else 0
            made.nothing = (0, 0, 0, 0, 0, expected, 0)
            await made.settle()
    finally:
        server.should_exit = True
        await serving
        await made.app.stop()
        for engine in (*made.prefillers, *made.decoders):
            await engine.die()
