"""Handshake of engines that share a store: differing settings raise an error instead of causing no hits.

A small object of the store, the manifest, holds the facts of a key space. Its key depends only on the model's
name and the namespace, so an engine that shares these but differs in any other fact finds the manifest and
reports the difference.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store.base import CopySpans, Store, StoreError, StoreMismatchError, WriteObject
from vllm_kvoffload.store.keys import VERSION, KeySpace
from vllm_kvoffload.transfer.base import Region

HASH_SEED = "PYTHONHASHSEED"
MANIFEST_BYTES = 4096
LEASE_S = 10.0
WRITER_S = 5.0
"""Time limit for another engine to write the manifest."""

_POLL_S = 0.01
_FIXES = {
    "hash_probe": f"give all engines the same {HASH_SEED} and --prefix-caching-hash-algo",
    "version": "run the same version of vllm-kvoffload everywhere",
}
_FIX = "give all engines the same value, or this one a namespace of its own"


def require_hash_seed(environ: Mapping[str, str], *, shared: bool) -> None:
    """Rejects random hashes if the hashes of several processes must agree.

    Raises ConfigError: `shared`, and PYTHONHASHSEED is unset, "random" or not a number.
    """
    value = environ.get(HASH_SEED)
    if shared and not (value or "").isdecimal():
        rule = "engines that share a store must hash alike; without a fixed seed every process may differ"
        raise ConfigError(HASH_SEED, value, rule, f"export {HASH_SEED}=0 for every engine of this store")


# Registered memory must outlive its registration, which ends with the store.
_buffers: weakref.WeakKeyDictionary[Store, npt.NDArray[np.uint8]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _buffer_of(store: Store) -> npt.NDArray[np.uint8]:
    with _lock:
        buffer = _buffers.get(store)
        if buffer is None:
            buffer = np.zeros(MANIFEST_BYTES, dtype=np.uint8)
            store.register([Region(int(buffer.ctypes.data), MANIFEST_BYTES)])
            _buffers[store] = buffer
        return buffer


class Handshake:
    """One engine's side of the comparison; must be made in a process that copies.

    Registers MANIFEST_BYTES of its own memory with the store, once per store. Raises StoreError on failure.
    """

    def __init__(self, store: Store, keyspace: KeySpace) -> None:
        self._store = store
        self._key = keyspace.manifest_key
        self._facts: dict[str, object] = {"version": VERSION, **asdict(keyspace)}
        del self._facts["shard"]  # shards are parts of one cache, with separate keys
        self._buffer = _buffer_of(store)
        self._address = int(self._buffer.ctypes.data)

    def verify(self) -> None:
        """Compares with the manifest, or writes one. Must be repeated: a store that lost its contents may be
        refilled by other engines.

        Raises StoreMismatchError, which names the fact and both values. StoreError: the store is down, or the
        manifest was not readable within WRITER_S.
        """
        end = time.monotonic() + WRITER_S
        while True:
            with _lock:
                found = self._read()
                done = found is not None or self._write()
            if found is not None:
                self._compare(found)
            if done:
                return
            if time.monotonic() > end:
                raise StoreError(f"{self._key} could be neither read nor written in {WRITER_S:g} s")
            time.sleep(_POLL_S)

    def _read(self) -> dict[str, object] | None:
        (object_,) = self._store.open_read([self._key], LEASE_S)
        if object_ is None:
            return None
        try:
            if object_.nbytes < MANIFEST_BYTES:
                raise StoreMismatchError(f"{self._key} holds {object_.nbytes} bytes: not a manifest of ours")
            self._store.copy(self._span(object_.address), "load")
        finally:
            self._store.close_read([object_])
        try:
            text = self._buffer.tobytes().rstrip(b"\0")
            return msgspec.json.decode(text, type=dict[str, object])
        except msgspec.MsgspecError as error:
            raise StoreMismatchError(f"{self._key} is not a manifest of ours: {error}") from error

    def _write(self) -> bool:
        (object_,) = self._store.open_write([self._key], MANIFEST_BYTES)
        if not isinstance(object_, WriteObject):
            return False
        text = msgspec.json.encode(self._facts)
        ok = False
        try:
            if len(text) > MANIFEST_BYTES:
                raise StoreError(f"facts of {len(text)} bytes: at most {MANIFEST_BYTES}")
            self._buffer[:] = 0
            self._buffer[: len(text)] = np.frombuffer(text, dtype=np.uint8)
            self._store.copy(self._span(object_.address), "save")
            ok = True
        finally:
            (published,) = self._store.finish_write([object_], [ok])
        return published

    def _span(self, address: int) -> CopySpans:
        return CopySpans(
            *(np.array([value], dtype=np.int64) for value in (address, self._address, MANIFEST_BYTES))
        )

    def _compare(self, found: dict[str, object]) -> None:
        for name in dict.fromkeys([*self._facts, *found]):
            theirs, ours = found.get(name), self._facts.get(name)
            if theirs != ours:
                raise StoreMismatchError(
                    f"{name} differs from that of the engine that filled the store: {ours!r} here, "
                    f"{theirs!r} there. Fix: {_FIXES.get(name, _FIX)}"
                )


def handshake(store: Store, keyspace: KeySpace) -> Handshake:
    """A verified handshake. Raises the errors of `Handshake` and `verify`."""
    made = Handshake(store, keyspace)
    made.verify()
    return made
