"""MemFabric between processes of one machine, over emulated device memory: what `memfabric_hybrid` offers to
KV connectors (`TransferEngine`) and to pools in host memory (`offload`).

The environment's package `memfabric_hybrid` consists of this module, since the real libraries want a driver.
Reads are checked against what the peer registered. It doesn't emulate protocols, ports of RDMA, or time-outs.
"""

from __future__ import annotations

import ctypes
import enum
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_emulator.device import on_cpu
from npu_emulator.hooks import LIBRARIES

MAX_VECTORS = 512  # of one process_vm_readv; the kernel's limit is 1024
PR_SET_PTRACER = 0x59616D61
POOLS = 0x1000_0000_0000  # pools begin here, 1 GiB apart by their port
POOL_SPACING = 1 << 30
WAIT_S = 60.0
CORES, PAIR_BYTES = 48, 88 << 10  # of sparse_copy's kernel

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_cann = ctypes.CDLL(str(LIBRARIES / "libnpu_emulator.so"))
_cann.npu_emulator_host_view.restype = ctypes.c_void_p
_cann.npu_emulator_host_view.argtypes = [ctypes.c_void_p]


class TransDataOpType(enum.Enum):
    SDMA = "sdma"
    DEVICE_RDMA = "device_rdma"
    DEVICE_URMA = "device_urma"


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def host_view(address: int) -> int:
    """Where this process may touch what is at a device address; host addresses are returned as they are."""
    return int(_cann.npu_emulator_host_view(address) or 0)


def set_log_level(_level: int) -> None:
    pass


def set_conf_store_tls(_enable: bool, _configuration: str) -> None:
    pass


class TransferEngine:
    """One-sided reads from a peer's registered memory. Functions return 0, or another number for an error."""

    def __init__(self) -> None:
        self._registered: list[tuple[int, int]] = []
        self._server: socket.socket | None = None

    def initialize(
        self, _store_url: str, unique_id: str, role: str, device_id: int, *,
        store_server_role: str = "Prefill", data_op_type: TransDataOpType = TransDataOpType.SDMA,
    ) -> int:  # fmt: skip
        if role not in ("Prefill", "Decode") or store_server_role not in ("Prefill", "Decode"):
            return -1
        if device_id < 0 or not isinstance(data_op_type, TransDataOpType):
            return -1
        _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # peers read this process
        self._server = socket.create_server((unique_id.split(":", maxsplit=1)[0], 0))
        threading.Thread(target=self._serve, args=(self._server,), daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        assert self._server is not None
        return int(self._server.getsockname()[1])

    def register_memory(self, address: int, nbytes: int) -> int:
        if not address or nbytes <= 0:
            return -1
        self._registered.append((address, nbytes))
        return 0

    def batch_register_memory(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        return max((self.register_memory(*pair) for pair in zip(addresses, sizes, strict=True)), default=0)

    def _serve(self, server: socket.socket) -> None:
        """Tells those who connect which process this is, and what it has registered."""
        while True:
            connection, _ = server.accept()
            with connection:
                regions = [(start, host_view(start), nbytes) for start, nbytes in self._registered]
                connection.sendall(json.dumps({"process": os.getpid(), "regions": regions}).encode())

    def batch_transfer_sync_read(
        self, peer: str, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]
    ) -> int:
        try:
            host, port = peer.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                told = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        except OSError:
            return -1
        return _read(told["process"], told["regions"], list(zip(local, remote, sizes, strict=True)))


def _read(process: int, regions: list[list[int]], spans: list[tuple[int, int, int]]) -> int:
    theirs = []
    for _, address, nbytes in spans:
        found = [r for r in regions if r[0] <= address and address + nbytes <= r[0] + r[2]]
        if not found:
            return -2  # memory that the peer hasn't registered
        theirs.append((found[0][1] + address - found[0][0], nbytes))
    ours = [(host_view(address), nbytes) for address, _, nbytes in spans]
    for first in range(0, len(spans), MAX_VECTORS):
        mine, other = ours[first : first + MAX_VECTORS], theirs[first : first + MAX_VECTORS]
        vectors = [(_Vector * len(part))(*(_Vector(*pair) for pair in part)) for part in (mine, other)]
        got = _libc.process_vm_readv(process, vectors[0], len(mine), vectors[1], len(other), 0)
        if got != sum(nbytes for _, nbytes in mine):
            return -3
    return 0


def sparse_copy(
    sources: Tensor, targets: Tensor, lengths: Tensor, count: Tensor, device: torch.device
) -> int:
    """Queues copies between addresses on the current stream. int64, int64, int32 [n] and int32 [1], on the
    device."""
    if device.index is None:
        return -1
    torch.ops.npu_emulator.sparse_copy(sources, targets, lengths, count)
    return 0


def _sparse_copy(sources: Tensor, targets: Tensor, lengths: Tensor, count: Tensor) -> None:
    number = int(count)
    if (sources.dtype, targets.dtype, lengths.dtype) != (torch.int64, torch.int64, torch.int32):
        raise TypeError("npu_emulator: addresses are int64 and lengths int32")
    if number != len(lengths):
        raise ValueError(f"npu_emulator: sparse_copy of {number} rows, and {len(lengths)} lengths")
    if number >= CORES:  # entries of the two halves go through a core's buffer in pairs
        pairs = lengths.view(2, -1)
        if int(pairs.sum(0).max()) > PAIR_BYTES or torch.any(pairs[0] % 32):
            raise ValueError("npu_emulator: sparse_copy's kernel can't do these lengths")
    rows = zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True)
    for source, target, length in rows:
        ctypes.memmove(host_view(target), host_view(source), length)


