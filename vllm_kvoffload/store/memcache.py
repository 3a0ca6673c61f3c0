"""MemCache Hybrid: a pool over the host memory of all engine processes, indexed by a MetaService.

Uses the layerwise calls of `memcache_hybrid.DistributedObjectStore`: objects are reserved, written and read
at global addresses, and leased during reads. The library reports failures as codes and may block for minutes
when its service is down, so its control calls run with a deadline on separate threads. Copies run in the
caller's thread, which must not continue while the library uses the memory.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.store.base import (
    CopySpans,
    Direction,
    ReadObject,
    StoreError,
    StoreUnavailableError,
    WriteObject,
    WriteRefusal,
)
from vllm_kvoffload.store.memcache_conf import LOCAL_VARIABLE, Endpoint, LocalConf, read_local
from vllm_kvoffload.store.opened import OpenObjects
from vllm_kvoffload.store.patience import PROBE_S, PatientCalls, ServiceWatch, probe
from vllm_kvoffload.store.spans import by_device
from vllm_kvoffload.transfer.base import Region
from vllm_kvoffload.transfer.spans import RegionTable

logger = get_logger(__name__)

T = TypeVar("T")

QOS_VARIABLE = "MF_DEVICE_UB_QOS"
CALL_S = 5.0
INIT_S = 120.0
WRITE_LEASE_S = 30.0
LEASE_MARGIN_S = 5.0
"""Extra duration of MemCache's leases over this client's, so that the latter end first."""
START_AGAIN_S = 1.0
"""Time for which calls fail immediately after a failed start of a client that doesn't copy."""
FULL_WAIT_S = 0.5
"""Time for which an allocation is retried, because eviction runs in the background."""
FULL_POLL_S = 0.1

DRAM = 1
"""The library's code for the type of memory to allocate."""
OK, EXISTS, DISCARD = 0, 1, -1
META_DOWN, BEING_WRITTEN = -3014, -3101
NO_SUCH_KEY = (-3007, -3102)
CODES = {
    -1: "failed",
    -2: "memory of another kind than the direction says",
    -3000: "invalid key or argument",
    -3004: "no answer in time",
    -3007: "no such key",
    META_DOWN: "the MetaService can't be reached",
    -3019: "closed",
    BEING_WRITTEN: "being written",
    -3102: "no such key",
    -3106: "no such lease",
}
_DIRECTIONS = {
    ("save", "npu"): "L2G",
    ("load", "npu"): "G2L",
    ("save", "host"): "H2G",
    ("load", "host"): "G2H",
}
_INSTALL = (
    "install memfabric_hybrid and memcache_hybrid (pip install memcache-hybrid, or build both from their "
    "release branches)"
)


def explain(code: object) -> str:
    """A return code in words."""
    return f"{code} ({CODES[code]})" if isinstance(code, int) and code in CODES else str(code)


