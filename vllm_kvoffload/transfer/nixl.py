"""NIXL over UCX: host memory of this machine or another, without an accelerator."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

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
from vllm_kvoffload.transfer.net_devices import VARIABLE, listening_at
from vllm_kvoffload.transfer.spans import Int64Array, RegionTable, Spans

MODULES = ("nixl_cu12", "nixl")
PROGRESS_DELAY_US = 1000
"""Longest sleep of NIXL's progress thread; events end it earlier."""
_MEMORY = {"host": "DRAM"}


MAX_REGIONS = 1 << 16
MAX_BLOB_BYTES = 64 << 20
"""Size limit of a peer's metadata; a region takes about 200 bytes of NIXL's blob."""


class _NixlMetadata(msgspec.Struct, frozen=True, array_like=True, tag="nixl"):
    """digest: of the other fields. NIXL's parser trusts `blob`, and one wrong byte may end the process:
    damaged metadata must be refused before it is parsed."""

    agent: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
    blob: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_BLOB_BYTES)]
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    digest: bytes

    @classmethod
    def of(cls, agent: str, blob: bytes, regions: tuple[Region, ...]) -> _NixlMetadata:
        return cls(agent, blob, regions, _digest(agent, blob, regions))

    @property
    def is_intact(self) -> bool:
        return self.digest == _digest(self.agent, self.blob, self.regions)


