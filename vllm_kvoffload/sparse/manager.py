"""Sparse decode offload of one worker: pools, their partitions, and the state of the current step.

:meth:`SparseKVManager.begin_step` splits the batch into decode and prefill and assigns partitions to
decoding requests. Each layer's :class:`~vllm_kvoffload.sparse.offloaded.OffloadedKV` then serves attention:
decode through a :class:`~vllm_kvoffload.sparse.delivery.Delivery`, prefill through a
:class:`~vllm_kvoffload.sparse.prefill_stream.PrefillStream`. :meth:`SparseKVManager.release` frees the
partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.compact import CompactDelivery
from vllm_kvoffload.sparse.delivery import DecodeParts, Delivery, DevicePlanning, InPlaceDelivery
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.hot_pool import HotPool
from vllm_kvoffload.sparse.partitions import PartitionLease, PartitionTable
from vllm_kvoffload.sparse.prefill_stream import PrefillRequest, PrefillStream
from vllm_kvoffload.sparse.row_ops import RowOps, Rows, TensorRows
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step import StepBatch
from vllm_kvoffload.sparse.step_state import PrefillSpan, StepState
from vllm_kvoffload.trace.recorder import TraceRecorder

DEADLINE_S = 60.0
"""Limit of every wait for a copy. Copies take milliseconds, so only a stuck copy reaches it."""


class SparseKVManager:
    """Owns one worker's hot pools, their partitions, host writes and prefill buffers.

    Args:
        geometry: layers, groups, row bytes.
        config: validated options.
        max_num_seqs: maximum requests in a step; max_model_len: longest request, tokens.
        prefill_buffers: buffers that prefill streams through; 0 if prefill never reads the host pool.
        host_layers: for each layer the rows [num_blocks, block_size] of the host pool.
        block_size: tokens per block; None derives it from the shape of uint8 host rows.
        runtime: provides the streams for the copies.
        writer: whether this rank writes the host pool.
        barrier: collective over TP ranks, None for one.
        recorder: gets the decoding requests' top-k ids; None for no trace.
        row_ops: allocates and copies rows; None for uint8 tensors in plain memory.
        planning: makes decode plan on the device; None plans on the host.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        config: SparseOffloadConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        prefill_buffers: int,
        host_layers: list[Rows],
        block_size: int | None = None,
        runtime: Runtime,
        writer: bool = True,
        barrier: Callable[[], None] | None = None,
        recorder: TraceRecorder | None = None,
        deadline_s: float = DEADLINE_S,
        row_ops: RowOps | None = None,
        planning: DevicePlanning | None = None,
    ) -> None:
        self.geometry = geometry
        row_ops = row_ops or TensorRows(geometry.main_row_bytes)
        self.max_query_len = 1 + geometry.num_speculative_tokens
        self._stats = OffloadStats()
        self.partitions = PartitionTable(max_num_seqs)
        self.hot = HotPool(
            geometry,
            num_partitions=max_num_seqs,
            num_slots=config.topk_buffer_size,
            ways=config.ways,
            policy=config.policy,
            placement=config.placement,
            row_ops=row_ops,
            device=planning.device if planning is not None else "cpu",
        )
        self.host_rows = HostRows(
            host_layers, runtime, writer=writer, barrier=barrier, deadline_s=deadline_s, row_ops=row_ops
        )
        parts = DecodeParts(
            self.host_rows, self.hot, self.partitions, runtime, self._stats, deadline_s, recorder
        )
        self.delivery = (
            self._make_delivery(config, parts, max_model_len)
            if planning is None
            else planning.delivery(parts)
        )
        block_size = block_size or int(host_layers[0].shape[1])
        buffer_tokens = -(-max_model_len // block_size) * block_size
        buffers = [row_ops.zeros(buffer_tokens) for _ in range(prefill_buffers)]
        self.prefill = PrefillStream(self.host_rows, runtime, buffers, deadline_s)
        self._streams_prefill = prefill_buffers > 0
        self._seen: set[str] = set()
        self._step: StepState | None = None
        self._step_done = True
        self._pass_layers = range(0)

    def _make_delivery(self, config: SparseOffloadConfig, parts: DecodeParts, max_model_len: int) -> Delivery:
        if config.delivery == "in_place":
            return InPlaceDelivery(parts, self.geometry.index_topk, self.max_query_len)
        return CompactDelivery(
            parts,
            self.geometry,
            max_query_len=self.max_query_len,
            max_model_len=max_model_len,
            published=config.plans_as_published,
        )

    @property
    def stats(self) -> OffloadStats:
        """Totals since start."""
        self._stats.prefill_bytes = self.prefill.bytes_loaded
        self._stats.written_bytes = self.host_rows.bytes_written
        return self._stats

    @property
    def step(self) -> StepState:
        """State of the current step."""
        assert self._step is not None, "attention ran before begin_step"
        return self._step

    @property
    def in_graph(self) -> bool:
        """Whether the current step runs in a graph; False before the first step, for dummy batches."""
        return self._step is not None and self._step.in_graph

    def begin_step(self, batch: StepBatch) -> None:
        """Splits a batch and prepares its copies. Called once before the target's first layer runs.

        The previous step may have failed anywhere in its forward pass, and its batch may be repeated.

        Raises:
            TaskFailedError: a host write of an earlier step failed. Its rows are missing: the error persists.
            WaitTimeoutError: copies of an earlier step are stuck.
        """
        self.host_rows.begin_step()
        self._settle()
        fresh = tuple(req_id for req_id in batch.req_ids if req_id not in self._seen)
        self._begin(batch, range(self.geometry.num_target_layers), fresh)
        self._stats.decode_steps += bool(self.step.decode.size)

    def begin_draft(self, batch: StepBatch, index: int) -> None:
        """Begins draft pass ``index`` of a step, which runs the MTP layer.

        Draft 0 covers the target's batch, later drafts one token of each request. A pass reads earlier rows
        of its own layer only, so writes of the other layers may still be in flight.

        Raises: as :meth:`begin_step`.
        """
        layer = self.geometry.num_target_layers
        self.host_rows.await_own_writes(layer)
        self._settle()
        # Only draft 0, like the target pass, can contain a prefix that is computed in the same pass.
        self._begin(batch, range(layer, layer + 1), self.step.fresh if index == 0 else ())

    def begin_dummy_step(self) -> None:
        """Begins a step with no requests (profiling, graph capture, idle DP rank). Raises: as above."""
        self.host_rows.begin_step()
        self._settle()
        self._step = StepState.dummy()
        self._pass_layers = range(self.geometry.num_target_layers)

    def enter_graph(self, requests: int) -> StepState:
        """Prepares the launch or capture of a graph for ``requests`` requests; returns the padded step.

        The step counts as failed until :meth:`leave_graph` is called.
        """
        self._step = step = self.step.padded(requests, self.max_query_len)
        self._step_done = False
        self.delivery.begin_graph(self._pass_layers)
        return step

    def leave_graph(self) -> None:
        """Called after the launch: does the per-layer host bookkeeping in one go."""
        self.delivery.end_graph()
        self.host_rows.written_on_device(self._pass_layers, len(self.step.leases) * self.max_query_len)
        self._step_done = True

    def _begin(self, batch: StepBatch, layers: range, fresh: tuple[str, ...]) -> None:
        prefix_in_step = self._prefixes_in_step(batch, fresh)
        self._step = self._sort(batch, fresh, prefix_in_step)
        self._pass_layers = layers
        self._step_done = False
        self._seen.update(fresh)
        self._forget_rewritten(batch)
        if self._streams_prefill:
            requests = [
                PrefillRequest(
                    span.computed, batch.block_table[span.request], bool(prefix_in_step[span.request])
                )
                for span in self._step.prefill
            ]
            self.prefill.begin_step(requests, layers)

    def _settle(self) -> None:
        """Cleans up after a partly executed step, so that its requests can run again."""
        self.delivery.settle(self._step.leases if self._step is not None else ())
        if not self._step_done:
            self._seen.difference_update(self.step.fresh)
            self._step_done = True

    def _sort(
        self, batch: StepBatch, fresh: tuple[str, ...], prefix_in_step: npt.NDArray[np.bool_]
    ) -> StepState:
        is_decode, computed = batch.query_lens <= self.max_query_len, batch.computed
        decode, starts = np.flatnonzero(is_decode), batch.query_start_loc
        names = tuple(batch.req_ids[n] for n in decode)
        leases = tuple(self._acquire(name, batch) for name in names)
        partitions = np.array([lease.partition for lease in leases], dtype=np.int32)
        lengths = batch.query_lens[decode]
        start_loc = np.zeros(len(decode) + 1, dtype=np.int32)
        np.cumsum(lengths, out=start_loc[1:])
        tokens = np.repeat(starts[decode] - start_loc[:-1], lengths) + np.arange(start_loc[-1])
        token_partitions = torch.from_numpy(np.repeat(partitions, lengths))
        return StepState(
            decode=decode,
            prefill=tuple(
                PrefillSpan(n, int(starts[n]), int(starts[n + 1]), int(computed[n]), int(batch.seq_lens[n]))
                for n in np.flatnonzero(~is_decode).tolist()
            ),
            decode_prefix_in_step=bool(prefix_in_step[decode].any()),
            fresh=fresh,
            decode_ids=names,
            decode_tokens=torch.from_numpy(tokens.astype(np.int64)),
            token_partitions=token_partitions,
            decode_start_loc=torch.from_numpy(start_loc),
            decode_seq_lens=torch.from_numpy(np.ascontiguousarray(batch.seq_lens[decode])),
            decode_partitions=torch.from_numpy(partitions),
            decode_block_table=batch.block_table[torch.from_numpy(decode)].contiguous(),
            decode_slots=batch.slot_mapping[torch.from_numpy(tokens)],
            leases=leases,
        )

    def _acquire(self, req_id: str, batch: StepBatch) -> PartitionLease:
        lease = self.partitions.lookup(req_id)
        if lease is None:
            if not self.partitions.num_free:
                self._free_idle_partition(batch)
            lease = self.partitions.acquire(req_id)
            self.hot.reset_partition(lease.partition)
        return lease

    def _forget_rewritten(self, batch: StepBatch) -> None:
        """Drops hot rows that a prefill overwrites; for decode the plan does this (I-2).

        A session that continues with a long input prefills over the positions of its last rejected drafts.
        """
        for span in self.step.prefill:
            lease = self.partitions.lookup(batch.req_ids[span.request])
            if lease is not None:
                self.hot.forget_beyond(lease.partition, span.computed, self._pass_layers)

    def _free_idle_partition(self, batch: StepBatch) -> None:
        """Frees the partition that a request outside this batch has held longest.

        A session that waits for more input is neither running nor finished: it doesn't count towards
        max_num_seqs, but holds a partition. Without it, it only starts cold.
        """
        active = set(batch.req_ids)
        idle = next((req_id for req_id in self.partitions.live if req_id not in active), None)
        if idle is not None:
            self.partitions.release(idle)

    @staticmethod
    def _prefixes_in_step(batch: StepBatch, fresh: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """Mask of the requests whose prefix is computed by another request in this step.

        Only a request's first step can have one: later its prefix is its own, or was complete before.
        """
        in_step = np.zeros(batch.num_requests, dtype=np.bool_)
        if not fresh or batch.num_requests == 1:
            return in_step
        names, computed = set(fresh), batch.computed
        written = batch.slot_mapping.numpy() // batch.block_size
        for n, req_id in enumerate(batch.req_ids):
            if req_id not in names or not computed[n]:
                continue
            prefix = batch.block_table[n, : -(-int(computed[n]) // batch.block_size)].numpy()
            own = np.zeros(len(written), dtype=np.bool_)
            own[batch.query_start_loc[n] : batch.query_start_loc[n + 1]] = True
            in_step[n] = bool(np.isin(prefix, written[~own]).any())
        return in_step

    def finish_layer(self, layer: int) -> None:
        """Called when a layer's attention is done in this step."""
        if layer == self._pass_layers[-1]:
            self._step_done = True

    def release(self, req_ids: Iterable[str]) -> None:
        """Frees the partitions of finished, aborted or preempted requests. Unknown ids are ignored."""
        self._settle()  # no copy may still be writing to a partition when it gets a new owner
        for req_id in req_ids:
            self._seen.discard(req_id)
            if self.partitions.lookup(req_id) is not None:
                self.partitions.release(req_id)

    @property
    def device_bytes(self) -> int:
        """Device bytes of hot rows, residencies and buffers; vLLM owns the indexer caches."""
        return self.hot.nbytes + self.delivery.nbytes + self.prefill.nbytes
