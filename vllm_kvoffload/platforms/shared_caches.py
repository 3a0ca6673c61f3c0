"""Cache tensors of a prefill engine whose layers share memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvoffload.layerwise.buffer_plan import BufferPlan

LayoutT = TypeVar("LayoutT", bound=Hashable)
CacheT = TypeVar("CacheT")


def shared_caches(
    plan: BufferPlan, layouts: Mapping[str, LayoutT], make: Callable[[LayoutT], CacheT]
) -> dict[str, CacheT]:
    """Returns caches of one kind, main or indexer, by name: layers of one slot of the plan share a cache.

    Args:
        layouts: of the caches, by names that contain the layer's index. make: allocates a slot's cache.

    Raises:
        RuntimeError: layers that should share memory have different layouts.
    """
    slot_of = {layer.index: plan.slot_of[position] for position, layer in enumerate(plan.layers)}
    made: dict[int, tuple[LayoutT, CacheT]] = {}
    caches: dict[str, CacheT] = {}
    for name, layout in layouts.items():
        slot = slot_of[extract_layer_index(name)]
        if slot not in made:
            made[slot] = layout, make(layout)
        first, caches[name] = made[slot]
        if first != layout:
            raise RuntimeError(f"{name}: {layout} differs from the cache it shares memory with: {first}")
    return caches
