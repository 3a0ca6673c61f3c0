"""Sparse decode offload of one worker: pools, rows of live requests, and the state of the current step.

A request's way through a step: :meth:`SparseKVManager.begin_step` sorts the batch into decode and prefill
and gives every decoding request its row; each layer's :class:`~vllm_kvoffload.sparse.offloaded.OffloadedKV`
then serves attention, decode through a :class:`~vllm_kvoffload.sparse.delivery.Delivery`, prefill through a
:class:`~vllm_kvoffload.sparse.prefill_stream.PrefillStream`. :meth:`release` gives everything back.
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
from vllm_kvoffload.sparse.host_store import HostStore
from vllm_kvoffload.sparse.hot_pool import HotPool
from vllm_kvoffload.sparse.prefill_stream import PrefillRequest, PrefillStream
from vllm_kvoffload.sparse.row_ops import RowOps, Rows, TensorRows
from vllm_kvoffload.sparse.rows import RowLease, RowTable
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step import StepBatch
from vllm_kvoffload.sparse.step_state import PrefillSpan, StepState
from vllm_kvoffload.trace.recorder import TraceRecorder

DEADLINE_S = 60.0
"""Bound of every wait for a copy; copies take milliseconds, so this only ends what is stuck."""


class SparseKVManager:
    """Owns hot pool, rows, host writes and prefill buffers of one worker.

    Args:
        geometry: layers, groups, row bytes.
        config: validated options.
        max_num_seqs: most requests in a step; max_model_len: longest request, tokens.
        prefill_buffers: buffers that prefill streams through; 0 where no prefill reads the host pool.
        host_layers: for each layer the rows [num_blocks, block_size] of the host pool.
        block_size: tokens of a block; None takes it from the shape of uint8 host rows.
        runtime: streams for the copies.
        writer: whether this rank writes the host pool.
        barrier: collective over TP ranks, None for one.
        recorder: gets the decoding requests' choices, None for nobody.
        row_ops: how rows are kept and moved, None for uint8 tensors in plain memory.
        planning: how decode is planned on the device, None for on the host.
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
        self.rows = RowTable(max_num_seqs)
        self.hot = HotPool(
            geometry,
            num_rows=max_num_seqs,
            num_slots=config.topk_buffer_size,
            ways=config.ways,
            policy=config.policy,
            row_ops=row_ops,
            device=planning.device if planning is not None else "cpu",
        )
        self.store = HostStore(
            host_layers, runtime, writer=writer, barrier=barrier, deadline_s=deadline_s, row_ops=row_ops
        )
        parts = DecodeParts(self.store, self.hot, self.rows, runtime, self._stats, deadline_s, recorder)
        self.delivery = (
            self._make_delivery(config, parts, max_model_len)
            if planning is None
            else planning.delivery(parts)
        )
        block_size = block_size or int(host_layers[0].shape[1])
        buffer_tokens = -(-max_model_len // block_size) * block_size
        buffers = [row_ops.zeros(buffer_tokens) for _ in range(prefill_buffers)]
        self.prefill = PrefillStream(self.store, runtime, buffers, deadline_s)
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
        """Totals so far."""
        self._stats.prefill_bytes = self.prefill.bytes_loaded
        self._stats.written_bytes = self.store.bytes_written
        return self._stats

    @property
    def step(self) -> StepState:
        """State of the current step."""
        assert self._step is not None, "attention ran before begin_step"
        return self._step

    @property
    def in_graph(self) -> bool:
        """Whether the current step runs in a graph. A dummy batch may come before any step."""
        return self._step is not None and self._step.in_graph

    def begin_step(self, batch: StepBatch) -> None:
        """Sorts a batch and prepares its copies. Called once before the target's first layer runs.

        The step before may have failed anywhere in its forward pass; the same batch may then come again.

        Raises:
            TaskFailedError: a host write of an earlier step failed. Its rows are lost, so this stays.
            WaitTimeoutError: copies of an earlier step are stuck.
        """
        self.store.begin_step()
        self._settle()
        fresh = tuple(req_id for req_id in batch.req_ids if req_id not in self._seen)
        self._begin(batch, range(self.geometry.num_target_layers), fresh)
        self._stats.decode_steps += bool(self.step.decode.size)

    def begin_draft(self, batch: StepBatch, index: int) -> None:
        """The same for one of a step's draft passes, number ``index``, in which the MTP layer runs.

        Draft 0 runs over the target's batch, later ones over one token of each request. What a pass reads
        of an earlier one is its own layer's; writes of the other layers go on meanwhile.

        Raises: as :meth:`begin_step`.
        """
        layer = self.geometry.num_target_layers
        self.store.await_own_writes(layer)
        self._settle()
        # Only in draft 0 can a prefix be computed by the same pass, as in the step's target pass.
        self._begin(batch, range(layer, layer + 1), self.step.fresh if index == 0 else ())

    def begin_dummy_step(self) -> None:
        """Begins a step without requests: profiling, graph capture, an idle DP rank. Raises: as above."""
        self.store.begin_step()
        self._settle()
        self._step = StepState.dummy()
        self._pass_layers = range(self.geometry.num_target_layers)

    def enter_graph(self, requests: int) -> StepState:
        """A graph of so many requests is about to run the layers of the step, or to be captured from them.

        As long as :meth:`leave_graph` isn't called, the step has failed.
        """
        self._step = step = self.step.padded(requests, self.max_query_len)
        self._step_done = False
        self.delivery.begin_graph(self._pass_layers)
        return step

    def leave_graph(self) -> None:
        """After the launch: does the layers' bookkeeping on the host in one go."""
        self.delivery.end_graph()
        self.store.written_on_device(self._pass_layers, len(self.step.leases) * self.max_query_len)
        self._step_done = True

    def _begin(self, batch: StepBatch, layers: range, fresh: tuple[str, ...]) -> None:
        late = self._late_requests(batch, fresh)
        self._step = self._sort(batch, fresh, late)
        self._pass_layers = layers
        self._step_done = False
        self._seen.update(fresh)
        self._forget_rewritten(batch)
        if self._streams_prefill:
            requests = [
                PrefillRequest(span.computed, batch.block_table[span.request], bool(late[span.request]))
                for span in self._step.prefill
            ]
            self.prefill.begin_step(requests, layers)

    def _settle(self) -> None:
        """Undoes what a step that failed half-way left behind, so that its requests can run again."""
        self.delivery.settle(self._step.leases if self._step is not None else ())
        if not self._step_done:
            self._seen.difference_update(self.step.fresh)
            self._step_done = True

    def _sort(self, batch: StepBatch, fresh: tuple[str, ...], late: npt.NDArray[np.bool_]) -> StepState:
        is_decode, computed = batch.query_lens <= self.max_query_len, batch.computed
        decode, starts = np.flatnonzero(is_decode), batch.query_start_loc
        names = tuple(batch.req_ids[n] for n in decode)
        leases = tuple(self._row(name, batch) for name in names)
        rows = np.array([lease.row for lease in leases], dtype=np.int32)
        lengths = batch.query_lens[decode]
        start_loc = np.zeros(len(decode) + 1, dtype=np.int32)
        np.cumsum(lengths, out=start_loc[1:])
        tokens = np.repeat(starts[decode] - start_loc[:-1], lengths) + np.arange(start_loc[-1])
        token_rows = torch.from_numpy(np.repeat(rows, lengths))
        return StepState(
            decode=decode,
            prefill=tuple(
                PrefillSpan(n, int(starts[n]), int(starts[n + 1]), int(computed[n]), int(batch.seq_lens[n]))
                for n in np.flatnonzero(~is_decode).tolist()
            ),
            decode_late=bool(late[decode].any()),
            fresh=fresh,
            decode_ids=names,
            decode_tokens=torch.from_numpy(tokens.astype(np.int64)),
            token_rows=token_rows,
            decode_start_loc=torch.from_numpy(start_loc),
            decode_seq_lens=torch.from_numpy(np.ascontiguousarray(batch.seq_lens[decode])),
            decode_rows=torch.from_numpy(rows),
            decode_block_table=batch.block_table[torch.from_numpy(decode)].contiguous(),
            decode_slots=batch.slot_mapping[torch.from_numpy(tokens)],
            leases=leases,
        )

    def _row(self, req_id: str, batch: StepBatch) -> RowLease:
        lease = self.rows.lookup(req_id)
        if lease is None:
            if not self.rows.num_free:
                self._free_idle_row(batch)
            lease = self.rows.acquire(req_id)
            self.hot.reset_row(lease.row)
        return lease

    def _forget_rewritten(self, batch: StepBatch) -> None:
        """Drops hot rows that a prefill makes stale; for decode the plan does this (I-2).

        A session that goes on with a long input prefills over the positions of its last rejected drafts.
        """
        for span in self.step.prefill:
            lease = self.rows.lookup(batch.req_ids[span.request])
            if lease is not None:
                self.hot.forget_beyond(lease.row, span.computed, self._pass_layers)

    def _free_idle_row(self, batch: StepBatch) -> None:
        """Takes a row from a request that doesn't run now, the one that got its row first.

        A session that waits for more input is neither running nor finished: it doesn't count against
        max_num_seqs, but has a row. Losing it costs a cold start, nothing else.
        """
        active = set(batch.req_ids)
        idle = next((req_id for req_id in self.rows.live if req_id not in active), None)
        if idle is not None:
            self.rows.release(idle)

    @staticmethod
    def _late_requests(batch: StepBatch, fresh: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """Which requests have a prefix that another request writes in this step.

        Only a request's first step can: afterwards its prefix is its own, or was complete before.
        """
        late = np.zeros(batch.num_requests, dtype=np.bool_)
        if not fresh or batch.num_requests == 1:
            return late
        names, computed = set(fresh), batch.computed
        written = batch.slot_mapping.numpy() // batch.block_size
        for n, req_id in enumerate(batch.req_ids):
            if req_id not in names or not computed[n]:
                continue
            prefix = batch.block_table[n, : -(-int(computed[n]) // batch.block_size)].numpy()
            own = np.zeros(len(written), dtype=np.bool_)
            own[batch.query_start_loc[n] : batch.query_start_loc[n + 1]] = True
            late[n] = bool(np.isin(prefix, written[~own]).any())
        return late

    def finish_layer(self, layer: int) -> None:
        """Attention of a layer is done in this step."""
        if layer == self._pass_layers[-1]:
            self._step_done = True

    def release(self, req_ids: Iterable[str]) -> None:
        """Frees the rows of requests that finished, were aborted or preempted. Unknown ids are fine."""
        self._settle()  # before a row gets another owner, nothing may be on its way to it
        for req_id in req_ids:
            self._seen.discard(req_id)
            if self.rows.lookup(req_id) is not None:
                self.rows.release(req_id)

    @property
    def device_bytes(self) -> int:
        """Device memory in use here: hot rows, residencies, buffers. Indexer caches are vLLM's."""
        return self.hot.nbytes + self.delivery.nbytes + self.prefill.nbytes
