"""Converts vllm-ascend's KV cache specs and entries to the form used by this package and the connectors.

0.23 has one spec and one entry per layer, (latent, rope, indexer key[, indexer scale]), the last ones only
in layers with an indexer; its attention reads the tuple by index. Later releases have one spec and entry
for main KV and one for the indexer, as vLLM does. Connectors always get the latter form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

INDEXER_SUFFIX = ".indexer.k_cache"
Entry = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class LayerCache:
    """One layer's tensors: main is (latent, rope), indexer is (), (key,) or (key, scale)."""

    main: tuple[torch.Tensor, ...]
    indexer: tuple[torch.Tensor, ...]

    @property
    def combined(self) -> tuple[torch.Tensor, ...]:
        """The tuple that vllm-ascend 0.23 binds to the layer."""
        return (*self.main, *self.indexer)


@dataclass(frozen=True)
class IndexerLayout:
    """A layer's indexer cache: keys [blocks, block_size, heads, width], and scales if quantised."""

    block_size: int
    heads: int
    width: int
    dtype: torch.dtype
    scale_dtype: torch.dtype | None


def indexer_name(main_name: str) -> str:
    """Derives the name of a layer's indexer entry from that of its attention: ``...self_attn.attn``."""
    return main_name.rsplit(".", 1)[0] + INDEXER_SUFFIX


def is_indexer(name: str) -> bool:
    """Whether an entry belongs to an indexer."""
    return name.endswith(INDEXER_SUFFIX)


def indexer_layouts(specs: Mapping[str, Any]) -> dict[str, IndexerLayout | None]:
    """Returns layouts by the attention's name, from specs of either form; None for a layer without
    indexer.

    Raises ValueError for an indexer's spec without its layer's.
    """
    layouts = {name: _own_indexer(spec) for name, spec in specs.items() if not is_indexer(name)}
    apart = {name: spec for name, spec in specs.items() if is_indexer(name)}
    for name in list(layouts):
        spec = apart.pop(indexer_name(name), None)
        if spec is not None:
            scale = spec.scale_dtype if spec.scale_dim else None
            layout = IndexerLayout(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype, scale)
            layouts[name] = layout
    if apart:
        raise ValueError(f"{', '.join(sorted(apart))}: indexer caches without their layers")
    return layouts


def _own_indexer(spec: Any) -> IndexerLayout | None:
    """Returns the indexer part of a 0.23 spec."""
    dims = getattr(spec, "sparse_head_dim", None)
    if not dims or not dims[2]:
        return None
    quantised = bool(spec.cache_sparse_li_c8)
    dtype = spec.c8_k_cache_dtype if quantised else spec.dtype
    scale = spec.c8_k_scale_cache_dtype if quantised else None
    return IndexerLayout(spec.block_size, spec.num_kv_heads, dims[2], dtype, scale)


def bound_entries(
    caches: Mapping[str, LayerCache], specs: Mapping[str, Any]
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Builds entries for attention, in the form of the specs."""
    if any(map(is_indexer, specs)):
        return connector_entries(caches)
    return {name: cache.combined for name, cache in caches.items()}


def layer_caches(entries: Mapping[str, Entry]) -> dict[str, LayerCache]:
    """Returns caches by the attention's name, from entries of either form.

    Raises ValueError if main KV is not a latent and a rope tensor, or an indexer entry lacks its layer.
    """
    tensors = {name: (e,) if isinstance(e, torch.Tensor) else tuple(e) for name, e in entries.items()}
    caches: dict[str, LayerCache] = {}
    for name, parts in tensors.items():
        if is_indexer(name):
            continue
        if not 2 <= len(parts) <= 4:
            raise ValueError(f"{name}: {len(parts)} cache tensors; expected latent, rope[, key[, scale]]")
        own, apart = parts[2:], tensors.get(indexer_name(name), ())
        if own and apart:
            raise ValueError(f"{name}: an indexer cache in its own entry and in {indexer_name(name)}")
        caches[name] = LayerCache(parts[:2], own or apart)
    orphans = {name for name in tensors if is_indexer(name)} - {indexer_name(name) for name in caches}
    if orphans:
        raise ValueError(f"{', '.join(sorted(orphans))}: indexer caches without their layers")
    return caches


def connector_entries(caches: Mapping[str, LayerCache]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Builds entries for connectors: main KV under the attention's name, indexer KV under its own."""
    entries: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, cache in caches.items():
        entries[name] = cache.main
        if cache.indexer:
            entries[indexer_name(name)] = cache.indexer
    return entries
