"""Asynchronous writes of new main KV rows into the host pool, and the waits that readers need.

TP rank 0 writes each row once, on the ``d2h`` stream. Three kinds of reader must wait for the write:

- the next step: :meth:`HostRows.begin_step` joins all writes of the previous step;
- another TP rank in the next step: it can't pass that step's first collective before rank 0 has joined.
  A reader that runs before that collective calls :meth:`HostRows.await_ranks`;
- a request that hits a prefix computed by another request *in the same step*: vLLM publishes block hashes
  when it schedules, before the rows exist. Such readers call :meth:`HostRows.await_layer` first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_kvoffload.runtime.base import Event, Runtime
from vllm_kvoffload.sparse.row_ops import RowOps, Rows, TensorRows

STREAM = "d2h"


class HostRows:
    """The host pool's rows by layer, with their pending writes.

    Args:
        layers: for each layer the rows [num_blocks, block_size] in host memory.
        runtime: provides the write stream.
        writer: whether this rank writes (TP rank 0) or only reads.
        barrier: collective over the TP ranks, None for a single rank.
        deadline_s: limit of every wait.
        row_ops: copies rows; None for uint8 tensors [num_blocks, block_size, row_bytes].
    """

    def __init__(
        self,
        layers: list[Rows],
        runtime: Runtime,
        *,
        writer: bool,
        barrier: Callable[[], None] | None,
        deadline_s: float,
        row_ops: RowOps | None = None,
    ) -> None:
        self.layers = layers
        self.row_ops: RowOps = row_ops or TensorRows(layers[0].shape[-1])
        self.bytes_written = 0
        self._compute = runtime.current_stream()
        self._stream = runtime.stream(STREAM)
        self.writer = writer
        self._barrier = barrier
        self._deadline_s = deadline_s
        self._written: list[Event | None] = [None] * len(layers)

    def begin_step(self) -> None:
        """Joins the previous step's writes: afterwards all of its rows are in the host pool."""
        self.join()
        self._written = [None] * len(self.layers)

    def join(self) -> None:
        """Waits for every write so far."""
        for layer in range(len(self.layers)):
            self.await_own_writes(layer)

    def write(self, layer: int, rows: Rows, slot_mapping: torch.Tensor) -> None:
        """Queues a write of the step's new rows of a layer, [T] as bytes; they must not change afterwards.

        ``slot_mapping``, int64 [T], is copied, because vLLM fills that buffer with the next step's slots
        before :meth:`begin_step` runs.
        """
        if not self.writer:
            return
        slots = slot_mapping.clone()
        self._stream.wait_event(self._compute.record("new rows"))
        host, label = self.layers[layer], f"write layer {layer}"
        self._stream.submit(self.row_ops.host_write, host, rows, slots, label=label)
        self._written[layer] = self._stream.record(f"host rows of layer {layer}")
        self.bytes_written += len(slots) * self.row_ops.row_bytes(rows)

    def written_on_device(self, layers: range, count: int) -> None:
        """Records that a graph launched on the compute stream writes ``count`` new rows in each layer."""
        if not self.writer:
            return
        event = self._compute.record("host rows")
        for layer in layers:
            self._written[layer] = event
            self.bytes_written += count * self.row_ops.row_bytes(self.layers[layer])

    def await_own_writes(self, layer: int) -> None:
        """Waits for this rank's writes of a layer so far."""
        event = self._written[layer]
        if event is not None:
            event.wait(self._deadline_s)

    def await_ranks(self) -> None:
        """Waits until every rank has begun the step; all rows of earlier steps are then in the host pool."""
        if self._barrier is not None:
            self._barrier()

    def await_layer(self, layer: int) -> None:
        """Waits until this step's rows of a layer are in the host pool, on every rank."""
        self.await_own_writes(layer)
        self.await_ranks()
