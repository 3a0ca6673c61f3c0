"""vllm-ascend's KV cache entries, in the one form that the rest of this package and the connectors use.

0.23 has one entry per layer, (latent, rope, indexer key[, indexer scale]), the last ones only where the
layer has an indexer; its attention reads the tuple by index. Later releases have an entry for main KV and
one for the indexer, as vLLM itself does. Connectors always get the latter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def indexer_name(main_name: str) -> str:
    """Name of the indexer entry of a layer, from that of its attention: ``...self_attn.attn``."""
    return main_name.rsplit(".", 1)[0] + INDEXER_SUFFIX


def is_indexer(name: str) -> bool:
    """Whether an entry is an indexer's own."""
    return name.endswith(INDEXER_SUFFIX)


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