def _digest(*parts: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


class _NixlRead(ReadHandle):
    def __init__(self, nbytes: int, native: Any) -> None:
        super().__init__(nbytes)
        self.native = native


def _load() -> Any:
    reasons = []
    for name in MODULES:
        try:
            return import_module(name)
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise TransferUnavailableError(
        f"transfer_backend nixl needs NIXL: pip install nixl-cu12==1.5.1 ({'; '.join(reasons)})"
    )


@contextmanager
def _patient_progress(nixl: Any) -> Iterator[None]:
    """Makes agents created in the `with` body use a progress thread that sleeps between events.

    NIXL's Python front end fixes the thread's delay at 0: it then polls continuously and takes a whole core
    from the engine, on prefill and on decode, even without transfers. A NIXL with a different structure is
    left unchanged.
    """
    bindings: Any = getattr(import_module(f"{nixl.__name__}._api"), "nixlBind", None)
    plain = getattr(bindings, "nixlAgentConfig", None)
    if not isinstance(plain, type):
        yield
        return

    class Patient(plain):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain


class NixlEngine(TransferEngine):
    """One NIXL agent with the UCX backend.

    It listens for peers on the interface of `host`, unless UCX_NET_DEVICES names others. A peer's metadata
    lists its registered regions, so that both ends of every span are checked before any byte is copied.
    Over shared memory UCX copies inside `read`; the next poll then reports the read as done.

    Raises:
        TransferUnavailableError: the package or its UCX plugin is not installed.
    """

    name = "nixl"

    def __init__(self, role: str, host: str) -> None:
        nixl = _load()
        for logger in MODULES:  # NIXL logs the creation of every agent
            logging.getLogger(logger).setLevel(logging.WARNING)
        self._name = f"{role}-{uuid.uuid4().hex}"
        with _patient_progress(nixl), listening_at(host) as devices:
            try:
                self._agent: Any = nixl.nixl_agent(self._name, nixl.nixl_agent_config(backends=["UCX"]))
            except Exception as error:  # NIXL's exceptions have no public base class
                where = f" on {devices}, the devices of {host}; {VARIABLE} names others" if devices else ""
                text = f"NIXL could not start its UCX backend{where}: {error!r}"
                raise TransferUnavailableError(text) from error
        if "UCX" not in self._agent.backends:
            raise TransferUnavailableError("this NIXL has no UCX plugin: pip install nixl-cu12==1.5.1")
        self._regions: list[Region] = []
        self._local = RegionTable([])
        self._registered: list[Any] = []
        self._peers: dict[str, tuple[bytes, RegionTable]] = {}

    def register(self, regions: Sequence[Region]) -> None:
        unknown = {region.device for region in regions} - set(_MEMORY)
        if unknown:
            raise TransferError(f"nixl here knows host memory only, not {', '.join(sorted(unknown))}")
        try:
            table = RegionTable([*self._regions, *regions])
        except ValueError as error:
            raise TransferError(str(error)) from error
        if not regions:
            return
        rows = [(region.address, region.nbytes, 0, "") for region in regions]
        try:
            self._registered.append(self._agent.register_memory(rows, "DRAM"))
        except Exception as error:
            raise TransferError(f"NIXL could not register {len(rows)} regions: {error!r}") from error
        self._regions += regions
        self._local = table

    def local_metadata(self) -> bytes:
        blob = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(_NixlMetadata.of(self._name, blob, tuple(self._regions)))

    def add_peer(self, metadata: bytes) -> PeerHandle:
        try:
            decoded = msgspec.msgpack.decode(metadata, type=_NixlMetadata)
            table = RegionTable(decoded.regions)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransferError(f"a peer's metadata are not those of a nixl engine: {error}") from error
        if not decoded.is_intact:
            raise TransferError("a peer's metadata were damaged on their way: their digest differs")
        known = self._peers.get(decoded.agent)
        if known is None or known[0] != metadata:
            if known is not None:
                self.remove_peer(PeerHandle(decoded.agent))
            try:
                added = self._agent.add_remote_agent(decoded.blob)
            except Exception as error:
                raise TransferError(f"NIXL could not add peer {decoded.agent}: {error!r}") from error
            if added not in (decoded.agent, decoded.agent.encode()):
                raise TransferError(f"a peer that calls itself {decoded.agent} is {added!r:.80} to NIXL")
            self._peers[decoded.agent] = (metadata, table)
        return PeerHandle(decoded.agent)

    def remove_peer(self, peer: PeerHandle) -> None:
        if self._peers.pop(peer.name, None) is not None:
            try:
                self._agent.remove_remote_agent(peer.name)
            except Exception as error:
                # NIXL has already lost the peer.
                logging.getLogger(__name__).debug("removing peer %s: %r", peer.name, error)

    def read(self, peer: PeerHandle, spans: Spans) -> ReadHandle:
        known = self._peers.get(peer.name)
        if known is None:
            raise TransferError(f"peer {peer.name} was never added, or removed")
        spans = prepare(spans, self._local, known[1])
        handle = _NixlRead(spans.total_bytes, None)
        if not len(spans):
            handle.finish()
            return handle
        try:
            local = self._agent.get_xfer_descs(_rows(spans.local, spans.nbytes), "DRAM")
            remote = self._agent.get_xfer_descs(_rows(spans.remote, spans.nbytes), "DRAM")
            handle.native = self._agent.initialize_xfer("READ", local, remote, peer.name)
            self._settle(handle, self._agent.transfer(handle.native))
        except Exception as error:
            self._end(handle, repr(error))
        return handle

    def poll(self, handle: ReadHandle) -> ReadStatus:
        assert isinstance(handle, _NixlRead)
        if handle.status is ReadStatus.PENDING:
            try:
                self._settle(handle, self._agent.check_xfer_state(handle.native))
            except Exception as error:
                self._end(handle, repr(error))
        if handle.status is ReadStatus.PENDING and handle.cancelled:
            self._end(handle, "cancelled")
        return handle.status

    def _settle(self, handle: _NixlRead, state: str) -> None:
        if state != "PROC":
            self._end(handle, "" if state == "DONE" else f"NIXL reports {state}")

    def _end(self, handle: _NixlRead, reason: str) -> None:
        """Releases the native handle; until NIXL accepts, the memory may still be written."""
        if handle.native is not None:
            try:
                handle.native.release()
            except Exception:
                handle.cancelled = True
                return
            handle.native = None
        handle.finish(reason)

    def cancel(self, handle: ReadHandle) -> None:
        handle.cancelled = True
        self.poll(handle)

    def close(self) -> None:
        for name in list(self._peers):
            self.remove_peer(PeerHandle(name))
        while self._registered:
            try:
                self._agent.deregister_memory(self._registered.pop())
            except Exception as error:
                logging.getLogger(__name__).debug("NIXL deregistration: %r", error)
        self._regions, self._local = [], RegionTable([])
        self._agent = None


def _rows(addresses: Int64Array, nbytes: Int64Array) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = nbytes
    return rows
