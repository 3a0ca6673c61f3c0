"""A client in a thread: sends a request, collects tokens, may disconnect, and is checked by a reference."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from typing import Any

from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.demo.server import MODEL_NAME

HANG_S = 75.0
"""A request that has neither ended nor said anything for so long hangs."""


def new_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(length)]


def completion(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }


class Client:
    """One request to a port of this machine. `tokens`: received so far. `error`: why it ended early."""

    def __init__(
        self, port: int, prompt: list[int], max_tokens: int = 8, stream: bool = True, **more: Any
    ) -> None:
        self.port, self.prompt, self.max_tokens, self.stream = port, prompt, max_tokens, stream
        self.digest = prompt_digest(prompt)
        self.tokens: list[str] = []
        self.status = 0
        self.error = ""
        self.complete = False
        self.aborted = False
        self.seconds = 0.0
        self._more = more
        self._socket: socket.socket | None = None
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Client:
        """Asks; a second call changes nothing."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def abort(self) -> None:
        """The client goes away without a word."""
        self.aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def wait_tokens(self, count: int, seconds: float = 60.0) -> None:
        with self._news:
            there = self._news.wait_for(lambda: len(self.tokens) >= count or self.ended, seconds)
        assert there, f"no {count} tokens after {seconds:g} s"
        assert not self.ended, f"ended before its token {count}: {self.verdict([])}"

    @property
    def ended(self) -> bool:
        return self.complete or bool(self.error)

    def join(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def verdict(self, reference: list[str]) -> str:
        """right, error, gone (it was the client that left), WRONG or HANGS."""
        if self._thread.is_alive() or self.error == "timeout":
            return "HANGS"
        if self.tokens != reference[: len(self.tokens)] or (self.complete and self.tokens != reference):
            return "WRONG"
        if self.complete:
            return "right"
        return "gone" if self.aborted else "error"

    def _run(self) -> None:
        begin = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.connect()
            self._socket = connection.sock
            body = {**completion(self.prompt, self.max_tokens), "stream": self.stream, **self._more}
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            self._read(connection.getresponse())
        except TimeoutError:
            self.error = "timeout"
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = repr(error)
        finally:
            connection.close()
            self.seconds = time.monotonic() - begin
            with self._news:
                self._news.notify_all()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        if answer.status != 200:
            self.error = f"{answer.status}: {answer.read()[:300].decode(errors='replace')}"
        elif not self.stream:
            self._take(json.loads(answer.read()))
            self.complete = not self.error
        else:
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    self.complete = not self.error
                elif line.startswith(b"data: "):
                    self._take(json.loads(line[6:]))
            if not self.complete:
                self.error = self.error or "the stream ended without [DONE]"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = f"event: {json.dumps(event)[:300]}"
        choices = event.get("choices") or []
        with self._news:
            for choice in choices:
                self.tokens += (choice.get("logprobs") or {}).get("tokens") or []
            self._news.notify_all()
