"""Plan of the layers whose KV caches share device memory on a prefill engine. No torch, no vLLM.

A model has N cache-bearing layers; *position* p is the p-th of them in order of computation. *Independent*
layers have memory of their own. The others are grouped into buckets with identical caches. Each bucket is
assigned round-robin to `num_shared_buffers` *slots*; the owners of a slot use its memory in turn. A slot
holds a main cache and, if any of its layers has an indexer, one key cache shared by those that have one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.store import INDEPENDENT, NUM_SHARED, BufferOptions, Independent


@dataclass(frozen=True)
class CacheLayer:
    """A cache-bearing layer.

    index: its number in the model. main, indexer: cache kinds, equal if the caches may share memory; indexer
    is None for a layer without one. main_bytes, indexer_bytes: of one token.
    """

    index: int
    main: Hashable
    main_bytes: int
    indexer: Hashable = None
    indexer_bytes: int = 0


@dataclass(frozen=True)
class BufferPlan:
    """Layers in order of their index, and for each slot the positions of its owners, ascending."""

    layers: tuple[CacheLayer, ...]
    slots: tuple[tuple[int, ...], ...]

    @cached_property
    def slot_of(self) -> tuple[int, ...]:
        """Slot number of each position."""
        where = {position: slot for slot, owners in enumerate(self.slots) for position in owners}
        return tuple(where[position] for position in range(len(self.layers)))

    @cached_property
    def predecessors(self) -> dict[int, int]:
        """Maps a position to the previous owner of its slot, which must finish before it may be written."""
        return {b: a for owners in self.slots for a, b in pairwise(owners)}

    @property
    def has_reuse(self) -> bool:
        """Whether any memory is shared."""
        return bool(self.predecessors)

    def is_shared(self, position: int) -> bool:
        """Whether the layer shares its memory with other layers."""
        return len(self.slots[self.slot_of[position]]) > 1

    @property
    def num_caches(self) -> int:
        """Number of caches of all layers, including indexer caches."""
        return len(self.layers) + sum(layer.indexer is not None for layer in self.layers)

    @property
    def num_buffers(self) -> int:
        """Number of physical caches, including indexer caches."""
        return len(self.slots) + sum(self._indexer_of(owners) is not None for owners in self.slots)

    @property
    def logical_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.main_bytes + layer.indexer_bytes for layer in self.layers)

    @property
    def physical_bytes(self) -> int:
        """Device bytes of one token, with memory sharing."""
        total = 0
        for owners in self.slots:
            indexer = self._indexer_of(owners)
            total += self.layers[owners[0]].main_bytes + (indexer.indexer_bytes if indexer else 0)
        return total

    @property
    def factor(self) -> float:
        """Ratio of tokens that fit into the same device memory, with sharing to without."""
        return self.logical_bytes / self.physical_bytes

    def _indexer_of(self, owners: Sequence[int]) -> CacheLayer | None:
        return next((self.layers[p] for p in owners if self.layers[p].indexer is not None), None)

    def describe(self) -> str:
        """The start-up log line."""
        return (
            f"Layerwise KV cache reuse merged {self.num_caches} descriptors into {self.num_buffers} "
            f"descriptors using {len(self.slots)} buffer assignments."
        )


def plan_buffers(layers: Sequence[CacheLayer], options: BufferOptions) -> BufferPlan:
    """Makes the plan for a model's layers, given in any order.

    Raises:
        ConfigError: no layers, an unknown independent layer, or caches that can't share memory.
    """
    ordered = tuple(sorted(layers, key=lambda layer: layer.index))
    if not ordered:
        raise ConfigError(NUM_SHARED, options.num_shared_buffers, "the model has no KV cache", "remove it")
    alone = _positions(options.independent, len(ordered))
    shared = len(ordered) if options.num_shared_buffers is None else options.num_shared_buffers
    buckets: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, layer in enumerate(ordered):
        if position not in alone:
            buckets[layer.main].append(position)
    slots: list[tuple[int, ...]] = [(position,) for position in sorted(alone)]
    for bucket in buckets.values():
        _check_indexers(ordered, bucket)
        count = min(shared, len(bucket))
        slots += [tuple(bucket[first::count]) for first in range(count)]
    return BufferPlan(ordered, tuple(slots))


def _positions(independent: Independent, count: int) -> set[int]:
    if independent == "all":
        return set(range(count))
    for item in independent:
        if not -count <= item < count:
            rule = f"there is no layer {item}: the model has {count} layers with a KV cache"
            fix = f"name layers from {-count} to {count - 1}; they count layers with a cache, in order"
            raise ConfigError(INDEPENDENT, list(independent), rule, fix)
    return {item % count for item in independent}


def _check_indexers(layers: Sequence[CacheLayer], bucket: Sequence[int]) -> None:
    kinds = {layers[p].indexer for p in bucket} - {None}
    if len(kinds) > 1:
        odd = next(p for p in bucket if layers[p].indexer not in (None, layers[bucket[0]].indexer))
        rule = f"layer {odd} has another indexer cache than layers it would share memory with"
        raise ConfigError(INDEPENDENT, None, rule, f"add {odd} to the list")


def geometry_layers(geometry: KVGeometry) -> tuple[CacheLayer, ...]:
    """The layers of a model, MTP layers included."""
    return tuple(
        CacheLayer(
            layer,
            geometry.main_components,
            geometry.main_row_bytes,
            geometry.indexer_components if geometry.has_indexer_cache(layer) else None,
            geometry.indexer_row_bytes if geometry.has_indexer_cache(layer) else 0,
        )
        for layer in range(geometry.num_layers)
    )
