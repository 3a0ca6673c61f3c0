"""Rows of main KV on an NPU (a latent and a rope tensor each), and two ways to copy them from the host.

`PortableRows` uses torch only: rows pass through ordinary host memory, and the caller waits.
`SparseCopyRows` lets MemFabric's copy kernel access host memory by address. With the AscendC kernels (see
`kernels`, `delivery`) decode's rows are copied by those instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.sparse.row_ops import RowOps

Scatter = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""torch_npu.npu_scatter_nd_update_(rows [N, D], indices [n, 1], updates [n, D]), in place."""


MAX_PAIR_BYTES = 88 << 10
"""Bytes of an entry in the first half of a `sparse_copy` plus its counterpart in the second half, which
MemFabric's kernel holds in one buffer of the core. Larger pairs are not rejected by it."""


class SplitRows:
    """Rows [*shape] in one tensor per component, each [*shape, D].

    `addresses`: device addresses of the components of host rows.
    """

    def __init__(self, parts: Sequence[torch.Tensor], addresses: Sequence[int] = ()) -> None:
        self.parts = tuple(parts)
        self.addresses = tuple(addresses)

    def __len__(self) -> int:
        return len(self.parts[0])


@dataclass(frozen=True)
class Misses:
    """A plan's misses as flat rows, int64 [n] in host memory."""

    source: torch.Tensor
    target: torch.Tensor


