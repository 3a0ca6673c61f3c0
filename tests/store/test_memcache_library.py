"""The memcache backend over a library that raises: what reaches engines is a StoreError, and a miss."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store import StoreError, StoreUnavailableError
from vllm_kvoffload.store.memcache import MemcacheStore
from vllm_kvoffload.store.memcache_conf import LOCAL_FILE, LOCAL_VARIABLE, Cluster, Endpoint, render


class Library:
    """`memcache_hybrid`: all calls but those of the start raise."""

    def __init__(self, error: Exception, fails_at_start: bool = False) -> None:
        self.error, self.fails_at_start = error, fails_at_start

    def DistributedObjectStore(self) -> Library:
        return self

    def init(self, _device: int, _copies: bool) -> int:
        if self.fails_at_start:
            raise self.error
        return 0

    def close(self) -> None:
        """The library's own."""

    def __getattr__(self, name: str) -> object:
        def fail(*_: object) -> None:
            raise self.error

        return fail


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as meta, socket.create_server(("127.0.0.1", 0)) as store:
        cluster = Cluster(
            meta=Endpoint("127.0.0.1", meta.getsockname()[1]),
            config_store=Endpoint("127.0.0.1", store.getsockname()[1]),
            metrics=Endpoint("127.0.0.1", 1),
        )
        (tmp_path / LOCAL_FILE).write_text(render(cluster)[LOCAL_FILE])
        yield {LOCAL_VARIABLE: str(tmp_path / LOCAL_FILE)}


ERRORS = [RuntimeError("of C++"), TypeError("incompatible function arguments"), MemoryError(), KeyError("x")]


@pytest.mark.parametrize("priority", [None, 0, 4])
def test_the_library_starts_with_the_priority(environ: dict[str, str], priority: int | None) -> None:
    MemcacheStore(environ=environ, library=Library(ERRORS[0]), qos_priority=priority).close()
    assert environ.get("MF_DEVICE_UB_QOS") == (None if priority is None else str(priority))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_every_call_that_raises(environ: dict[str, str], error: Exception) -> None:
    store = MemcacheStore(environ=environ, library=Library(error))
    try:
        assert store.lookup(["a"]) == 0
        for call in (
            lambda: store.open_read(["a"], 1.0),
            lambda: store.open_write(["a"], 10),
            lambda: store.register([]) or store._control("register_buffer", 1, 2),
        ):
            with pytest.raises(StoreError, match=type(error).__name__):
                call()
        assert store._watch is not None
        assert store._watch._thread.is_alive()
    finally:
        store.close()


def test_a_start_that_raises(environ: dict[str, str]) -> None:
    with pytest.raises(StoreUnavailableError, match="of C"):
        MemcacheStore(environ=environ, library=Library(ERRORS[0], fails_at_start=True))


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "☃" * 70, "nosuch.invalid"])
def test_a_service_by_a_name_that_is_none(environ: dict[str, str], host: str) -> None:
    path = Path(environ[LOCAL_VARIABLE])
    path.write_text(path.read_text().replace("127.0.0.1", host))
    with pytest.raises((StoreUnavailableError, ConfigError)):
        MemcacheStore(environ=environ, library=Library(ERRORS[0]))
