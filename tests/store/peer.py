"""A store client in a process of its own, which a test drives, stops and kills.

    python peer.py INSTANCE ROLE

Reads one command a line, a JSON list, and answers each with a line: the result, or ["error", class, text].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ANSWER_S = 60.0


class Peer:
    """The test's end."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        command = [sys.executable, __file__, *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env=os.environ | (environ or {}),
        )  # fmt: skip
        self.pid = self._process.pid

    def ask(self, *command: Any) -> Any:
        """The answer to a command. Raises EOFError: the process ended; TimeoutError: no answer came."""
        self.tell(*command)
        return self.answer()

    def tell(self, *command: Any) -> None:
        """Sends a command without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise EOFError(f"peer {self.pid} ended with {self._process.wait()}")
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _Commands:
    """What the process does: one client, and the objects it opened last."""

    def __init__(self, store: Any) -> None:
        from store_client import Caller

        self.caller = Caller(store)
        self.store = store
        self.objects: list[Any] = []

    def warm_up(self) -> str:
        import vllm_kvoffload.ops  # noqa: F401  # brings torch, which takes its time

        return "warm"

    def lookup(self, keys: list[str]) -> int:
        return int(self.store.lookup(keys))

    def put(self, keys: list[str]) -> list[Any]:
        return [result if isinstance(result, bool) else result.value for result in self.caller.put(keys)]

    def get(self, keys: list[str]) -> list[bool]:
        return self.caller.get(keys)

    def reserve(self, keys: list[str]) -> int:
        self.objects = list(self.caller.reserve(keys))
        return len(self.objects)

    def fill(self) -> str:
        self.caller.fill(self.objects)
        return "filled"

    def finish(self) -> list[bool]:
        return list(self.store.finish_write(self.objects, [True] * len(self.objects)))

    def hold(self, keys: list[str]) -> list[bool]:
        self.objects = self.store.open_read(keys, 1000.0)
        return [object_ is not None for object_ in self.objects]

    def load(self) -> str:
        self.caller.load(self.objects)
        return "loaded"


def _local_store(instance: str, role: str) -> Any:
    from store_client import OBJECT_BYTES

    from vllm_kvoffload.store.local import LocalStore

    pool = 8 * OBJECT_BYTES if role == "owner" else 0
    return LocalStore(instance, pool, write_lease_s=1000.0, timeout_s=1.0)


def serve(make: Callable[[], Any]) -> None:
    """Answers commands until standard input ends."""
    commands = _Commands(make())
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer: Any = getattr(commands, name)(*arguments)
        except Exception as error:
            answer = ["error", type(error).__name__, str(error)]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(lambda: _local_store(*sys.argv[1:3]))
