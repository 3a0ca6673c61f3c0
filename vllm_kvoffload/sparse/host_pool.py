"""The whole main KV in host memory: one pool per DP rank, shared by its TP ranks.

Rank 0 calls `HostPool.create` and sends the name to the other ranks, which call `HostPool.attach`; after a
barrier rank 0 calls `seal()`. Each (layer, component) is one uint8 tensor [num_blocks, block_size,
row_bytes], 2 MiB aligned in the address space and in the file. Rank 0 writes new rows and every rank reads;
synchronising access to blocks is left to the callers.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from vllm_kvoffload.memory.limits import MemoryLimit
from vllm_kvoffload.memory.numa import interleaved
from vllm_kvoffload.memory.segment import (
    SegmentMemoryError,
    SharedSegment,
    align_up,
)

# Pinning 512 GiB or more in one call fails in drivers.
MAX_CHUNK_BYTES = 64 << 30


class MemoryRange(NamedTuple):
    """`start` is an offset into the pool (layout) or an address (pool)."""

    start: int
    nbytes: int


@dataclass(frozen=True)
class HostPoolLayout:
    """Shape of a pool. `block_size` is in tokens; `components` are (name, bytes per token) in row order.

    Raises ValueError for a size below 1 or component names that are empty or not unique.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    components: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        sizes = [
            ("num_layers", self.num_layers),
            ("num_blocks", self.num_blocks),
            ("block_size", self.block_size),
        ]
        for name, value in [*sizes, *self.components]:
            if value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        names = [name for name, _ in self.components]
        if not names or "" in names or len(set(names)) != len(names):
            raise ValueError(f"components={self.components}: expected unique names, at least one")

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer, all components."""
        return sum(row_bytes for _, row_bytes in self.components)

    @property
    def payload_bytes(self) -> int:
        """Bytes of KV data. `dram_size_per_dp_GB` limits this number."""
        return self.num_layers * self.num_blocks * self.block_size * self.row_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes reserved on the machine: every (layer, component) rounded up to 2 MiB."""
        return self.num_layers * self._layer_bytes

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all fields that determine a row's offset; the same on all ranks of a pool."""
        return hashlib.sha256(self._canonical().encode()).hexdigest()

    def component_bytes(self, component: int) -> int:
        """Bytes of one layer of component number `component`, without rounding."""
        return self.num_blocks * self.block_size * self.components[component][1]

    def offset(self, layer: int, component: int) -> int:
        """Offset in bytes of the tensor of (layer, component). Raises IndexError."""
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer={layer}: expected 0 <= layer < {self.num_layers}")
        before = sum(align_up(self.component_bytes(i)) for i in range(component))
        return layer * self._layer_bytes + before

    def chunks(self, max_bytes: int = MAX_CHUNK_BYTES) -> list[MemoryRange]:
        """The pool as ranges of at most `max_bytes` for registration with a device or a transfer engine.

        No block lies in two ranges. A range starts where a tensor does, 2 MiB aligned, except within a
        tensor larger than `max_bytes`. Raises ValueError if not even one block fits.
        """
        chunks: list[MemoryRange] = []
        for layer in range(self.num_layers):
            for component, (name, row_bytes) in enumerate(self.components):
                start, nbytes = self.offset(layer, component), align_up(self.component_bytes(component))
                last = chunks[-1] if chunks else MemoryRange(0, 0)
                if last.nbytes + nbytes <= max_bytes:
                    chunks[-1:] = [MemoryRange(last.start, last.nbytes + nbytes)]
                    continue
                block_bytes = self.block_size * row_bytes
                step = nbytes if nbytes <= max_bytes else max_bytes // block_bytes * block_bytes
                if step == 0:
                    raise ValueError(f"max_bytes={max_bytes}: a block of {name!r} has {block_bytes} bytes")
                chunks += [
                    MemoryRange(start + done, min(step, nbytes - done)) for done in range(0, nbytes, step)
                ]
        return chunks

    @property
    def _layer_bytes(self) -> int:
        return sum(align_up(self.component_bytes(i)) for i in range(len(self.components)))

    def _canonical(self) -> str:
        sizes = [self.num_layers, self.num_blocks, self.block_size]
        return json.dumps([*sizes, *map(list, self.components)])


class HostPool:
    """A pool mapped into this process; also a context manager that closes it."""

    def __init__(self, layout: HostPoolLayout, segment: SharedSegment) -> None:
        self.layout = layout
        self._segment = segment

    @classmethod
    def create(
        cls, layout: HostPoolLayout, dram_limit_bytes: int | None = None, *, spread: bool = False
    ) -> HostPool:
        """Reserve the pool's memory and name it, after removing segments that killed processes left.

        `dram_limit_bytes`: from `dram_size_per_dp_GB`, compared with `layout.payload_bytes`.
        `spread`: over the machine's NUMA nodes, as devices of all nodes read it.
        Raises SegmentMemoryError before or while reserving, SegmentFileError; nothing is left behind then.
        """
        if dram_limit_bytes is not None and layout.payload_bytes > dram_limit_bytes:
            fix = "raise it, or use fewer or smaller blocks"
            raise SegmentMemoryError(
                layout.payload_bytes,
                MemoryLimit("sparse_kv_offload_config.dram_size_per_dp_GB", dram_limit_bytes, fix),
            )
        with interleaved() if spread else nullcontext():
            return cls(layout, SharedSegment.create(layout.total_bytes, _describe(layout)))

    @classmethod
    def attach(cls, name: str, layout: HostPoolLayout) -> HostPool:
        """Map a pool that another rank created. Raises SegmentAttachError, SegmentLayoutError."""
        return cls(layout, SharedSegment.attach(name, layout.total_bytes, _describe(layout)))

    @property
    def name(self) -> str:
        """The segment's name, passed to `attach`; no longer valid once sealed."""
        return self._segment.name

    @property
    def is_owner(self) -> bool:
        return self._segment.is_owner

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Tensors uint8 [num_blocks, block_size, row_bytes] of one layer by component name, zero at first.

        They share the pool's memory and keep it mapped, even past `close()`. Raises IndexError,
        SegmentClosedError.
        """
        tensors = {}
        for component, (name, row_bytes) in enumerate(self.layout.components):
            start = self.layout.offset(layer, component)
            rows = self._segment.data[start : start + self.layout.component_bytes(component)]
            shape = (self.layout.num_blocks, self.layout.block_size, row_bytes)
            tensors[name] = torch.from_numpy(rows).view(shape)
        return tensors

    def chunks(self, max_bytes: int = MAX_CHUNK_BYTES) -> list[MemoryRange]:
        """`layout.chunks` as addresses in this process. Raises SegmentClosedError, ValueError."""
        base = self._segment.data.ctypes.data
        return [MemoryRange(base + start, nbytes) for start, nbytes in self.layout.chunks(max_bytes)]

    def seal(self) -> None:
        """Remove the name. Rank 0 calls this once every rank has attached. Idempotent.

        From then on the memory is freed when the last process ends, even by SIGKILL. Raises SegmentError on
        ranks other than the creator.
        """
        self._segment.seal()

    def close(self) -> None:
        """Drop the mapping; in the owner, also remove the name. Idempotent."""
        self._segment.close()

    def __enter__(self) -> HostPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _describe(layout: HostPoolLayout) -> str:
    return f"{layout} digest={layout.digest}"