def flat_misses(
    plan: ops.PlanOut, rows: torch.Tensor, block_table: torch.Tensor, block_size: int, slots: int
) -> Misses:
    """Returns the misses' positions in the host pool, and in a hot pool of ``slots`` slots a row."""
    count = len(rows)
    places = torch.arange(plan.miss_ids.shape[1])
    wanted = (places < plan.miss_counts[:count, None]) & (rows >= 0)[:, None]
    request = wanted.nonzero()[:, 0]
    ids = plan.miss_ids[:count][wanted].long()
    blocks = block_table[request, ids // block_size].long()
    target = rows[request].long() * slots + plan.miss_slots[:count][wanted]
    return Misses(blocks * block_size + ids % block_size, target)


def flat_slots(rows: torch.Tensor, slots: torch.Tensor, per_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (tokens that have a slot, their flat slots), int64 [n] each."""
    tokens = (slots >= 0).nonzero().squeeze(1)
    return tokens, rows[tokens].long() * per_row + slots[tokens]


def check_range(what: str, numbers: torch.Tensor, end: int) -> None:
    """Checks numbers before they become addresses. Raises ValueError."""
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
        raise ValueError(f"{what}: {int(numbers.min())} to {int(numbers.max())}, expected 0 to {end - 1}")


class PortableRows:
    """Copies rows by torch.

    Args:
        row_bytes: of each component. dtype: the model's, in which rows are scattered.
        device: where hot rows and buffers live. scatter: see `Scatter`.
    """

    def __init__(
        self, row_bytes: Sequence[int], dtype: torch.dtype, device: torch.device, scatter: Scatter
    ) -> None:
        self._bytes = tuple(row_bytes)
        self._dtype = dtype
        self._device = device
        self._scatter = scatter

    def zeros(self, *shape: int) -> SplitRows:
        return SplitRows(
            [torch.zeros((*shape, n), dtype=torch.uint8, device=self._device) for n in self._bytes]
        )

    def row_bytes(self, rows: SplitRows) -> int:
        return sum(part.shape[-1] * part.element_size() for part in rows.parts)

    def as_bytes(self, rows: SplitRows) -> SplitRows:
        return SplitRows([part.view(torch.uint8) for part in rows.parts])

    def take(self, rows: SplitRows, tokens: torch.Tensor) -> SplitRows:
        chosen = tokens.to(self._device)
        return SplitRows([self._typed(part).index_select(0, chosen).view(torch.uint8) for part in rows.parts])

    def place(self, rows: SplitRows, start: int, new_rows: SplitRows, tokens: slice) -> None:
        for part, fresh in zip(rows.parts, new_rows.parts, strict=True):
            chosen = fresh[tokens]
            part[start : start + len(chosen)].copy_(chosen)

    def attended(self, rows: SplitRows, like: SplitRows) -> SplitRows:
        pairs = zip(rows.parts, like.parts, strict=True)
        return SplitRows([part.view(-1, part.shape[-1]).view(model.dtype) for part, model in pairs])

    def host_write(self, host: SplitRows, new_rows: SplitRows, slot_mapping: torch.Tensor) -> None:
        for part, fresh in zip(host.parts, new_rows.parts, strict=True):
            ops.host_write(part, fresh.cpu(), slot_mapping)

    def host_read(self, host: SplitRows, blocks: torch.Tensor, count: int, target: SplitRows) -> None:
        for part, buffer in zip(host.parts, target.parts, strict=True):
            staged = torch.empty((count, part.shape[-1]), dtype=torch.uint8)
            ops.host_read(part, blocks, 0, count, staged)
            buffer[:count].copy_(staged)

    def serve(
        self,
        host: SplitRows,
        hot: SplitRows,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        plan: ops.PlanOut,
    ) -> int:
        misses = flat_misses(plan, rows, block_table, host.parts[0].shape[1], hot.parts[0].shape[1])
        for part, pool in zip(host.parts, hot.parts, strict=True):
            staged = part.view(-1, part.shape[-1]).index_select(0, misses.source)
            self._put(pool, misses.target, staged.to(self._device))
        return len(misses.source) * sum(self._bytes)

    def write_rows(
        self, hot: SplitRows, rows: torch.Tensor, new_rows: SplitRows, slots: torch.Tensor
    ) -> None:
        tokens, target = flat_slots(rows, slots, hot.parts[0].shape[1])
        chosen = new_rows if len(tokens) == len(slots) else self.take(new_rows, tokens)
        for pool, fresh in zip(hot.parts, chosen.parts, strict=True):
            self._put(pool, target, fresh)

    def _put(self, pool: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
        if len(target):
            flat = self._typed(pool.view(-1, pool.shape[-1]))
            self._scatter(flat, target.to(self._device).view(-1, 1), self._typed(rows))

    def _typed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(self._dtype)


class SparseCopyRows(PortableRows):
    """Copies rows by MemFabric's `offload.sparse_copy`, which takes addresses of both memories.

    Args:
        copy: sparse_copy(sources, targets, lengths, count, device): int64, int64, int32 [n] and int32 [1] on
            the device; it queues on the current stream and returns 0 or None. Its kernel takes entry i and
            entry n/2 + i together, so n is even: here they are the latent and the rope part of the same rows.
    """

    def __init__(
        self,
        row_bytes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        scatter: Scatter,
        copy: Callable[..., Any],
    ) -> None:
        super().__init__(row_bytes, dtype, device, scatter)
        self._copy = copy

    def host_write(self, host: SplitRows, new_rows: SplitRows, slot_mapping: torch.Tensor) -> None:
        tokens = (slot_mapping >= 0).nonzero().squeeze(1)
        slots = slot_mapping[tokens].long()
        check_range("slot_mapping", slots, host.parts[0].shape[0] * host.parts[0].shape[1])
        spans = [
            (fresh.data_ptr() + tokens * n, base + slots * n, torch.full_like(slots, n))
            for fresh, base, n in zip(new_rows.parts, host.addresses, self._bytes, strict=True)
        ]
        self._run(spans)

    def host_read(self, host: SplitRows, blocks: torch.Tensor, count: int, target: SplitRows) -> None:
        num_blocks, block_size = host.parts[0].shape[:2]
        chosen = blocks[: -(-count // block_size)].long()
        check_range("blocks", chosen, num_blocks)
        most = min(block_size, MAX_PAIR_BYTES // sum(self._bytes))
        piece = torch.arange(0, block_size, most)
        first = (torch.arange(len(chosen)).unsqueeze(1) * block_size + piece).flatten()
        source = (chosen.unsqueeze(1) * block_size + piece).flatten()
        tokens = torch.minimum((block_size - piece).clamp(max=most).repeat(len(chosen)), count - first)
        there = tokens > 0
        first, source, tokens = first[there], source[there], tokens[there]
        spans = [
            (base + source * n, part.data_ptr() + first * n, tokens * n)
            for part, base, n in zip(target.parts, host.addresses, self._bytes, strict=True)
        ]
        self._run(spans)

    def serve(
        self,
        host: SplitRows,
        hot: SplitRows,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        plan: ops.PlanOut,
    ) -> int:
        num_blocks, block_size = host.parts[0].shape[:2]
        misses = flat_misses(plan, rows, block_table, block_size, hot.parts[0].shape[1])
        check_range("host row", misses.source, num_blocks * block_size)
        check_range("slot", misses.target, hot.parts[0].shape[0] * hot.parts[0].shape[1])
        spans = [
            (base + misses.source * n, pool.data_ptr() + misses.target * n, torch.full_like(misses.source, n))
            for pool, base, n in zip(hot.parts, host.addresses, self._bytes, strict=True)
        ]
        self._run(spans)
        return len(misses.source) * sum(self._bytes)

    def _run(self, spans: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        sources, targets, lengths = (torch.cat(column) for column in zip(*spans, strict=True))
        if not len(sources):
            return
        count = torch.tensor([len(sources)], dtype=torch.int32)
        arguments = (sources, targets, lengths.to(torch.int32), count)
        code = self._copy(*(tensor.to(self._device) for tensor in arguments), self._device)
        if code not in (0, None):
            raise RuntimeError(f"memfabric_hybrid.offload.sparse_copy returned {code}")


_conform: tuple[type[RowOps], ...] = (PortableRows, SparseCopyRows)  # checked by mypy
