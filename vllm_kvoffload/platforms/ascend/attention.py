"""Sparse attention of vllm-ascend over the :class:`LayerKV` that the runner bound to the layer.

Upstream's forward is kept: projections, indexer with its device cache, the attention operator. Two of its
methods are overridden. `exec_kv` passes new rows to the offload instead of writing a paged cache; the
attention method reads the hot pool or a prefill buffer instead. The operator takes paged keys, a block
table and positions: a row of the pool is passed as a short request whose positions are slots, and each
query token queries it separately, so that no causal mask hides slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch_npu
from vllm_ascend.attention.sfa_v1 import (
    AscendSFABackend,
    AscendSFAImpl,
    AscendSFAMetadata,
    AscendSFAMetadataBuilder,
)
from vllm_ascend.device.device_op import DeviceOperator

from vllm_kvoffload.engine import EngineOptions
from vllm_kvoffload.platforms.ascend.rows import SplitRows
from vllm_kvoffload.sparse.step import AttendPart, LayerKV, PoolSlots

if TYPE_CHECKING:
    from vllm_kvoffload.platforms.ascend.kernels import DeviceBatch
    from vllm_kvoffload.platforms.ascend.offload import AscendOffload, AscendPass


@dataclass
class KVOffloadSFAMetadata(AscendSFAMetadata):
    """Upstream's metadata, plus what the host needs to know of the pass.

    query_start_loc: int [requests + 1] in host memory, first query token of each request.
    """

    query_start_loc: torch.Tensor | None = None


class KVOffloadSFAMetadataBuilder(AscendSFAMetadataBuilder):
    """Builds :class:`KVOffloadSFAMetadata` for target and draft passes.

    Layers with and without an indexer have different caches, so upstream has a builder for each and calls
    both in every step. Their metadata describe the same pass.
    """

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        metadata_cls: type[AscendSFAMetadata] | None = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        super().__init__(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            metadata_cls or KVOffloadSFAMetadata,
            supports_dcp_with_varlen,
        )

    def _build(self, common_attn_metadata: Any, draft_index: int | None = None) -> KVOffloadSFAMetadata:
        metadata: KVOffloadSFAMetadata = super()._build(common_attn_metadata, draft_index)
        if draft_index:
            # After a step's first draft pass upstream counts rejected drafts in the lengths, but not
            # in the positions. Their rows must not be attended to.
            ends = common_attn_metadata.positions[: len(metadata.seq_lens)] + 1
            metadata.seq_lens = torch.minimum(metadata.seq_lens, ends.to(metadata.seq_lens.dtype))
        metadata.query_start_loc = common_attn_metadata.query_start_loc_cpu[
            : common_attn_metadata.num_reqs + 1
        ]
        return metadata


class KVOffloadSFAImpl(AscendSFAImpl):
    """Upstream's attention over the offload. Without a bound offload it behaves as upstream's."""

    kv: LayerKV | None = None
    offload: AscendOffload | None = None
    layer_index: int = -1

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if EngineOptions.of(self.vllm_config, "npu").offload.enabled:
            # Both write new rows into a paged main cache, which does not exist here, and drop the weights
            # that the unfused path needs.
            self.enable_mlapo = False
            self.enable_sfa_prolog_v3 = False
        super().process_weights_after_loading(act_dtype)

    def forward(
        self,
        layer_name: str,
        hidden_states: torch.Tensor,
        kv_cache: tuple[torch.Tensor, ...],
        attn_metadata: Any,
        need_gather_q_kv: bool = False,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        offload = self.offload if attn_metadata is not None else None
        if offload is not None and offload.current() is None:  # a dummy run
            assert output is not None
            return output.fill_(0)
        result: torch.Tensor = super().forward(
            layer_name, hidden_states, kv_cache, attn_metadata, need_gather_q_kv, output
        )
        return result

    def exec_kv(
        self,
        kv_no_split: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
        attn_metadata: Any,
    ) -> Any:
        if self.kv is None:
            return super().exec_kv(kv_no_split, cos, sin, kv_cache, slots, attn_metadata)
        assert self.kv_a_layernorm is not None
        latent, rope = torch.split(kv_no_split, [self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        norm = self.kv_a_layernorm
        latent = torch_npu.npu_rms_norm(latent.contiguous(), norm.weight, epsilon=norm.variance_epsilon)[0]
        rope = self.rope_single(rope.contiguous().unsqueeze(1), cos, sin).squeeze(1)
        slots = self._pass.batch.slot_mapping
        tokens = len(slots) if self._graph is None else len(self._graph.tokens)
        self.kv.append(SplitRows([latent[:tokens], rope[:tokens].contiguous()]), slots)
        return None, None

    def _execute_sparse_flash_attention_process(
        self,
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        kv_cache: tuple[torch.Tensor, ...],
        topk_indices: torch.Tensor,
        attn_metadata: Any,
        actual_seq_lengths_query: torch.Tensor,
        actual_seq_lengths_key: torch.Tensor,
    ) -> torch.Tensor:
        if self.kv is None:
            result: torch.Tensor = super()._execute_sparse_flash_attention_process(
                ql_nope,
                q_pe,
                kv_cache,
                topk_indices,
                attn_metadata,
                actual_seq_lengths_query,
                actual_seq_lengths_key,
            )
            return result
        batch, graph = self._pass.batch, self._graph
        ends = self._pass.causal_ends if graph is None else graph.ends
        topk = topk_indices.view(topk_indices.shape[0], -1)[: len(ends)]
        # The indexer's output beyond a short context is unspecified.
        topk = topk.masked_fill((topk < 0) | (topk >= ends.unsqueeze(1)), -1)
        if graph is not None:
            assert self.offload is not None
            assert self.offload.graphs is not None
            for part in self.kv.parts(topk, batch):  # a single part with all tokens in order
                out = self._attend(ql_nope, q_pe, part, batch.block_size, attn_metadata)
            self.offload.graphs.end_layer(self.layer_index)
            return out.masked_fill((graph.token_partitions < 0).view(-1, 1, 1), 0)
        out = torch.zeros_like(ql_nope, memory_format=torch.contiguous_format)
        for part in self.kv.parts(topk, batch):
            tokens = part.tokens.to(out.device)
            queries = (ql_nope.index_select(0, tokens), q_pe.index_select(0, tokens))
            out[tokens] = self._attend(*queries, part, batch.block_size, attn_metadata)
        return out

    @property
    def _pass(self) -> AscendPass:
        assert self.offload is not None
        current = self.offload.current()
        assert current is not None  # else forward would have returned
        return current

    @property
    def _graph(self) -> DeviceBatch | None:
        """Returns the step if it runs in a full graph, at fixed addresses."""
        graphs = self.offload.graphs if self.offload is not None else None
        return graphs.on if graphs is not None else None

    def _attend(
        self,
        ql_nope: torch.Tensor,
        q_pe: torch.Tensor,
        part: AttendPart,
        block_size: int,
        attn_metadata: Any,
    ) -> torch.Tensor:
        device = ql_nope.device
        pages = tuple(rows.view(-1, block_size, 1, rows.shape[-1]) for rows in part.rows.parts)
        view = self._view(part, block_size, device)
        result: torch.Tensor = DeviceOperator.execute_sparse_flash_attention_process(
            self,
            ql_nope,
            q_pe,
            pages,
            view.indices,
            attn_metadata,
            view.query_ends,
            view.key_lengths,
            block_table=view.block_table,
        )
        return result

    def _view(self, part: AttendPart, block_size: int, device: torch.device) -> PagedView:
        """Converts a part for the operator; layers of an index group share the result."""
        if not isinstance(part.topk_rows, PoolSlots):
            return request_view(part, block_size).to(device)
        assert self.offload is not None
        made = self.offload.pool_view
        if made is None or made[0] is not part.topk_rows:
            view = pool_view(part.topk_rows, block_size, self._longest())
            made = self.offload.pool_view = (part.topk_rows, view.to(device))
        return made[1]

    def _longest(self) -> int | None:
        """Most tokens of a decoding request in this pass; None in a graph, which is launched again for longer
        ones."""
        assert self.offload is not None
        lengths = self.offload.manager.step.decode_seq_lens  # in host memory
        return None if self._graph is not None else int(lengths.max())


INDEX_ALIGNMENT = 32
"""Rows of indices passed to the operator are multiples of this many: copies of whole 128-byte lines."""


@dataclass(frozen=True)
class PagedView:
    """Rows in the form of the attention operator: n requests with t query tokens, all int32.

    indices: [t, 1, K] positions, -1 for none. query_ends, key_lengths: [n]. block_table: [n, B].
    """

    indices: torch.Tensor
    query_ends: torch.Tensor
    key_lengths: torch.Tensor
    block_table: torch.Tensor

    def to(self, device: torch.device) -> PagedView:
        """Returns a device copy; does not wait if the tensors are already there."""
        parts = (self.indices, self.query_ends, self.key_lengths, self.block_table)
        return PagedView(*(part.to(device=device, dtype=torch.int32) for part in parts))


def pool_view(pool_slots: PoolSlots, block_size: int, longest: int | None = None) -> PagedView:
    """Views a pool: every query token is a request whose positions are the slots of its row.

    A token without a row has no positions. `longest`: an upper limit of the tokens that any query token may
    attend to, None if unknown. The operator works through min(K, key length) positions of every query
    token and fills missing rows with zeros. The key length is the pool's, as slots may lie anywhere in it, so
    the indices behind `longest`, which are -1, are left out.
    """
    count, slots = len(pool_slots.slots), pool_slots.partition_slots
    rows = pool_slots.partitions.clamp(min=0).unsqueeze(1)
    dtype, device = torch.int32, pool_slots.slots.device
    pages = torch.arange(slots // block_size, dtype=dtype, device=device)
    width = pool_slots.slots.shape[1]
    if longest is not None and longest < width:
        width = min(width, -(-longest // INDEX_ALIGNMENT) * INDEX_ALIGNMENT)
    return PagedView(
        pool_slots.slots[:, :width].unsqueeze(1).contiguous(),
        torch.arange(1, count + 1, dtype=dtype, device=device),
        (pool_slots.partitions >= 0).to(dtype) * slots,
        rows * len(pages) + pages,
    )


def request_view(part: AttendPart, block_size: int) -> PagedView:
    """Views one request's rows by position; its query tokens are the last ones."""
    pages = torch.arange(-(-part.length // block_size), dtype=torch.int32)
    counts = torch.tensor([len(part.tokens), part.length], dtype=torch.int32)
    return PagedView(part.indices.unsqueeze(1), counts[:1], counts[1:], pages.unsqueeze(0))


class KVOffloadSFABackend(AscendSFABackend):
    """Upstream's backend with our classes. Context parallelism, which uses others, is rejected at
    start-up."""

    @staticmethod
    def get_impl_cls() -> type[KVOffloadSFAImpl]:
        return KVOffloadSFAImpl

    @staticmethod
    def get_builder_cls() -> type[KVOffloadSFAMetadataBuilder]:
        return KVOffloadSFAMetadataBuilder
