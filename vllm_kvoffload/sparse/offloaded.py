"""Main KV of one layer with offload: serves rows from the hot pool (decode) or the prefill buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.paged import PagedKV, physical_rows
from vllm_kvoffload.sparse.row_ops import Rows
from vllm_kvoffload.sparse.step import AttendPart, StepBatch

_NO_ROWS = torch.empty(0)


class OffloadedKV:
    """A :class:`~vllm_kvoffload.sparse.step.LayerKV` over host pool, hot pool and prefill buffers.

    Args:
        manager: owns the pools and the step's state.
        layer: layer index.
        device: with ``keep_device_kv_cache``, the paged cache kept in addition. Prefill reads it, and every
            row that decode reads from the hot pool is compared with it.
    """

    def __init__(self, manager: SparseKVManager, layer: int, device: PagedKV | None = None) -> None:
        self._manager = manager
        self._layer = layer
        self._device = device
        self._row_ops = manager.host_rows.row_ops
        self._new_rows: Rows = _NO_ROWS

    def append(self, rows: Rows, slot_mapping: torch.Tensor) -> None:
        self._new_rows = rows
        if self._device is not None:
            self._device.append(rows, slot_mapping)
        if not self._manager.in_graph:  # in a graph the delivery does it
            self._manager.host_rows.write(self._layer, self._row_ops.as_bytes(rows), slot_mapping)

    def parts(self, topk: torch.Tensor, batch: StepBatch) -> Iterator[AttendPart]:
        step = self._manager.step
        if step.decode.size:
            yield self._decode_part(topk, batch)
        for index, span in enumerate(step.prefill):
            span_topk = topk[span.start : span.stop]
            tokens = torch.arange(span.start, span.stop)
            if self._device is not None:
                tables = batch.block_table[span.request].expand(len(tokens), -1)
                yield AttendPart(
                    tokens, self._device.rows, physical_rows(span_topk, tables, batch.block_size)
                )
                continue
            buffer, fresh = self._manager.prefill.open(self._layer, index), slice(span.start, span.stop)
            self._row_ops.place(buffer, span.computed, self._row_ops.as_bytes(self._new_rows), fresh)
            rows = self._row_ops.attended(buffer, self._new_rows)
            yield AttendPart(tokens, rows, span_topk, length=span.length)
            # Not in a `finally`: after a failed attention there is nothing to load ahead.
            self._manager.prefill.close()
        self._new_rows = _NO_ROWS  # a long prefill's rows of 78 layers would use up offload's savings
        self._manager.finish_layer(self._layer)

    def _decode_part(self, topk: torch.Tensor, batch: StepBatch) -> AttendPart:
        manager = self._manager
        part = manager.delivery.deliver(self._layer, topk, self._new_rows, manager.step)
        if self._device is not None:
            self._compare(part, topk, batch)
        return part

    def _compare(self, part: AttendPart, topk: torch.Tensor, batch: StepBatch) -> None:
        """Debugging aid of ``keep_device_kv_cache``: hot rows must equal the device cache's."""
        assert self._device is not None
        counts = torch.from_numpy(batch.query_lens).long()
        tables = batch.block_table.repeat_interleave(counts, dim=0)[part.tokens]
        where = physical_rows(topk[part.tokens], tables, batch.block_size)
        chosen = part.indices >= 0
        if not torch.equal(part.rows[part.indices[chosen]], self._device.rows[where[chosen]]):
            raise RuntimeError(f"layer {self._layer}: a hot row differs from the device KV cache")
