"""Engines that share a store but differ in a fact learn which one at the start."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from tests.store.test_keys import SPACE
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store import (
    KeySpace,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
    WriteObject,
    handshake,
    require_hash_seed,
)
from vllm_kvoffload.store.handshake import MANIFEST_BYTES
from vllm_kvoffload.store.local import LocalStore


@pytest.fixture
def store() -> Iterator[LocalStore]:
    made = LocalStore(uuid.uuid4().hex, 4 * MANIFEST_BYTES)
    yield made
    made.close()


def test_the_same_facts_agree(store: LocalStore) -> None:
    first = handshake(store, SPACE)
    handshake(store, replace(SPACE, shard="1of2"))
    first.verify()
    assert store.lookup([SPACE.manifest_key]) == 1


DRIFT = [field.name for field in fields(KeySpace) if field.name not in ("model", "namespace", "shard")]


@pytest.mark.parametrize("name", DRIFT)
def test_drift_is_named(store: LocalStore, name: str) -> None:
    handshake(store, SPACE)
    value: object = 64 if name == "block_size" else "drifted"
    with pytest.raises(StoreMismatchError) as caught:
        handshake(store, replace(SPACE, **{name: value}))  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith(f"{name} differs")
    assert f"{value!r} here" in text
    assert f"{getattr(SPACE, name)!r} there" in text
    if name == "hash_probe":
        assert "PYTHONHASHSEED" in text


@pytest.mark.parametrize("name", ["model", "namespace"])
def test_what_is_apart_on_purpose_may_differ(store: LocalStore, name: str) -> None:
    handshake(store, SPACE)
    handshake(store, replace(SPACE, **{name: "other"}))


def test_a_store_that_lost_its_manifest_gets_it_again(store: LocalStore) -> None:
    made = handshake(store, SPACE)
    objects = store.open_write(["a", "b", "c", "d"], MANIFEST_BYTES)
    assert all(isinstance(object_, WriteObject) for object_ in objects)
    store.finish_write([o for o in objects if isinstance(o, WriteObject)], [False] * 4)
    assert store.lookup([SPACE.manifest_key]) == 0
    made.verify()
    assert store.lookup([SPACE.manifest_key]) == 1


def test_engines_that_start_together(store: LocalStore) -> None:
    failures: list[BaseException] = []

    def start() -> None:
        try:
            handshake(store, SPACE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures


def test_a_writer_that_never_ends_is_an_error(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package's attribute of that name is the function.
    monkeypatch.setattr(sys.modules["vllm_kvoffload.store.handshake"], "WRITER_S", 0.2)
    store.open_write([SPACE.manifest_key], MANIFEST_BYTES)
    with pytest.raises(StoreError, match="neither read nor written"):
        handshake(store, SPACE)


def test_a_store_that_is_down_is_an_error() -> None:
    store = LocalStore(uuid.uuid4().hex)
    with pytest.raises(StoreUnavailableError):
        handshake(store, SPACE)


@pytest.mark.parametrize("value", [None, "", "random", "-1"])
def test_random_hashes_are_refused_where_they_must_agree(value: str | None) -> None:
    environ = {} if value is None else {"PYTHONHASHSEED": value}
    with pytest.raises(ConfigError, match="export PYTHONHASHSEED=0"):
        require_hash_seed(environ, shared=True)
    require_hash_seed(environ, shared=False)


def test_a_fixed_seed_is_accepted() -> None:
    require_hash_seed({"PYTHONHASHSEED": "0"}, shared=True)
