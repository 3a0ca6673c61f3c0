"""vllm-ascend's KV cache specs and entries, in the one form that this package and the connectors use.

0.23 has one spec and one entry per layer, (latent, rope, indexer key[, indexer scale]), the last ones only
where the layer has an indexer; its attention reads the tuple by index. Later releases have a spec and an
entry for main KV and one each for the indexer, as vLLM itself does. Connectors always get the latter.
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
        """What vllm-ascend 0.23 binds to the layer."""
        return (*self.main, *self.indexer)


@dataclass(frozen=True)
class IndexerLayout:
    """A layer's indexer cache: keys [blocks, block_size, heads, width], scales where they are quantised."""

    block_size: int
    heads: int
    width: int
    dtype: torch.dtype
    scale_dtype: torch.dtype | None


def indexer_name(main_name: str) -> str:
    """Name of the indexer entry of a layer, from that of its attention: ``...self_attn.attn``."""
    return main_name.rsplit(".", 1)[0] + INDEXER_SUFFIX


def is_indexer(name: str) -> bool:
    """Whether an entry is an indexer's own."""
    return name.endswith(INDEXER_SUFFIX)


def indexer_layouts(specs: Mapping[str, Any]) -> dict[str, IndexerLayout | None]:
    """By the name of the layer's attention, from specs of either form; None for a layer without indexer.

    Raises ValueError: an indexer's spec without its layer's.
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
    """The indexer's part of a spec of 0.23."""
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
    """Entries as attention finds them, of the form that the specs have."""
    if any(map(is_indexer, specs)):
        return connector_entries(caches)
    return {name: cache.combined for name, cache in caches.items()}


def layer_caches(entries: Mapping[str, Entry]) -> dict[str, LayerCache]:
    """By the name of the layer's attention, from entries of either form.

    Raises ValueError: main KV that isn't a latent and a rope tensor, or an indexer entry without its layer.
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
    """Entries as connectors get them: main KV under the attention's name, the indexer under its own."""
    entries: dict[str, tuple[torch.Tensor, ...]] = {}
    for name, cache in caches.items():
        entries[name] = cache.main
        if cache.indexer:
            entries[indexer_name(name)] = cache.indexer
    return entries
