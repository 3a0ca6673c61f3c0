"""Shared memory segments: create, attach, seal, close, and removal of those that killed processes left.

Owns the files named `kvoffload-*` in /dev/shm and their mappings; knows nothing about layers or tensors.
Nothing is left behind:

- The memory is reserved (posix_fallocate) in an unnamed file, so a process killed at that point leaves
  nothing behind, and missing memory is an error at start-up rather than a SIGBUS on first touch. Reserved
  pages read as zero.
- The file gets its name last. The name contains the owner's pid and start time and 128 random bits; the
  mode is 0600, and the kernel holds an flock for the owner until the owner is gone.
- `seal()` removes the name once every process has attached. From then on the kernel frees the memory with
  the last process that maps it, however that process ends.
- A process killed between naming and sealing leaves a name. The next start removes it if three checks show
  that the owner is dead: the name (no process with that pid and start time), the flock (which also covers
  owners in other pid namespaces that share /dev/shm) and the file (regular, owned by this user).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.memory.limits import MemoryLimit, memory_limits, ram_limits

logger = get_logger(__name__)

ALIGNMENT = 2 << 20  # huge page, which device drivers pin without splitting
RESERVE_STEP_BYTES = 1 << 30
PROGRESS_BYTES = 64 << 30
SHM_DIR = Path("/dev/shm")
NAME_PREFIX = "kvoffload"

_NAME = re.compile(rf"{NAME_PREFIX}-([0-9]+)-([0-9]+)-[0-9a-f]{{32}}")
_HEADER_BYTES = ALIGNMENT
_UNNAMED = "(without a name)"
_MAGIC = "vllm-kvoffload host pool 1"
_GIB = 1 << 30


class SegmentError(RuntimeError):
    """Base class of this module's errors."""


class SegmentMemoryError(SegmentError):
    """The segment does not fit in memory. Attributes: `requested_bytes`, `available_bytes`, `limited_by`."""

    def __init__(self, requested_bytes: int, limit: MemoryLimit) -> None:
        super().__init__(
            f"host pool needs {requested_bytes} bytes ({requested_bytes / _GIB:.2f} GiB); {limit.what}: "
            f"{limit.available_bytes} ({limit.available_bytes / _GIB:.2f} GiB); to fix it, {limit.fix}"
        )
        self.requested_bytes = requested_bytes
        self.available_bytes = limit.available_bytes
        self.limited_by = limit.what


class SegmentFileError(SegmentError):
    """The segment's file can't be created, for a reason other than its size."""


class SegmentAttachError(SegmentError):
    """No segment of that name can be attached by this user."""


class SegmentLayoutError(SegmentError):
    """The segment was created with a different size or description."""


class SegmentClosedError(SegmentError):
    """The segment was closed in this process."""