on_cpu(
    "npu_emulator",
    {"sparse_copy(Tensor sources, Tensor targets, Tensor lengths, Tensor count) -> ()": _sparse_copy},
)


class _Scene(enum.Enum):
    PRIVATE = 0
    SHARED = 1


class _Config:
    def __init__(self) -> None:
        self.device_id = self.reserve_size = self.alloc_size = self.rank_id = 0
        self.world_size = 1
        self.scene = _Scene.PRIVATE
        self.store_url = ""


class _Offload:
    """Host memory at one address in all ranks of an engine; `memfabric_hybrid.offload`."""

    Scene, OffloadConfig = _Scene, _Config

    def __init__(self) -> None:
        self._base = self._used = self._bytes = 0
        self._file = -1

    def initialize(self, config: _Config) -> int:
        if self._base or config.scene is not _Scene.SHARED or config.reserve_size % (1 << 30):
            return -1
        host, port = config.store_url.removeprefix("tcp://").rsplit(":", 1)
        base = POOLS + int(port) * POOL_SPACING
        if config.rank_id == 0:
            self._file = os.memfd_create("npu_emulator_pool")
            os.ftruncate(self._file, config.alloc_size)
            self._tell(host, int(port), config.world_size - 1)
        else:
            self._file = self._ask(host, int(port))
        self._bytes = os.fstat(self._file).st_size
        flags = mmap.MAP_SHARED | 0x100000  # MAP_FIXED_NOREPLACE
        found = _libc.mmap(base, self._bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._file, 0)
        if found != base:
            return -1
        self._base, self._used = base, 0
        return 0

    def _tell(self, host: str, port: int, ranks: int) -> None:
        if not ranks:
            return
        with socket.create_server((host, port)) as server:
            server.settimeout(WAIT_S)
            for _ in range(ranks):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(f"/proc/{os.getpid()}/fd/{self._file}".encode())
                    connection.settimeout(WAIT_S)
                    connection.recv(1)  # the other rank has it

    def _ask(self, host: str, port: int) -> int:
        end = time.monotonic() + WAIT_S
        while True:
            try:
                with socket.create_connection((host, port), timeout=WAIT_S) as connection:
                    file = os.open(connection.recv(256).decode(), os.O_RDWR)
                    connection.sendall(b"1")
                    return file
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def empty(
        self, sizes: Sequence[int], dtype: torch.dtype = torch.bfloat16, pin_memory: bool = False
    ) -> Tensor:
        """Memory of the pool; never given back before `uninitialize`."""
        if not pin_memory:
            raise NotImplementedError("npu_emulator: memfabric_hybrid.offload.empty of device memory")
        count = 1
        for size in sizes:
            count *= size
        nbytes = count * dtype.itemsize
        if self._used + nbytes > self._bytes:
            raise RuntimeError("malloc failed")
        start = self._base + self._used
        self._used += -(-nbytes // 4096) * 4096
        memory = (ctypes.c_uint8 * nbytes).from_address(start)
        return torch.frombuffer(memory, dtype=dtype).reshape(tuple(sizes))

    def get_dva(self, address: int) -> int:
        """The device's address of host memory: the same here."""
        return address if self._base <= address < self._base + self._bytes else 0

    def uninitialize(self) -> None:
        if self._base:
            _libc.munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self._bytes))
            os.close(self._file)
        self._base = self._bytes = self._used = 0

    sparse_copy = staticmethod(sparse_copy)


offload: Any = _Offload()
