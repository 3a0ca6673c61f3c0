"""MemFabric Hybrid on Ascend: `memfabric_hybrid.TransferEngine`, pulling from prefill's device memory.

The library's reads are synchronous, so a separate thread performs them and `poll` checks its results. The
library selects the port on which it listens; a peer's name is "<host>:<port>".
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import msgspec

from vllm_kvoffload.transfer.base import (
    PeerHandle,
    ReadHandle,
    ReadStatus,
    Region,
    TransferEngine,
    TransferError,
    TransferUnavailableError,
    prepare,
)
from vllm_kvoffload.transfer.spans import RegionTable, Spans

TIMEOUT_VARIABLE = "ASCEND_TRANSFER_TIMEOUT"
MAX_REGIONS = 256
"""Maximum number of regions that the library can register."""

DEFAULT_PROTOCOL = "sdma"
"""The library's own default."""
_LOG_LEVEL_WARN = 2
_ROLES = {"prefill": "Prefill", "decode": "Decode"}
_INSTALL = (
    "install MemFabric Hybrid 1.2 or 1.3 (pip install memfabric-hybrid); it needs CANN, and NPU driver "
    "25.5.1 or later"
)


class _MemFabricMetadata(msgspec.Struct, frozen=True, array_like=True, tag="memfabric"):
    peer: str
    start: str  # new at every start: a restarted peer may get the same port
    regions: tuple[Region, ...]


class _MemfabricRead(ReadHandle):
    def __init__(self, nbytes: int, result: Future[int] | None) -> None:
        super().__init__(nbytes)
        self.result = result


