"""The load of a soak: prompts with known answers, and users that request them and check every token."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.fault_client import Client, new_prompt

DEADLINE_S = 120.0
"""Beyond every deadline of the deployment: a request that lasts longer has outlived them all."""
LONGEST_ANSWER = 160
LENGTHS = (3, 20, 63, 64, 65, 128, 130, 200, 256, 300, 400, 512, 700, 900, 1300, 1750)
SHARED_PREFIXES = ((192, 8), (640, 8), (1216, 4))
"""Tokens of a common prefix, and how many prompts begin with it."""


def prompts(seed: int) -> list[list[int]]:
    """The fixed set: several lengths, and families with a common prefix."""
    rng = random.Random(seed)
    made = [new_prompt(length, rng.randrange(1 << 30)) for length in LENGTHS * 2]
    for tokens, count in SHARED_PREFIXES:
        prefix = new_prompt(tokens, rng.randrange(1 << 30))
        made += [prefix + new_prompt(rng.randrange(1, 150), rng.randrange(1 << 30)) for _ in range(count)]
    return made


class Oracle:
    """Returns an undisturbed engine's answer to each prompt, LONGEST_ANSWER tokens."""

    def __init__(self, asked: Sequence[list[int]]) -> None:
        self.prompts = list(asked)
        self.answers: list[list[str]] = []

    def learn(self, port: int) -> None:
        """Asks the engine at `port`, with nothing cached. Raises AssertionError."""
        for begin in range(0, len(self.prompts), 8):
            clients = [
                Client(port, prompt, LONGEST_ANSWER, stream=False, cache_salt=uuid.uuid4().hex).start()
                for prompt in self.prompts[begin : begin + 8]
            ]
            for client in clients:
                assert client.join(DEADLINE_S), "the oracle hangs"
                assert client.complete, f"the oracle: {client.error}"
                self.answers.append(client.tokens)

    def check(self, port: int, numbers: Sequence[int], max_tokens: int) -> list[str]:
        """Queries the healthy deployment; returns problems, one line each."""
        problems = []
        for begin in range(0, len(numbers), 4):
            some = numbers[begin : begin + 4]
            clients = [Client(port, self.prompts[n], max_tokens, stream=bool(n % 2)).start() for n in some]
            for number, client in zip(some, clients, strict=True):
                client.join(DEADLINE_S)
                verdict = client.verdict(self.answers[number][:max_tokens])
                if verdict != "right":
                    problems.append(
                        f"prompt {number} of {len(client.prompt)} tokens: {verdict} {client.error}"
                    )
        return problems


@dataclass(frozen=True)
class Record:
    """Outcome of a request. begun, ended: time.monotonic(). wrong: index of the first wrong token, -1."""

    kind: str
    prompt: int
    begun: float
    ended: float
    status: int
    verdict: str
    error: str = ""
    wrong: int = -1


class Load:
    """Users in threads. `pause` waits for running requests; `resume` continues."""

    KINDS = ("stream", "whole", "aborted", "long", "sampled")
    WEIGHTS = (40, 25, 20, 5, 10)

    def __init__(self, port: int, oracle: Oracle, seed: int, users: int, sampled: bool) -> None:
        self._port, self._oracle = port, oracle
        self._weights = self.WEIGHTS if sampled else (*self.WEIGHTS[:-1], 0)
        self.records: list[Record] = []
        self.under_way: dict[Client, float] = {}
        self._lock = threading.Lock()
        self._go, self._stop = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._user, args=(random.Random(f"{seed}/{n}"),), daemon=True)
            for n in range(users)
        ]
        for thread in self._threads:
            thread.start()

    def resume(self) -> None:
        self._go.set()

    def pause(self) -> bool:
        """Whether all that was under way has ended."""
        self._go.clear()
        end = time.monotonic() + DEADLINE_S + 10
        while self.under_way and time.monotonic() < end:
            time.sleep(0.1)
        return not self.under_way

    def stop(self) -> None:
        self._stop.set()
        self._go.set()
        for thread in self._threads:
            thread.join(DEADLINE_S + 10)

    def _user(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            self._go.wait()
            if self._stop.is_set():
                return
            record = self._ask(rng)
            with self._lock:
                self.records.append(record)
            time.sleep(1.0 if record.verdict == "error" else rng.uniform(0, 0.3))

    def _ask(self, rng: random.Random) -> Record:
        (kind,) = rng.choices(self.KINDS, self._weights)
        number = rng.randrange(len(self._oracle.prompts))
        tokens = LONGEST_ANSWER if kind == "long" else rng.choice((1, 2, 8, 16, 16, 32, 48))
        more: dict[str, object] = {"cache_salt": f"{rng.getrandbits(64):x}"} if rng.random() < 0.5 else {}
        if kind == "sampled":
            more |= {"temperature": 0.8, "seed": rng.randrange(1000)}
        client = Client(self._port, self._oracle.prompts[number], tokens, rng.random() < 0.6, **more)
        if kind in ("stream", "long"):
            client.stream = True
        begun = time.monotonic()
        self.under_way[client] = begun
        client.start()
        if kind == "aborted" and not client.join(rng.choice((0.02, 0.1, 0.4, 1.5)) * rng.random()):
            client.abort()
        ended = client.join(DEADLINE_S)
        if not ended:
            client.abort()
        del self.under_way[client]
        return self._record(kind, number, client, begun)

    def _record(self, kind: str, number: int, client: Client, begun: float) -> Record:
        expected = self._oracle.answers[number][: client.max_tokens]
        if kind == "sampled":  # for liveness: any tokens will do, but as many as asked for
            expected = client.tokens if len(client.tokens) == client.max_tokens else ["?"]
            verdict = client.verdict(expected if client.complete else client.tokens)
        else:
            verdict = client.verdict(expected)
        wrong = -1
        if verdict == "WRONG":
            pairs = zip(client.tokens, expected, strict=False)
            wrong = next(
                (n for n, (a, b) in enumerate(pairs) if a != b), min(len(client.tokens), len(expected))
            )
        with contextlib.suppress(OSError):
            client.abort()
        ended = time.monotonic()
        return Record(kind, number, begun, ended, client.status, verdict, client.error, wrong)
