"""The worker side: publishes counters to a memory file that the API server reads."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping

from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics.layout import FieldSet
from vllm_kvoffload.sparse.stats import OffloadStats

logger = get_logger(__name__)

_MFD_CLOEXEC = 1


class StatsChannel:
    """Counters of one worker in an anonymous memory file, which the kernel frees when the process ends.

    Args:
        fields: one of `fields.FIELD_SETS`. A worker has at most one channel for each.
        instance_id: `VllmConfig.instance_id`.
        dp_rank: the engine's index, `ParallelConfig.data_parallel_index`.
        tp_rank: the worker's, in its TP group.

    Every value starts at 0. On a system without memory files it logs a warning and publishes nothing rather
    than failing the engine. One thread publishes. In a forked child, `publish` does nothing.
    """

    def __init__(self, fields: FieldSet, instance_id: str, dp_rank: int, tp_rank: int) -> None:
        self._fields = fields
        self._values = [0] * len(fields.fields)
        self._sequence = 0
        self._pid = os.getpid()
        self._fd = -1
        try:
            self._fd = _memory_file(fields.file_name(instance_id, dp_rank, tp_rank))
            _, slot = fields.pack_slot(0, self._values)
            # Both slots start equal, so the file has its full size at once and either slot is valid.
            os.pwrite(self._fd, fields.pack_header(self._pid, time.time_ns()) + slot + slot, 0)
        except OSError as error:
            self.close()
            logger.warning("KV offload: no memory file for this worker's metrics (%s); they are off.", error)

    @property
    def active(self) -> bool:
        """Whether `publish` reaches readers."""
        return self._fd >= 0

    def publish(self, stats: OffloadStats | Mapping[str, int], **more: int) -> None:
        """Publishes all values at once, in a few microseconds.

        Values are 64-bit integers by the keys of the field set; a missing one keeps its last value. Raises
        KeyError for an unknown key, struct.error for a value that isn't such an integer; readers then still
        see the previous publication.
        """
        if self._fd < 0 or os.getpid() != self._pid:
            return
        values = self._values.copy()
        for given in (vars(stats) if isinstance(stats, OffloadStats) else stats, more):
            for name, value in given.items():
                values[self._fields.index[name]] = value
        if values == self._values:
            return
        offset, slot = self._fields.pack_slot(self._sequence + 1, values)
        try:
            os.pwrite(self._fd, slot, offset)
        except OSError as error:
            self.close()
            logger.warning("KV offload: this worker's metrics can't be written (%s); they are off.", error)
            return
        self._values = values
        self._sequence += 1

    def close(self) -> None:
        """Closes the file, so that readers drop this worker. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _memory_file(name: str) -> int:
    """Descriptor of a new memory file, closed on exec. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    # Pythons built for old systems, such as uv's stand-alone builds, lack the call; libc provides it.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError("neither Python nor libc has memfd_create")
    fd = int(libc.memfd_create(name.encode(), _MFD_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd
