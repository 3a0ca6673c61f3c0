"""The embedded store: a pool of this machine's memory, shared by the processes of one engine.

The index and the memory belong to the owner, the process of tensor parallel rank 0. Clients in that process
call the index directly, others through its socket. The socket carries no KV: every rank maps the pool and
makes its own copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from vllm_kvoffload.log import RateLimitedLog
from vllm_kvoffload.store.base import (
    CopySpans,
    Direction,
    ReadObject,
    StoreError,
    StoreUnavailableError,
    WriteObject,
    WriteRefusal,
)
from vllm_kvoffload.store.opened import OpenObjects
from vllm_kvoffload.store.remote import DirectIndex, IndexClient, RemoteIndex
from vllm_kvoffload.store.service import IndexServer, IndexService
from vllm_kvoffload.store.spans import DeviceCopies, LocalMemory, copy_checked
from vllm_kvoffload.store.wire import (
    CloseRead,
    FinishWrite,
    Granted,
    Lookup,
    OpenRead,
    OpenWrite,
    Reply,
    Request,
)
from vllm_kvoffload.transfer.base import Region

WRITE_LEASE_S = 60.0
CALL_S = 5.0
CLOSE_S = 2.0
"""Limit of the wait in `close` for running copies."""

_services: dict[str, IndexService] = {}
_services_lock = threading.Lock()


class LocalStore:
    """One client. With `pool_bytes` it is the owner, which must exist before other clients can work.

    Args:
        instance: name of the store on this machine; one per engine and data parallel rank.
        pool_bytes: size of the pool, for the owner. maps: whether this client copies (the scheduler's
            doesn't).
        write_lease_s: limit of an unfinished write. timeout_s: of a call to another process.
        devices: copies to and from device memory; None for a client with host memory only.

    Raises:
        StoreError: the instance already has an owner. SegmentMemoryError: not enough memory.
    """

    name = "local"

    def __init__(
        self,
        instance: str,
        pool_bytes: int = 0,
        *,
        maps: bool = True,
        write_lease_s: float = WRITE_LEASE_S,
        timeout_s: float = CALL_S,
        devices: DeviceCopies | None = None,
    ) -> None:
        self._instance = instance
        self._timeout_s = timeout_s
        self._maps = maps
        self._log = RateLimitedLog(__name__, subject="store")
        self._lock = threading.Lock()
        self._drained = threading.Condition(self._lock)
        self._copying = 0
        self._session = 0
        self._reads, self._writes = OpenObjects(), OpenObjects()
        self._local = LocalMemory(devices)
        self._service: IndexService | None = None
        self._server: IndexServer | None = None
        self._index: IndexClient | None = None
        self._closed = False
        if pool_bytes:
            self._own(pool_bytes, write_lease_s)

    def _own(self, pool_bytes: int, write_lease_s: float) -> None:
        service = IndexService(pool_bytes, write_lease_s)
        try:
            self._server = IndexServer(service, self._instance)
        except BaseException:
            service.close()
            raise
        self._service = service
        with _services_lock:
            _services[self._instance] = service
        self._index = DirectIndex(service)

    # ------------------------------------------------------------------------------------------ interface

    def register(self, regions: Sequence[Region]) -> None:
        self._local.add(regions)

    def lookup(self, keys: Sequence[str]) -> int:
        try:
            return self._call(Lookup(list(keys)))[1].run
        except StoreError as error:
            self._log.warning("lookup", f"counted as no hit: {error}")
            return 0

    def open_read(self, keys: Sequence[str], lease_s: float) -> list[ReadObject | None]:
        session, reply = self._call(OpenRead(list(keys), lease_s))
        base = self._enter(session, reply, self._reads)
        return [
            ReadObject(key, base + grant.offset, grant.nbytes, grant.handle)
            if isinstance(grant, Granted)
            else None
            for key, grant in zip(keys, reply.grants, strict=True)
        ]

    def close_read(self, objects: Sequence[ReadObject]) -> None:
        with self._lock:
            known = self._reads.remove(object_.handle for object_ in objects)
        try:
            if known:
                self._call(CloseRead(known))
        except StoreError as error:
            self._log.warning("close", f"objects stay pinned to the end of their leases: {error}")

    def open_write(self, keys: Sequence[str], nbytes: int) -> list[WriteObject | WriteRefusal]:
        if nbytes < 1:
            raise StoreError(f"an object of {nbytes} bytes: expected at least 1")
        session, reply = self._call(OpenWrite(list(keys), nbytes))
        base = self._enter(session, reply, self._writes)
        return [
            WriteObject(key, base + grant.offset, grant.nbytes, grant.handle)
            if isinstance(grant, Granted)
            else WriteRefusal(grant)
            for key, grant in zip(keys, reply.grants, strict=True)
        ]

    def finish_write(self, objects: Sequence[WriteObject], ok: Sequence[bool]) -> list[bool]:
        handles = [object_.handle for object_ in objects]
        with self._lock:
            known = set(self._writes.remove(handles))
        if not known:
            return [False] * len(objects)
        sent = [(handle, good) for handle, good in zip(handles, ok, strict=True) if handle in known]
        _, reply = self._call(FinishWrite([handle for handle, _ in sent], [good for _, good in sent]))
        published = dict(zip([handle for handle, _ in sent], reply.ok, strict=True))
        return [published.get(handle, False) for handle in handles]

    def copy(self, spans: CopySpans, direction: Direction) -> None:
        index = self._connected()
        memory = index.memory() if self._maps else None
        if memory is None:
            raise StoreError("this client of the local store was made without memory: it can't copy")
        with self._lock:
            self._begin_session(index.session)
            session = self._session
            view = (self._writes if direction == "save" else self._reads).view()
            self._copying += 1
        try:
            deadline = view.first_deadline(spans.object_address)
            if time.monotonic() >= deadline:
                raise StoreError(f"{direction}: the lease of an object has ended")
            copy_checked(spans, direction, view.table, self._local)
            # The memory may have been reused for another object meanwhile: the loaded data is invalid.
            if time.monotonic() >= deadline or index.session != session:
                raise StoreError(f"{direction}: the lease of an object ended during the copy")
        finally:
            with self._lock:
                self._copying -= 1
                self._drained.notify_all()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            drained = self._drained.wait_for(lambda: self._copying == 0, CLOSE_S)
            self._reads.clear()
            self._writes.clear()
        if self._index is not None:
            self._index.close(drained=drained)
        if self._service is not None:
            with _services_lock:
                _services.pop(self._instance, None)
            assert self._server is not None
            self._server.close()
            self._service.close()

    # ------------------------------------------------------------------------------------------- sessions

    def _call(self, request: Request) -> tuple[int, Reply]:
        return self._connected().call(request)

    def _connected(self) -> IndexClient:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError("local store: closed in this process")
            if self._index is None:
                with _services_lock:
                    service = _services.get(self._instance)
                if service is not None:
                    self._index = DirectIndex(service)
                else:
                    self._index = RemoteIndex(
                        self._instance, self._timeout_s, self._has_drained, maps=self._maps
                    )
            return self._index

    def _has_drained(self) -> bool:
        with self._lock:
            return self._copying == 0

    def _begin_session(self, session: int) -> None:
        if session > self._session:
            self._session = session
            self._reads.clear()
            self._writes.clear()

    def _enter(self, session: int, reply: Reply, opened: OpenObjects) -> int:
        """Records the grants; returns the base address of their offsets."""
        index = self._connected()
        base = int(index.memory().ctypes.data) if self._maps else 0
        with self._lock:
            self._begin_session(session)
            if session < self._session or index.session != session:
                raise StoreUnavailableError("local store: its index was lost meanwhile")
            for grant in reply.grants:
                if isinstance(grant, Granted):
                    opened.add(grant.handle, base + grant.offset, grant.nbytes, grant.deadline)
        return base
