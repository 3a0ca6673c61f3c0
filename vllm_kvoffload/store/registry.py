"""Which stores there are, by the name that `backend` gives, and their options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from vllm_kvoffload.config import GIB, ConfigError
from vllm_kvoffload.sparse.segment import HostPoolError, HostPoolFileError
from vllm_kvoffload.store.base import Store
from vllm_kvoffload.store.spans import DeviceCopies

BACKENDS = ("local", "memcache")
SHARED_BACKENDS = ("memcache",)
"""Those that several engines share: block hashes of different processes must agree there."""

OPTIONS = ("local_dram_size_GB",)
"""Keys of `kv_connector_extra_config` that are the stores'."""

DEFAULT_LOCAL_GB = 4.0

Role = Literal["owner", "rank", "scheduler"]


def make_store(
    backend: str,
    options: Mapping[str, object],
    *,
    role: Role,
    instance: str,
    device_id: int = 0,
    devices: DeviceCopies | None = None,
) -> Store:
    """A new client; its backend's package is imported only now.

    Args:
        backend: one of BACKENDS. options: `kv_connector_extra_config`; keys that are not in OPTIONS are left
            alone.
        role: "owner" for tensor parallel rank 0 (with `local` it holds the pool and must be made before the
            others can do anything), "rank" for the other ranks, "scheduler" for a client that never copies.
        instance: one name per engine and data parallel rank. device_id: accelerator of this process.
        devices: how `local` reaches that accelerator's memory; `memcache` does it by itself.

    Raises:
        ConfigError: unknown backend, an option that can't work, or no memory for the pool.
        StoreUnavailableError: the backend's package is missing, or its service can't be reached.
        StoreError: another process owns this instance.
    """
    if backend == "local":
        from vllm_kvoffload.store.local import LocalStore

        size_gb = _local_gb(options)
        if role != "owner":
            return LocalStore(instance, maps=role == "rank", devices=devices)
        try:
            return LocalStore(instance, int(size_gb * GIB), devices=devices)
        except HostPoolError as error:
            wrong = isinstance(error, HostPoolFileError)
            fix = "do as the message says" if wrong else "make it smaller, or free memory"
            raise ConfigError("local_dram_size_GB", size_gb, str(error), fix) from error
    if backend == "memcache":
        from vllm_kvoffload.store.memcache import MemcacheStore

        return MemcacheStore(copies=role != "scheduler", device_id=device_id)
    raise ConfigError(
        "backend", backend, f"must be one of {', '.join(BACKENDS)}", 'use "local" or "memcache"'
    )


def _local_gb(options: Mapping[str, object]) -> float:
    value: Any = options.get("local_dram_size_GB", DEFAULT_LOCAL_GB)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ConfigError("local_dram_size_GB", value, "must be a number above 0", "write GiB without quotes")
    return float(value)