def align_up(nbytes: int) -> int:
    """`nbytes` rounded up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SharedSegment:
    """A mapped segment; make one with `create` or `attach`.

    `data`: uint8 [data_bytes], 2 MiB aligned in every process. The mapping lives until the last array made
    from it is gone, so `close()` can never pull memory from under a tensor.
    """

    def __init__(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        self.name = name
        self._data: npt.NDArray[np.uint8] | None = data
        self._remove_name: weakref.finalize[Any, Any] | None = None  # set in the owner only

    @classmethod
    def create(cls, data_bytes: int, description: str) -> SharedSegment:
        """Reserve, map and name `data_bytes` of zeroed memory. `attach` must pass the same `description`.

        Raises SegmentMemoryError, SegmentFileError; nothing is left behind then.
        """
        fd, data = _reserved_file(data_bytes, description)
        try:
            name = f"{NAME_PREFIX}-{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(16)}"
            with _explained():
                _give_name(fd, name)
        except BaseException:
            os.close(fd)
            raise
        segment = cls(name, data)
        segment._remove_name = weakref.finalize(segment, _remove_own_name, SHM_DIR / name, fd, os.getpid())
        return segment

    @classmethod
    def create_unnamed(cls, data_bytes: int, description: str) -> tuple[SharedSegment, int]:
        """Like `create`, but never named: other processes map the returned descriptor; the caller owns it.

        Raises SegmentMemoryError, SegmentFileError; nothing is left behind then.
        """
        fd, data = _reserved_file(data_bytes, description)
        return cls(_UNNAMED, data), fd

    @classmethod
    def attach_fd(cls, fd: int, data_bytes: int, description: str) -> SharedSegment:
        """Map a segment made by `create_unnamed` in any process. The caller keeps ownership of `fd`.

        Raises SegmentAttachError, SegmentLayoutError (size or description differ from the creator's).
        """
        _check_attachable(fd, _UNNAMED, _header(data_bytes, description))
        return cls(_UNNAMED, _map(fd, data_bytes))

    @classmethod
    def attach(cls, name: str, data_bytes: int, description: str) -> SharedSegment:
        """Map a named segment created by another process of this user.

        Raises SegmentAttachError, SegmentLayoutError (size or description differ from the creator's).
        """
        if not _NAME.fullmatch(name):
            raise SegmentAttachError(f"{name!r}: expected a host pool name, {NAME_PREFIX}-PID-START-HEX")
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentAttachError(
                f"cannot open host pool {SHM_DIR / name}: {error.strerror}; its owner ended or sealed it, "
                "runs as another user, or does not share /dev/shm with this process (another container?)"
            ) from error
        try:
            _check_attachable(fd, name, _header(data_bytes, description))
            return cls(name, _map(fd, data_bytes))
        finally:
            os.close(fd)

    @property
    def is_owner(self) -> bool:
        """True in the object that `create` returned."""
        return self._remove_name is not None

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """uint8 [data_bytes]. Raises SegmentClosedError."""
        if self._data is None:
            raise SegmentClosedError(f"host pool {self.name} was closed")
        return self._data

    def seal(self) -> None:
        """Remove the name; owner only, once every process has attached. Idempotent. Raises SegmentError."""
        if self._remove_name is None:
            raise SegmentError(f"host pool {self.name} can only be sealed by the rank that created it")
        self._remove_name()

    def close(self) -> None:
        """Drop the mapping; in the owner, also remove the name. Idempotent."""
        if self._remove_name is not None:
            self._remove_name()
        self._data = None


def _reserved_file(data_bytes: int, description: str) -> tuple[int, npt.NDArray[np.uint8]]:
    """Descriptor and mapped data of a new unnamed file, locked."""
    with _explained():
        return _reserve_file(data_bytes, description)


def _reserve_file(data_bytes: int, description: str) -> tuple[int, npt.NDArray[np.uint8]]:
    remove_stale_segments()
    total_bytes = _HEADER_BYTES + align_up(data_bytes)
    _check_fits(total_bytes, memory_limits(SHM_DIR))
    header = _header(data_bytes, description)
    fd = os.open(SHM_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # regardless of the umask
        fcntl.flock(fd, fcntl.LOCK_EX)
        _reserve(fd, total_bytes)
        os.pwrite(fd, header, 0)
        return fd, _map(fd, data_bytes)
    except BaseException:
        os.close(fd)
        raise


_FIXES = {
    errno.EROFS: "mount it writable",
    errno.EACCES: "let this user write there (mode 1777)",
    errno.EPERM: "let this user write there (mode 1777)",
    errno.ENOENT: "mount a tmpfs there",
    errno.ENOTDIR: "mount a tmpfs there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.ENOMEM: "free memory of the machine or of the container",
    errno.ENOSPC: "free space there, or enlarge it",
    errno.EDQUOT: "raise this user's quota there",
}
_FIXES |= dict.fromkeys(
    (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR, errno.ENOSYS),
    f"mount a tmpfs there: mount -t tmpfs tmpfs {SHM_DIR}",
)


@contextmanager
def _explained() -> Iterator[None]:
    """Turns an OSError into a SegmentFileError whose one-line message names the fix."""
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "error")
        raise SegmentFileError(
            f"the host pool's file in {SHM_DIR}: {error.strerror or error} ({name}); to fix it, "
            f"{_FIXES.get(error.errno or 0, 'see the kernel log (dmesg)')}"
        ) from error


_TOO_LARGE = {
    errno.ENOSPC: (
        "it filled up while the pool was reserved",
        "another process took the space; stop it or enlarge /dev/shm",
    ),
    errno.ENOMEM: (
        "it filled up while the pool was reserved",
        "another process took the space; stop it or enlarge /dev/shm",
    ),
    errno.EDQUOT: ("this user's quota there is used up", "raise the quota"),
    errno.EFBIG: ("a file may not be as large", "raise RLIMIT_FSIZE for the engine (ulimit -f unlimited)"),
}


def remove_stale_segments() -> list[str]:
    """Remove segments of this user whose owners are dead; return their names."""
    removed = []
    for name in sorted(os.listdir(SHM_DIR)):
        match = _NAME.fullmatch(name)
        if match and start_ticks(int(match[1])) != int(match[2]) and _remove_if_abandoned(SHM_DIR / name):
            logger.warning("removed host pool %s of process %s, which was killed", name, match[1])
            removed.append(name)
    return removed


def _remove_if_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        info = os.fstat(fd)
        if info.st_uid != os.geteuid() or not stat.S_ISREG(info.st_mode):  # root can open every user's
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()  # names are never used twice, so this is the file that was examined
        return True
    except OSError:  # locked: the owner is alive; missing: another process removed it first
        return False
    finally:
        os.close(fd)


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it doesn't exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _check_fits(nbytes: int, limits: list[MemoryLimit]) -> None:
    tightest = min(limits, key=lambda limit: limit.available_bytes, default=None)
    if tightest is not None and nbytes > tightest.available_bytes:
        raise SegmentMemoryError(nbytes, tightest)


def _reserve(fd: int, total_bytes: int) -> None:
    """Reserve the memory in steps, logging progress; stop before the machine is out of memory."""
    start, next_report = time.monotonic(), PROGRESS_BYTES
    for offset in range(0, total_bytes, RESERVE_STEP_BYTES):
        step = min(RESERVE_STEP_BYTES, total_bytes - offset)
        # Again at every step: other ranks of this machine may be taking the same free memory right now.
        limits = [MemoryLimit(what, offset + available, fix) for what, available, fix in ram_limits()]
        _check_fits(total_bytes, limits)
        try:
            os.posix_fallocate(fd, offset, step)
        except OSError as error:
            if error.errno not in _TOO_LARGE:
                raise
            why, fix = _TOO_LARGE[error.errno]
            what = f"{SHM_DIR} ({why}: {error.strerror})"
            raise SegmentMemoryError(total_bytes, MemoryLimit(what, offset, fix)) from error
        done, elapsed_s = offset + step, time.monotonic() - start
        if done >= next_report or (done == total_bytes and total_bytes >= PROGRESS_BYTES):
            next_report += PROGRESS_BYTES
            logger.info(
                "host pool: reserved %.0f of %.0f GiB in %.0f s, about %.0f s left",
                done / _GIB, total_bytes / _GIB, elapsed_s, elapsed_s / done * (total_bytes - done),
            )  # fmt: skip


def _header(data_bytes: int, description: str) -> bytes:
    text = json.dumps({"magic": _MAGIC, "data_bytes": data_bytes, "description": description}).encode()
    if len(text) >= _HEADER_BYTES:
        raise ValueError(f"description of {len(text)} bytes: expected less than {_HEADER_BYTES}")
    return text + b"\0"


def _check_attachable(fd: int, name: str, expected: bytes) -> None:
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode != stat.S_IFREG | 0o600:
        raise SegmentAttachError(f"{SHM_DIR / name}: expected a file of this user with mode 0600")
    found = os.pread(fd, _HEADER_BYTES, 0).partition(b"\0")[0]
    if found + b"\0" != expected:
        raise SegmentLayoutError(
            f"host pool {name} has another layout; expected {expected[:-1].decode()}, found "
            f"{found.decode(errors='replace')[:1000]}: all ranks must use the same model, options and version"
        )


def _give_name(fd: int, name: str) -> None:
    directory = os.open(SHM_DIR, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:
        # src_dir_fd makes Python call linkat with AT_SYMLINK_FOLLOW: the documented way to name an O_TMPFILE.
        os.link(f"/proc/self/fd/{fd}", SHM_DIR / name, src_dir_fd=directory)
    finally:
        os.close(directory)


def _remove_own_name(path: Path, fd: int, owner_pid: int) -> None:
    """Finalizer of the owner's object: runs at the first of seal, close, garbage collection and exit."""
    if os.getpid() == owner_pid:  # a forked child inherits the object, not the segment
        path.unlink(missing_ok=True)
    os.close(fd)


class _Mapping:
    """Owner of one mapping, which ends with the last array that refers to it."""

    def __init__(self, fd: int, offset: int, nbytes: int) -> None:
        length = align_up(nbytes)
        # Python's mmap module cannot align. Reserve addresses with room to do so, put the file over the
        # aligned part, give the rest back.
        area = _mmap(None, length + ALIGNMENT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = align_up(area)
        _mmap(address, length, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        if address > area:
            _libc.munmap(area, address - area)
        _libc.munmap(address + length, area + ALIGNMENT - address)
        weakref.finalize(self, _libc.munmap, address, length).atexit = False
        self.__array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _map(fd: int, data_bytes: int) -> npt.NDArray[np.uint8]:
    return np.asarray(_Mapping(fd, _HEADER_BYTES, data_bytes))


_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def _mmap(address: int | None, length: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if fd >= 0 else 0
    result = _libc.mmap(address, length, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise SegmentError(f"cannot map {length} bytes of shared memory: {reason}; check ulimit -v")
    return int(result)
