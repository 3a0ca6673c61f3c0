"""MemFabric's two modules, as far as they are used, within one process."""

from __future__ import annotations

import ctypes
import socket
import types
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvoffload.transfer import PeerHandle, ReadHandle, TransferEngine
from vllm_kvoffload.transfer.base import prepare
from vllm_kvoffload.transfer.spans import RegionTable

from tests.ascend.simulated_npu import sparse_copy  # isort: skip

HOST = "127.0.0.1"


class Memmove(TransferEngine):
    """Stands for MemFabric's transfer engine."""

    name = "memmove"
    tables: dict[bytes, RegionTable] = {}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self.options = options

    def register(self, regions: Any) -> None:
        self.local = self.tables[self.local_metadata()] = RegionTable(regions)

    def local_metadata(self) -> bytes:
        return str(id(self)).encode()

    def add_peer(self, metadata: bytes) -> PeerHandle:
        return PeerHandle(metadata.decode())

    def remove_peer(self, peer: PeerHandle) -> None:
        pass

    def read(self, peer: PeerHandle, spans: Any) -> ReadHandle:
        ready = prepare(spans, self.local, self.tables[peer.name.encode()])
        for ours, theirs, nbytes in zip(ready.local, ready.remote, ready.nbytes, strict=True):
            ctypes.memmove(int(ours), int(theirs), int(nbytes))
        handle = ReadHandle(spans.total_bytes)
        handle.finish()
        return handle

    def poll(self, handle: ReadHandle) -> Any:
        return handle.status

    def cancel(self, handle: ReadHandle) -> None:
        handle.cancelled = True

    def close(self) -> None:
        pass


class FakeOffload(types.ModuleType):
    """memfabric_hybrid.offload."""

    Scene = SimpleNamespace(SHARED="shared")
    OffloadConfig = SimpleNamespace

    def __init__(self) -> None:
        super().__init__("memfabric_hybrid.offload")
        self.config: Any = None
        self.sparse_copy = sparse_copy
        self.ended = False

    def initialize(self, config: Any) -> int:
        self.config = config
        return 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.zeros(shape, dtype=dtype)

    def uninitialize(self) -> None:
        self.ended = True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