def transfer_timeout_ms(environ: dict[str, str]) -> int:
    """The library's timeout of a read in milliseconds: longer than RDMA's own retries.

    HCCL_RDMA_TIMEOUT is an exponent: each of the HCCL_RDMA_RETRY_CNT tries takes 4.096 us * 2**n.
    """
    if TIMEOUT_VARIABLE in environ:
        return int(environ[TIMEOUT_VARIABLE])
    tries = int(environ.get("HCCL_RDMA_RETRY_CNT", "7"))
    one_us = 4.096 * 2 ** int(environ.get("HCCL_RDMA_TIMEOUT", "20"))
    return int(one_us * tries // 1000 + 3000)


class MemfabricEngine(TransferEngine):
    """One `memfabric_hybrid.TransferEngine`.

    Args:
        role: "prefill" or "decode". host: address that peers reach. device_id: NPU of this process.
        protocol: of reads: "sdma", "device_rdma" or "device_urma"; the same on both sides.
        module: substitute for `memfabric_hybrid` in tests.

    Raises:
        TransferUnavailableError: the package is missing or too old, or its start failed.
    """

    name = "memfabric"

    def __init__(
        self, *, role: str, host: str, device_id: int, protocol: str = DEFAULT_PROTOCOL, module: Any = None
    ) -> None:
        library = module or _load()
        os.environ[TIMEOUT_VARIABLE] = str(transfer_timeout_ms(dict(os.environ)))
        _configure(library)
        try:
            self._engine: Any = library.TransferEngine()
            code = self._engine.initialize(
                f"tcp://{host}",
                host,
                _ROLES[role],
                device_id,
                store_server_role=_ROLES["prefill"],
                **_protocol_option(library, protocol),
            )
        except (AttributeError, TypeError) as error:
            raise TransferUnavailableError(
                f"this memfabric_hybrid has another TransferEngine than release 1.2 ({error}): {_INSTALL}"
            ) from error
        if code != 0:
            raise TransferUnavailableError(
                f"memfabric_hybrid.TransferEngine.initialize(host={host}, device={device_id}, {protocol}) "
                f"returned {code}; check the NPU driver (npu-smi info), that set_env.sh was sourced, and "
                "the host's address"
            )
        self._peer = f"{host}:{self._engine.get_rpc_port()}"
        self._start = uuid.uuid4().hex
        self._role = role
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvoffload-memfabric")

    def register(self, regions: Sequence[Region]) -> None:
        try:
            table = RegionTable([*self._regions, *regions])
        except ValueError as error:
            raise TransferError(str(error)) from error
        if len(self._regions) + len(regions) > MAX_REGIONS:
            raise TransferError(f"{len(self._regions) + len(regions)} regions: at most {MAX_REGIONS}")
        for region in regions:
            # Decode's destinations need no registration: the host pool is memfabric's own memory.
            code = self._engine.register_memory(region.address, region.nbytes) if self._serves else 0
            if code not in (0, None):
                raise TransferError(f"register_memory({region.address:#x}, {region.nbytes}) returned {code}")
            self._regions.append(region)
        self._local = table

    @property
    def _serves(self) -> bool:
        return self._role == "prefill"

    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode(_MemFabricMetadata(self._peer, self._start, tuple(self._regions)))

    def add_peer(self, metadata: bytes) -> PeerHandle:
        try:
            decoded = msgspec.msgpack.decode(metadata, type=_MemFabricMetadata)
            if len(decoded.regions) > MAX_REGIONS:
                raise ValueError(f"{len(decoded.regions)} regions")
            table = RegionTable(decoded.regions)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferError(f"a peer's metadata are not those of a memfabric engine: {error}") from error
        name = f"{decoded.peer}/{decoded.start}"
        self._peers[name] = (decoded.peer, table)
        return PeerHandle(name)

    def remove_peer(self, peer: PeerHandle) -> None:
        self._peers.pop(peer.name, None)

    def read(self, peer: PeerHandle, spans: Spans) -> ReadHandle:
        known = self._peers.get(peer.name)
        if known is None:
            raise TransferError(f"peer {peer.name} was never added, or removed")
        spans = prepare(spans, self._local, known[1])
        if not len(spans):
            empty = _MemfabricRead(0, None)
            empty.finish()
            return empty
        lists = (spans.local.tolist(), spans.remote.tolist(), spans.nbytes.tolist())
        result = self._thread.submit(self._engine.batch_transfer_sync_read, known[0], *lists)
        return _MemfabricRead(spans.total_bytes, result)

    def poll(self, handle: ReadHandle) -> ReadStatus:
        assert isinstance(handle, _MemfabricRead)
        result = handle.result
        if handle.status is ReadStatus.PENDING and result is not None and result.done():
            handle.finish(_failure(result))
        return handle.status

    def cancel(self, handle: ReadHandle) -> None:
        """Does not stop a running read, which ends within the library's timeout."""
        assert isinstance(handle, _MemfabricRead)
        handle.cancelled = True
        if handle.result is not None:
            handle.result.cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._peers.clear()
        self._engine = None


def _failure(result: Future[int]) -> str:
    if result.cancelled():
        return "cancelled"
    error = result.exception()
    if error is not None:
        return repr(error)
    code = result.result()
    return "" if code == 0 else f"batch_transfer_sync_read returned {code}"


def _protocol_option(library: Any, protocol: str) -> dict[str, Any]:
    """The argument that chooses how reads go. Raises TransferUnavailableError if this release lacks it."""
    if protocol == DEFAULT_PROTOCOL:
        return {}
    kinds = getattr(library, "TransDataOpType", None)
    if kinds is None:  # 1.2.0 keeps it in the module of the engine
        kinds = getattr(sys.modules.get("_pymf_transfer"), "TransDataOpType", None)
    kind = getattr(kinds, protocol.upper(), None)
    if kind is None:
        raise TransferUnavailableError(
            f"this memfabric_hybrid knows no memfabric_transfer_protocol {protocol}: {_INSTALL}"
        )
    return {"data_op_type": kind}


def _load() -> Any:
    try:
        return import_module("memfabric_hybrid")
    except (ImportError, OSError) as error:  # OSError: a library of CANN is missing
        raise TransferUnavailableError(f"transfer_backend memfabric: {error}; {_INSTALL}") from error


def _configure(library: Any) -> None:
    """Disables TLS for the library's own store and limits its log to warnings, if this version allows it."""
    for name, arguments in (("set_log_level", (_LOG_LEVEL_WARN,)), ("set_conf_store_tls", (False, ""))):
        function = getattr(library, name, None)
        if function is not None:
            function(*arguments)
