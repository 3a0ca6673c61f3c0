"""Cache tensors of a prefill engine whose layers share memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from vllm.model_executor.models.utils import extract_layer_index

from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.platforms.ascend.caches import IndexerLayout, LayerCache

Tensors = tuple[torch.Tensor, ...]


def shared_caches(
    plan: BufferPlan,
    layouts: Mapping[str, IndexerLayout | None],
    main_cache: Callable[[], Tensors],
    indexer_cache: Callable[[IndexerLayout], Tensors],
) -> dict[str, LayerCache]:
    """Returns caches by the attention's name: layers of one slot of the plan share tensors.

    Args:
        layouts: of each layer's indexer cache, None for a layer without. main_cache, indexer_cache: make
            a slot's tensors.

    Raises:
        RuntimeError: layers that should share memory have different indexer caches.
    """
    slot_of = {layer.index: plan.slot_of[position] for position, layer in enumerate(plan.layers)}
    mains: dict[int, Tensors] = {}
    indexers: dict[int, tuple[IndexerLayout, Tensors]] = {}
    caches: dict[str, LayerCache] = {}
    for name, layout in layouts.items():
        slot = slot_of[extract_layer_index(name)]
        if slot not in mains:
            mains[slot] = main_cache()
        keys: Tensors = ()
        if layout is not None:
            if slot not in indexers:
                indexers[slot] = layout, indexer_cache(layout)
            first, keys = indexers[slot]
            if first != layout:
                raise RuntimeError(f"{name}: {layout} differs from the cache it shares memory with: {first}")
        caches[name] = LayerCache(mains[slot], keys)
    return caches
