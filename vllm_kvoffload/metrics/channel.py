"""The worker's end: publishes counters where the API server can read them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics.fields import FIELDS, INDEX, file_name, pack_header, pack_slot
from vllm_kvoffload.sparse.stats import OffloadStats

logger = get_logger(__name__)

_MFD_CLOEXEC = 1


class StatsChannel:
    """Counters of one worker in an anonymous memory file, which ends with the process however that ends.

    Args:
        instance_id: `VllmConfig.instance_id`.
        dp_rank: the engine's index, `ParallelConfig.data_parallel_index`.
        tp_rank: the worker's, in its TP group.

    Starts with every value 0. Where the system has no memory files, it warns and publishes nothing: counters
    are not worth an engine. One thread publishes. In a child made by fork, `publish` does nothing.
    """

    def __init__(self, instance_id: str, dp_rank: int, tp_rank: int) -> None:
        self._values = [0] * len(FIELDS)
        self._sequence = 0
        self._pid = os.getpid()
        self._fd = -1
        try:
            self._fd = _memory_file(file_name(instance_id, dp_rank, tp_rank))
            _, slot = pack_slot(0, self._values)
            # Twice the same slot: the file has its full size at once, and the later of equals is as good.
            os.pwrite(self._fd, pack_header(self._pid, time.time_ns()) + slot + slot, 0)
        except OSError as error:
            self.close()
            logger.warning("KV offload: no memory file for this worker's metrics (%s); they are off.", error)

    @property
    def active(self) -> bool:
        """Whether `publish` reaches readers."""
        return self._fd >= 0

    def publish(self, stats: OffloadStats | Mapping[str, int], **more: int) -> None:
        """Publishes all values at once, a few microseconds.

        Takes counters and gauges by the names in `fields.FIELDS`, integers of 64 bits; a name not given keeps
        its last value. Raises KeyError for an unknown name, struct.error for a value that isn't such an
        integer; readers then still see the last publication.
        """
        if self._fd < 0 or os.getpid() != self._pid:
            return
        values = self._values.copy()
        for given in (vars(stats) if isinstance(stats, OffloadStats) else stats, more):
            for name, value in given.items():
                values[INDEX[name]] = value
        offset, slot = pack_slot(self._sequence + 1, values)
        os.pwrite(self._fd, slot, offset)
        self._values = values
        self._sequence += 1

    def close(self) -> None:
        """Ends the publication: readers drop this worker. Safe to call again."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _memory_file(name: str) -> int:
    """Descriptor of a new memory file, closed on exec. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # Pythons built for old systems, such as the stand-alone builds of uv, lack the call; libc has it.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError("neither Python nor libc has memfd_create")
    fd = int(libc.memfd_create(name.encode(), _MFD_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