class MemcacheStore:
    """One `DistributedObjectStore`.

    Args:
        copies: whether this process contributes memory and copies; the scheduler's doesn't.
        device_id: accelerator of this process. environ: contains MMC_LOCAL_CONFIG_PATH.
        qos_priority: of transfers, 0 to 4, greater is sooner; None for the library's default.
        library: substitute for `memcache_hybrid` in tests. timeout_s: of a control call.
        write_lease_s: limit of an unfinished write.

    Raises:
        ConfigError: MMC_LOCAL_CONFIG_PATH or its file is invalid.
        StoreUnavailableError: the package is missing, the MetaService is down, or its start failed.
    """

    name = "memcache"

    def __init__(
        self,
        *,
        copies: bool = True,
        device_id: int = 0,
        environ: MutableMapping[str, str] = os.environ,
        qos_priority: int | None = None,
        library: Any = None,
        timeout_s: float = CALL_S,
        write_lease_s: float = WRITE_LEASE_S,
    ) -> None:
        self._conf = _local_conf(environ)
        if qos_priority is not None:
            environ[QOS_VARIABLE] = str(qos_priority)  # read by the library when it starts
        self._library = library or _load()
        self._copies = copies
        self._timeout_s = timeout_s
        self._write_lease_s = write_lease_s
        self._log = RateLimitedLog(__name__, subject="store")
        self._lock = threading.Lock()
        self._reads, self._writes = OpenObjects(), OpenObjects()
        self._regions: list[Region] = []
        self._table = RegionTable([])
        self._stale: dict[str, float] = {}  # time at which a reserved key counts as abandoned
        self._last_handle = 0
        self._losses = 0
        self._calls = PatientCalls("kvoffload-memcache")
        self._closed = False
        self._device_id = device_id
        self._client: Any = None
        self._watch: ServiceWatch | None = None
        self._start_lock = threading.Lock()
        self._start_again_at = 0.0
        try:
            self._probe()
            if copies:
                self._start()
        except BaseException:
            self._calls.close()
            raise

    def _probe(self) -> None:
        """Raises StoreUnavailableError if a service is down: the library itself would wait for minutes."""
        for what, endpoint in (("MetaService", self._conf.meta), ("config store", self._conf.config_store)):
            _require_service(what, endpoint)

    def _start(self) -> ServiceWatch:
        """Starts the library if necessary. Raises StoreUnavailableError."""
        with self._start_lock:
            if self._watch is None:
                if time.monotonic() < self._start_again_at:
                    raise self._unavailable()
                self._start_again_at = time.monotonic() + START_AGAIN_S
                self._probe()
                self._client = _process.open(
                    self._library, self._device_id, self._copies, lambda init: self._calls.run(init, INIT_S)
                )
                meta = self._conf.meta
                self._watch = ServiceWatch(meta.host, meta.port, self._check_ready)
            return self._watch

    # ------------------------------------------------------------------------------------------ interface

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            try:
                self._table = RegionTable([*self._regions, *regions])
            except ValueError as error:
                raise StoreError(f"register: {error}") from error
            self._regions.extend(regions)
        for region in regions if self._copies else ():
            code = self._control("register_buffer", region.address, region.nbytes)
            if code not in (OK, None):
                raise StoreError(
                    f"memcache: register_buffer of {region.nbytes} bytes returned {explain(code)}"
                )

    def lookup(self, keys: Sequence[str]) -> int:
        try:
            states = self._per_key("batch_is_exist", keys)
        except StoreError as error:
            self._log.warning("lookup", f"counted as no hit: {error}")
            return 0
        run = 0
        while run < len(keys) and states[run] == EXISTS:
            run += 1
        return run

    def open_read(self, keys: Sequence[str], lease_s: float) -> list[ReadObject | None]:
        # Lease before lookup: an object found earlier might have been replaced by then.
        losses, deadline = self._losses_now(), time.monotonic() + lease_s
        leased = [code == OK for code in self._per_key("batch_add_lease", keys, _lease_ms(lease_s))]
        wanted = [key for key, good in zip(keys, leased, strict=True) if good]
        found = iter(self._per_key("batch_get_key_info", wanted))
        opened: list[ReadObject | None] = []
        with self._lock:
            self._begin(losses)
            for key, good in zip(keys, leased, strict=True):
                place = _place(next(found)) if good else None
                opened.append(None if place is None else ReadObject(key, *place, self._next_handle()))
            for object_ in opened:
                if object_ is not None:
                    self._reads.add(object_.handle, object_.address, object_.nbytes, deadline)
        return opened

    def close_read(self, objects: Sequence[ReadObject]) -> None:
        with self._lock:
            known = set(self._reads.remove(object_.handle for object_ in objects))
        self._remove_leases([object_.key for object_ in objects if object_.handle in known])

    def open_write(self, keys: Sequence[str], nbytes: int) -> list[WriteObject | WriteRefusal]:
        if nbytes < 1:
            raise StoreError(f"an object of {nbytes} bytes: expected at least 1")
        losses, deadline = self._losses_now(), time.monotonic() + self._write_lease_s
        new = self._unwritten(list(dict.fromkeys(keys)))
        addresses, taken = self._reserve(new, nbytes)
        made: dict[str, WriteObject | WriteRefusal] = {
            key: WriteRefusal.FULL for key in new if key not in addresses and key not in taken
        }
        with self._lock:
            self._begin(losses)
            for key, address in addresses.items():
                object_ = made[key] = WriteObject(key, address, nbytes, self._next_handle())
                self._writes.add(object_.handle, address, nbytes, deadline)
        # A key that occurs twice in one call is written once.
        return [made.pop(key, WriteRefusal.EXISTS) for key in keys]

    def finish_write(self, objects: Sequence[WriteObject], ok: Sequence[bool]) -> list[bool]:
        with self._lock:
            self._begin(self._losses_now())
            live = set(self._writes.live(time.monotonic()))
            known = live & set(self._writes.remove(object_.handle for object_ in objects))
        # MemCache doesn't check who finishes a key: a lapsed key may belong to another writer by now.
        sent = [(object_, good) for object_, good in zip(objects, ok, strict=True) if object_.handle in known]
        names = [object_.key for object_, _ in sent]
        codes = self._per_key("batch_write_finish", names, [OK if good else DISCARD for _, good in sent])
        done = [object_ for (object_, good), code in zip(sent, codes, strict=True) if good and code == OK]
        published = {object_.handle for object_ in self._withdraw_foreign(done)}
        return [object_.handle in published for object_ in objects]

    def _withdraw_foreign(self, objects: Sequence[WriteObject]) -> list[WriteObject]:
        """Returns the objects that were published; removes unfinished ones of other writers."""
        infos = self._per_key("batch_get_key_info", [object_.key for object_ in objects])
        places = [_place(info) for info in infos]
        ours, foreign = [], []
        for object_, place in zip(objects, places, strict=True):
            if place is not None and place[0] == object_.address:
                ours.append(object_)
            elif place is not None:
                foreign.append(object_.key)
        self._per_key("remove_batch", foreign)
        return ours

    def copy(self, spans: CopySpans, direction: Direction) -> None:
        if not self._copies:
            raise StoreError("this client of memcache was made without memory: it can't copy")
        losses = self._require_up()
        with self._lock:
            self._begin(losses)
            view = (self._writes if direction == "save" else self._reads).view()
            table, regions = self._table, list(self._regions)
        for what, known, addresses in (
            ("object", view.table, spans.object_address),
            ("local", table, spans.local_address),
        ):
            bad = known.find_outside(addresses, spans.nbytes)
            if bad is not None:
                where = f"{int(addresses[bad]):#x}+{int(spans.nbytes[bad])}"
                raise StoreError(f"{direction}: span {bad}: {what} memory {where} is not open or registered")
        deadline = view.first_deadline(spans.object_address)
        if time.monotonic() >= deadline:
            raise StoreError(f"{direction}: the lease of an object has ended")
        for device, chosen in by_device(spans.local_address, regions):
            self._copy(spans, chosen, direction, device)
        # Evicted, or lost by a restarted MetaService: the loaded data is invalid.
        if time.monotonic() >= deadline or self._losses_now() != losses:
            raise StoreError(f"{direction}: the lease of an object ended during the copy")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reads.clear()
            self._writes.clear()
        if self._watch is not None:
            self._watch.close()
            try:
                self._calls.run(_process.close, self._timeout_s)
            except Exception as error:
                logger.warning("memcache: closing: %s", error)
        self._calls.close()

    # ------------------------------------------------------------------------------------------- internals

    def _unwritten(self, keys: Sequence[str]) -> list[str]:
        """Returns the keys that are neither written nor being written.

        `batch_alloc` would give a second writer the first writer's address, on the first one's lease. If both
        ask at the same time, this client's deadline, set before the call, still ends before MemCache's lease
        of the first writer.
        """
        states = self._per_key("batch_is_exist", keys)
        absent = [key for key, state in zip(keys, states, strict=True) if state != EXISTS]
        codes = self._per_key("batch_add_lease", absent, _lease_ms(0))
        self._remove_leases([key for key, code in zip(absent, codes, strict=True) if code == OK])
        for key, code in zip(absent, codes, strict=True):
            if code not in (OK, BEING_WRITTEN, *NO_SUCH_KEY):
                raise StoreError(f"memcache: batch_add_lease of {key!r:.80} returned {explain(code)}")
        self._give_up_stale([key for key, code in zip(absent, codes, strict=True) if code == BEING_WRITTEN])
        return [key for key, code in zip(absent, codes, strict=True) if code in NO_SUCH_KEY]

    def _give_up_stale(self, keys: Sequence[str]) -> None:
        """Removes reservations whose writers must be dead, so that later calls find the keys free.

        MemCache never removes reservations in other processes' memory. A live writer doesn't touch a
        reservation after its lease. A reservation is stale after twice the lease, plus an offset that differs
        between clients, so that no client removes one that another has just renewed.
        """
        now = time.monotonic()
        lease_s = self._write_lease_s + 2 * LEASE_MARGIN_S
        with self._lock:
            self._stale = {
                key: self._stale.get(key) or now + lease_s * random.uniform(1, 2) for key in keys
            } | {key: at for key, at in self._stale.items() if at > now}
            over = [key for key in keys if self._stale[key] <= now]
            for key in over:
                del self._stale[key]
        if over:
            logger.warning("memcache: giving up %d reservations whose writers are gone", len(over))
            self._per_key("remove_batch", over)

    def _reserve(self, keys: Sequence[str], nbytes: int) -> tuple[dict[str, int], set[str]]:
        """Returns the addresses of the keys that fit, and the keys published by other writers meanwhile."""
        addresses: dict[str, int] = {}
        taken: set[str] = set()
        end = time.monotonic() + FULL_WAIT_S
        missing = list(keys)
        while missing:
            sizes = [nbytes] * len(missing)
            found = self._per_key("batch_alloc", missing, sizes, DRAM, _lease_ms(self._write_lease_s))
            addresses |= {key: int(at) for key, at in zip(missing, found, strict=True) if at and at > 0}
            missing = [key for key in missing if key not in addresses]
            if not missing or time.monotonic() > end:
                break
            states = self._per_key("batch_is_exist", missing)
            taken |= {key for key, state in zip(missing, states, strict=True) if state == EXISTS}
            missing = [key for key in missing if key not in taken]
            time.sleep(FULL_POLL_S)
        return addresses, taken

    def _remove_leases(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            self._control("batch_remove_lease", list(keys))  # at worst its code says that there was no lease
        except StoreError as error:
            self._log.warning("close", f"objects stay leased to the end of their leases: {error}")

    def _copy(self, spans: CopySpans, chosen: Any, direction: Direction, device: str) -> None:
        code = self._client.batch_copy(
            spans.object_address[chosen].tolist(),
            spans.local_address[chosen].tolist(),
            spans.nbytes[chosen].tolist(),
            int(getattr(self._library, _DIRECTIONS[direction, device]).value),
        )
        if code not in (OK, None):
            raise StoreError(f"memcache: batch_copy ({direction}) returned {explain(code)}")

    def _per_key(self, name: str, keys: Sequence[str], *arguments: Any) -> list[Any]:
        """One result for each key. Raises StoreError."""
        if not keys:
            return []
        results = self._control(name, list(keys), *arguments)
        if not isinstance(results, list) or len(results) != len(keys):
            raise StoreError(f"memcache: {name} of {len(keys)} keys answered {results!r:.80}")
        if META_DOWN in results:
            self._start().lose(f"{name} returned {explain(META_DOWN)}")
            raise self._unavailable()
        return results

    def _control(self, name: str, *arguments: Any) -> Any:
        self._require_up()
        return self._patient(name, lambda: getattr(self._client, name)(*arguments))

    def _patient(self, name: str, call: Callable[[], T]) -> T:
        try:
            return self._calls.run(call, self._timeout_s)
        except TimeoutError as error:
            self._start().lose(f"{name}: {error}")
            raise self._unavailable() from error
        except Exception as error:  # from the library, or because no thread can be started
            raise StoreError(f"memcache: {name}: {error!r}") from error

    def _check_ready(self) -> None:
        """Raises StoreError if the MetaService does not answer yet."""
        if self._closed:
            raise StoreError("closed in this process")
        try:
            (state,) = self._calls.run(lambda: self._client.batch_is_exist(["kvoffload"]), self._timeout_s)
        except Exception as error:  # the watch tries again
            raise StoreError(f"batch_is_exist: {error!r}") from error
        if state not in (OK, EXISTS):
            raise StoreError(f"batch_is_exist returned {explain(state)}")

    def _losses_now(self) -> int:
        return self._watch.losses if self._watch is not None else 0

    def _require_up(self) -> int:
        if self._closed:
            raise self._unavailable()
        watch = self._start()
        losses = watch.losses
        if watch.down:
            raise self._unavailable()
        return losses

    def _unavailable(self) -> StoreUnavailableError:
        if self._closed:
            return StoreUnavailableError("memcache: closed in this process")
        why = (self._watch.down if self._watch is not None else "") or "lost"
        return StoreUnavailableError(
            f"memcache: MetaService {self._conf.meta.url}: {why}; see that it runs (kvoffload meta); it is "
            "tried again in the background"
        )

    def _begin(self, losses: int) -> None:
        """Drops objects opened before the service was lost. The caller holds the lock."""
        if losses > self._losses:
            self._losses = losses
            self._reads.clear()
            self._writes.clear()
        if losses < self._losses:
            raise StoreUnavailableError("memcache: the MetaService was lost meanwhile")

    def _next_handle(self) -> int:
        self._last_handle += 1
        return self._last_handle


class _ProcessClient:
    """The library's client, one per process: its state is shared by all objects of the library.

    It must be started with memory if any client in the process copies. Clients that don't copy therefore
    start it at their first call, when the engine's worker in this process has already started it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None
        self._users = 0
        self._copies = False

    def open(
        self, library: Any, device_id: int, copies: bool, patient: Callable[[Callable[[], int]], int]
    ) -> Any:
        """The client, started by its first user. Raises StoreUnavailableError."""
        with self._lock:
            if self._users and copies and not self._copies:
                raise StoreUnavailableError(
                    "memcache: this process started the library without memory: make the copying client first"
                )
            if not self._users:
                client = library.DistributedObjectStore()
                _start_library(patient, lambda: int(client.init(device_id, copies)), device_id)
                self._client, self._copies = client, copies
            self._users += 1
            return self._client

    def close(self) -> None:
        """Releases one user's claim; the last one closes the client."""
        with self._lock:
            self._users -= 1
            if not self._users:
                client, self._client = self._client, None
                client.close()


_process = _ProcessClient()


def _start_library(
    patient: Callable[[Callable[[], int]], int], init: Callable[[], int], device_id: int
) -> None:
    try:
        code = patient(init)
    except TimeoutError as error:
        raise StoreUnavailableError(f"memcache: its start took more than {INIT_S:g} s: {error}") from error
    except Exception as error:
        raise StoreUnavailableError(f"memcache: DistributedObjectStore.init: {error!r}") from error
    if code != OK:
        raise StoreUnavailableError(
            f"memcache: DistributedObjectStore.init(device {device_id}) returned {explain(code)}; check "
            f"{LOCAL_VARIABLE}, that its world_size is not used up, the NPU driver, and free host memory"
        )


def _lease_ms(lease_s: float) -> int:
    return int((lease_s + LEASE_MARGIN_S) * 1000)


def _place(info: Any) -> tuple[int, int] | None:
    """(address, bytes) of a stored object, None if it no longer exists."""
    nbytes, addresses = int(info.size()), list(info.gva_list())
    return (int(addresses[0]), nbytes) if nbytes > 0 and addresses and addresses[0] > 0 else None


def _local_conf(environ: Mapping[str, str]) -> LocalConf:
    path = environ.get(LOCAL_VARIABLE)
    if not path:
        rule = "the memcache backend reads its configuration from that file"
        raise ConfigError(LOCAL_VARIABLE, path, rule, "write one with kvoffload conf, and export its path")
    return read_local(Path(path))


def _require_service(what: str, endpoint: Endpoint) -> None:
    # The library's own start would wait for minutes.
    try:
        probe(endpoint.host, endpoint.port, PROBE_S)
    except (OSError, UnicodeError, ValueError) as error:  # ValueError: not a host name
        raise StoreUnavailableError(
            f"memcache: no {what} at {endpoint.url}: {error}; start it first: kvoffload meta"
        ) from error


def _load() -> Any:
    try:
        return import_module("memcache_hybrid")
    except (ImportError, OSError) as error:  # OSError: a library that it links to is missing
        raise StoreUnavailableError(f"backend memcache: {error}; {_INSTALL}") from error
