"""Memory of the host pool on Ascend: MemFabric's if available, which devices and peers can address.

Without MemFabric's offload module the pool is a shared-memory segment as on CPU. Then rows are copied by
torch, or mapped for the AscendC kernels; decode engines that pull KV from prefill require MemFabric.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.memory.segment import align_up
from vllm_kvoffload.platforms.ascend.memfabric_kernels import kernels_problem
from vllm_kvoffload.platforms.ascend.rows import SplitRows
from vllm_kvoffload.platforms.parts import RankGroup
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout

logger = get_logger(__name__)

ALIGNMENT = 2 << 20
HOST = "127.0.0.1"


class HostMemory(Protocol):
    """A host pool mapped into this process."""

    layers: list[SplitRows]
    total_bytes: int

    def close(self) -> None: ...


def load_offload() -> Any:
    """Returns `memfabric_hybrid.offload`, ready to be initialised.

    Raises:
        ImportError, OSError: it is not installed, too old, or CANN is missing.
        ConfigError: its copy kernels are not built.
    """
    found = offload_module()
    problem = kernels_problem()
    if problem is not None:
        raise problem
    return found


def offload_module() -> Any:
    """Returns `memfabric_hybrid.offload`, which is an attribute and not a module to import. Raises
    ImportError, OSError."""
    found = getattr(import_module("memfabric_hybrid"), "offload", None)
    if found is None:
        raise ImportError("this memfabric_hybrid has no offload module")
    return found


def _store_url() -> str:
    """Returns a private address at which the ranks of a pool find each other."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"tcp://{HOST}:{probe.getsockname()[1]}"


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Returns uint8 [nbytes] over memory owned elsewhere, which must outlive the tensor."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _layer(layout: HostPoolLayout, base: int, device_address: Callable[[int], int]) -> SplitRows:
    """Returns a layer whose components follow each other from ``base`` on, each aligned."""
    parts, addresses = [], []
    for component, (_, row_bytes) in enumerate(layout.components):
        nbytes = layout.component_bytes(component)
        shape = (layout.num_blocks, layout.block_size, row_bytes)
        parts.append(tensor_at(base, nbytes).view(shape))
        addresses.append(device_address(base))
        base += align_up(nbytes)
    return SplitRows(parts, addresses)


class MemfabricMemory:
    """A pool that rank 0 allocates in MemFabric's global address space, mapped at one address by all
    ranks.

    Args:
        offload: MemFabric's module. device: index of this process's NPU.

    Raises:
        ConfigError: MemFabric cannot be started or lacks memory.
    """

    def __init__(
        self, offload: Any, layout: HostPoolLayout, group: RankGroup, device: int, barrier: Callable[[], None]
    ) -> None:
        self._offload = offload
        layer_bytes = layout.total_bytes // layout.num_layers + ALIGNMENT
        self.total_bytes = -(-layout.num_layers * layer_bytes // GIB) * GIB
        owner = group.rank_in_group == 0
        config = offload.OffloadConfig()
        config.device_id = device
        config.reserve_size = self.total_bytes
        config.alloc_size = self.total_bytes if owner else 0
        config.world_size = group.world_size
        config.rank_id = group.rank_in_group
        config.scene = offload.Scene.SHARED
        url = group.broadcast_object(_store_url(), src=0) if group.world_size > 1 else _store_url()
        if hasattr(config, "store_url"):  # the default is one port for all engines of a machine
            config.store_url = url
        code = offload.initialize(config)
        if code != 0:
            rule = f"offload.initialize returned {code} for a host pool of {self.total_bytes >> 30} GiB"
            fix = "see that there are enough huge pages, and a driver from 25.5.1 on: kvoffload doctor"
            raise ConfigError("memfabric_hybrid", "not started", rule, fix)
        barrier()
        self._memory: list[torch.Tensor] = []
        bases: list[int] = []
        if owner:
            for _ in range(layout.num_layers):
                memory = offload.empty((layer_bytes,), dtype=torch.int8, pin_memory=True)
                self._memory.append(memory)
                bases.append(-(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT)
        if group.world_size > 1:
            bases = group.broadcast_object(bases, src=0)
        self.layers = [_layer(layout, base, self._device_address) for base in bases]

    def _device_address(self, address: int) -> int:
        """Translates a host address for kernels: equal on A3, a separate mapping on A2."""
        ask = getattr(self._offload, "get_dva", None)
        found = ask(address) if ask is not None else address
        if not found:
            logger.warning("MemFabric names no device address of host memory %#x", address)
        return found or address

    def close(self) -> None:
        self.layers.clear()
        self._memory.clear()
        self._offload.uninitialize()


class SegmentMemory:
    """The shared-memory segment of the CPU platform.

    Args:
        register: host_register(address, nbytes) -> address for the device; None if no kernel reads it.
        unregister: host_unregister(address).
    """

    def __init__(
        self,
        pool: HostPool,
        register: Callable[[int, int], int] | None = None,
        unregister: Callable[[int], object] | None = None,
    ) -> None:
        self._pool = pool
        self._unregister = unregister
        self._mapped = []
        self.total_bytes = pool.layout.total_bytes
        moved: list[tuple[int, int, int]] = []
        if register is not None:
            for start, nbytes in pool.chunks():
                self._mapped.append(start)
                moved.append((start, nbytes, register(start, nbytes)))
        self.layers = []
        for layer in range(pool.layout.num_layers):
            parts = list(pool.layer(layer).values())
            self.layers.append(SplitRows(parts, [_device_address(part, moved) for part in parts]))

    def close(self) -> None:
        self.layers.clear()
        if self._unregister is not None:
            for start in self._mapped:
                self._unregister(start)
        self._pool.close()


def _device_address(part: torch.Tensor, moved: list[tuple[int, int, int]]) -> int:
    """Returns the device address of a tensor of the pool; its own address if nothing was mapped."""
    address = part.data_ptr()
    if not moved:
        return address
    for start, nbytes, mapped in moved:
        if start <= address and address + part.numel() <= start + nbytes:
            return mapped + address - start
    raise RuntimeError("a layer of the host pool was not mapped in one piece: use MemFabric, or fewer blocks")
