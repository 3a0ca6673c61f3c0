"""A store client in a process of its own, which a test drives, stops and kills.

    python -m tests.store.peer INSTANCE ROLE    of the embedded store
    python -m tests.store.peer memcache ROLE    of MemCache, with options in the environment (PEER_...)

Reads one command a line, a JSON list, and answers each with a line: the result, or ["error", class, text].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import ROOT

ANSWER_S = 60.0
LOCAL_BYTES, MEMCACHE_BYTES = 8192, 1 << 18
"""Of an object."""

_DEVICE_ADDRESS = 0x120000000000
_MAP_FIXED_NOREPLACE = 0x100000


def wait_until_stopped(pid: int) -> None:
    """Until a process that was sent SIGSTOP runs no more."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


class Peer:
    """The test's end."""

    def __init__(self, *arguments: str, environ: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "tests.store.peer", *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            cwd=ROOT, env=os.environ | (environ or {}),
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

    def answer(self, seconds: float = ANSWER_S) -> Any:
        """The next answer. seconds: then the peer is killed."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(seconds, self.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise EOFError(f"peer {self.pid} ended with {self._process.wait()}")
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        """Returns once a SIGSTOP has stopped it."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_until_stopped(self.pid)

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
    """State of the process: one client, and the objects it opened last."""

    def __init__(self, store: Any, nbytes: int) -> None:
        from tests.store.store_client import Caller

        self.caller = Caller(store, nbytes)
        self.store = store
        self.objects: list[Any] = []
        self._device: Caller | None = None

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

    def release(self) -> str:
        self.store.close_read(self.objects)
        return "released"

    def discard(self) -> list[bool]:
        return list(self.store.finish_write(self.objects, [False] * len(self.objects)))

    def addresses(self) -> list[int]:
        return [object_.address for object_ in self.objects]

    def load_beyond(self) -> str:
        """One byte past the object's end."""
        self.caller.load([replace(object_, address=object_.address + 1) for object_ in self.objects])
        return "loaded"

    def put_many(self, prefix: str, count: int) -> dict[str, int]:
        """One call for all; fills what it gets."""
        from tests.store.store_client import SLOTS
        from vllm_kvoffload.store import WriteObject

        made = self.store.open_write([f"{prefix}{i}" for i in range(count)], self.caller.nbytes)
        objects = [object_ for object_ in made if isinstance(object_, WriteObject)]
        for start in range(0, len(objects), SLOTS):
            self.caller.fill(objects[start : start + SLOTS])
        published = self.store.finish_write(objects, [True] * len(objects))
        return {"published": published.count(True), "refused": count - len(objects)}

    def device(self) -> Any:
        """A caller with memory where MemFabric takes it for a device's."""
        from tests.store.store_client import SLOTS, Caller

        if self._device is None:
            self._device = Caller(self.store, self.caller.nbytes, _device_memory(SLOTS * self.caller.nbytes))
        return self._device

    def device_put(self, keys: list[str]) -> list[bool]:
        return list(self.device().put(keys))

    def device_get(self, keys: list[str]) -> list[bool]:
        return list(self.device().get(keys))

    def second_client(self, keys: list[str]) -> int:
        """A scheduler's client in the same process, as with one engine process: used and closed."""
        from vllm_kvoffload.store.memcache import MemcacheStore

        store = MemcacheStore(copies=False)
        hits = store.lookup(keys)
        store.close()
        return hits

    def raw(self, name: str, *arguments: Any) -> Any:
        """A call of MemCache's own client."""
        return getattr(self.store._client, name)(*arguments)

    def handshake(self, probe: str) -> str:
        from tests.store.test_keys import SPACE
        from vllm_kvoffload.store import handshake

        handshake(self.store, replace(SPACE, hash_probe=probe))
        return "agreed"

    def close(self) -> str:
        self.store.close()
        return "closed"


def _device_memory(nbytes: int) -> Any:
    import ctypes
    import mmap

    import numpy as np

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    )  # fmt: skip
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    address = libc.mmap(_DEVICE_ADDRESS, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    assert address == _DEVICE_ADDRESS, ctypes.get_errno()
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


def _local_store(instance: str, role: str) -> Any:
    from tests.store.store_client import OBJECT_BYTES
    from vllm_kvoffload.store.local import LocalStore

    pool = 8 * OBJECT_BYTES if role == "owner" else 0
    return LocalStore(instance, pool, write_lease_s=1000.0, timeout_s=1.0)


def _memcache_store(role: str) -> Any:
    from tests import hostsim

    hostsim.activate()
    from vllm_kvoffload.store import memcache

    options = {
        name: float(os.environ[variable])
        for name in ("write_lease_s", "timeout_s")
        if (variable := f"PEER_{name.upper()}") in os.environ
    }
    memcache.LEASE_MARGIN_S = float(os.environ.get("PEER_MARGIN_S", memcache.LEASE_MARGIN_S))
    return memcache.MemcacheStore(copies=role != "scheduler", **options)


def serve(make: Callable[[], Any], nbytes: int) -> None:
    """Answers commands until standard input ends."""
    # The library writes its log to standard output.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def attempt(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return ["error", type(error).__name__, str(error)]

    made = attempt(lambda: _Commands(make(), nbytes))
    say("ready" if isinstance(made, _Commands) else made)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        say(attempt(lambda: getattr(made, name)(*arguments)))  # noqa: B023  # called at once


if __name__ == "__main__":
    if sys.argv[1] == "memcache":
        serve(lambda: _memcache_store(sys.argv[2]), MEMCACHE_BYTES)
    else:
        serve(lambda: _local_store(*sys.argv[1:3]), LOCAL_BYTES)
    os._exit(0)  # the library's threads may keep the interpreter from ending
