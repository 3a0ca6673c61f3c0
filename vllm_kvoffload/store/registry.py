"""The stores, by their `backend` name."""

from __future__ import annotations

from typing import Literal

from vllm_kvoffload.memory.segment import SegmentError, SegmentFileError
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.store import BACKENDS
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.store.base import Store
from vllm_kvoffload.store.spans import DeviceCopies

Role = Literal["owner", "rank", "scheduler"]


def make_store(
    backend: str,
    *,
    local_bytes: int,
    role: Role,
    instance: str,
    device_id: int = 0,
    devices: DeviceCopies | None = None,
    qos_priority: int | None = None,
) -> Store:
    """Makes a client, importing its backend's package on demand.

    Args:
        backend: one of BACKENDS. local_bytes: size of the `local` backend's pool.
        role: "owner" for tensor parallel rank 0 (with `local` it holds the pool and must exist before other
            clients can work), "rank" for the other ranks, "scheduler" for a client that never copies.
        instance: one name per engine and data parallel rank. device_id: accelerator of this process.
        qos_priority: of `memcache`'s transfers, None for its default.
        devices: copies to and from that accelerator's memory for `local`; `memcache` has its own.

    Raises:
        ConfigError: unknown backend, an invalid option, or no memory for the pool.
        StoreUnavailableError: the backend's package is missing, or its service can't be reached.
        StoreError: another process owns this instance.
    """
    if backend == "local":
        from vllm_kvoffload.store.local import LocalStore

        if role != "owner":
            return LocalStore(instance, maps=role == "rank", devices=devices)
        try:
            return LocalStore(instance, local_bytes, devices=devices)
        except SegmentError as error:
            no_memory = not isinstance(error, SegmentFileError)
            fix = "make it smaller, or free memory" if no_memory else "do as the message says"
            raise ConfigError("local_dram_size_GB", round(local_bytes / GIB, 6), str(error), fix) from error
    if backend == "memcache":
        from vllm_kvoffload.store.memcache import MemcacheStore

        return MemcacheStore(copies=role != "scheduler", device_id=device_id, qos_priority=qos_priority)
    raise ConfigError(
        "backend", backend, f"must be one of {', '.join(BACKENDS)}", 'use "local" or "memcache"'
    )
