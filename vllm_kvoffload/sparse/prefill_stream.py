"""Prefill under offload: each layer's prefix streams from the host pool through a few buffers.

A *job* is one layer of one prefill request. Jobs run in a fixed order (all requests of the first layer, then
of the next, ...), job ``j`` in buffer ``j % num_buffers``. A buffer holds the request's rows by position, so
a top-k index is the row number. While attention of job ``j`` runs, the loads of the next jobs run on the
``h2d`` stream; a buffer is refilled only after the job that used it has closed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from vllm_kvoffload.runtime.base import Event, Runtime, TaskFailedError
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.row_ops import Rows

STREAM = "h2d"


@dataclass(frozen=True)
class PrefillRequest:
    """A request's prefix, loaded in every layer.

    Attributes:
        computed: tokens of the prefix.
        blocks: int32 [B], its block table row.
        prefix_in_step: whether another request computes part of the prefix in this step.
    """

    computed: int
    blocks: torch.Tensor
    prefix_in_step: bool


class PrefillStream:
    """The buffers and their pipeline.

    Args:
        host_rows: the host pool.
        runtime: provides the load stream.
        buffers: rows [max_tokens] each, on the device.
        deadline_s: limit of every wait.
    """

    def __init__(
        self, host_rows: HostRows, runtime: Runtime, buffers: Sequence[Rows], deadline_s: float
    ) -> None:
        self.bytes_loaded = 0
        self._host_rows = host_rows
        self._compute = runtime.current_stream()
        self._stream = runtime.stream(STREAM)
        self._buffers = buffers
        self._deadline_s = deadline_s
        self._requests: list[PrefillRequest] = []
        self._layers = range(0)
        self._loaded: dict[int, Event] = {}
        self._next = 0

    def begin_step(self, requests: list[PrefillRequest], layers: range) -> None:
        """Starts the first loads of a pass's prefill requests, which will run through ``layers`` in order.

        Raises:
            WaitTimeoutError: loads of a failed step are stuck.
        """
        self._settle()
        self._requests = requests
        self._layers = layers
        self._next = 0
        if requests:
            if any(request.computed and not request.prefix_in_step for request in requests):
                self._host_rows.await_ranks()  # the loads don't wait for the step's first collective
            for job in range(min(len(self._buffers), self._num_jobs)):
                self._prefetch(job)

    def _settle(self) -> None:
        """Joins loads left by a partly executed step, which would otherwise overwrite buffers in use.

        Their data is no longer needed, so failures are ignored.
        """
        for event in self._loaded.values():
            with suppress(TaskFailedError):
                event.wait(self._deadline_s)
        self._loaded.clear()
        if self._next < self._num_jobs:
            self._stream.recover()

    def open(self, layer: int, index: int) -> Rows:
        """Returns a buffer, rows [max_tokens] as bytes, with the prefix of the step's ``index``-th request.

        Raises:
            RuntimeError: called out of order, or the engine has no buffers.
            TaskFailedError, WaitTimeoutError: the prefix could not be loaded.
        """
        if not len(self._buffers):
            raise RuntimeError(
                f"layer {layer} has a request to prefill, but this engine has no prefill buffers: it was "
                "made with prefill_buffers=0, as with keep_device_kv_cache, where prefill reads the cache"
            )
        job = (layer - self._layers.start) * len(self._requests) + index
        if job != self._next:
            raise RuntimeError(
                f"prefill job {job} (layer {layer}, request {index}) out of order: expected {self._next}"
            )
        if self._requests[index].prefix_in_step:  # its rows are computed in this step
            self._host_rows.await_layer(layer)
            self._load(job)
        event = self._loaded.get(job)
        if event is not None:
            event.wait(self._deadline_s)
            del self._loaded[job]  # after the wait: a stuck load must be joined before its buffer is reused
        return self._buffers[job % len(self._buffers)]

    def close(self) -> None:
        """Releases the open buffer for the next load; the caller must not read it afterwards."""
        job = self._next + len(self._buffers)
        self._next += 1
        if job < self._num_jobs:
            self._prefetch(job)

    @property
    def nbytes(self) -> int:
        """Device bytes of the buffers."""
        return sum(len(buffer) * self._host_rows.row_ops.row_bytes(buffer) for buffer in self._buffers)

    @property
    def _num_jobs(self) -> int:
        return len(self._requests) * len(self._layers)

    def _prefetch(self, job: int) -> None:
        if not self._requests[job % len(self._requests)].prefix_in_step:
            self._load(job)

    def _load(self, job: int) -> None:
        number, index = divmod(job, len(self._requests))
        layer = self._layers[number]
        request = self._requests[index]
        if not request.computed:
            return
        target = self._buffers[job % len(self._buffers)]
        source, row_ops = self._host_rows.layers[layer], self._host_rows.row_ops
        self._stream.wait_event(self._compute.record("the buffer's last use"))
        label = f"load layer {layer}"
        self._stream.submit(row_ops.host_read, source, request.blocks, request.computed, target, label=label)
        self._loaded[job] = self._stream.record(f"prefix of layer {layer}, prefill request {index}")
        self.bytes_loaded += request.computed * row_ops.row_bytes(target)
