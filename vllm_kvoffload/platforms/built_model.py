"""The indexers that a checkpoint holds and a built model has, held to the geometry.

The geometry decides which layers plan and which ones reuse a plan; vLLM decides on its own which layers
have an indexer, from other keys of the same config. Where the two differ, tokens would be chosen by layers
that were not meant to, so a difference ends the start-up. Does not import vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.settings.errors import ConfigError

INDEXER_WEIGHT = re.compile(r"layers\.(\d+)\.(?:\w+\.)*indexer\.")
HEADER_LIMIT = 256 << 20
"""Largest header that is read of a safetensors file, in bytes."""


def checkpoint_indexers(folder: Path) -> frozenset[int] | None:
    """Returns the layers with indexer weights in a local checkpoint, None if its names can't be read."""
    try:
        names = list(_weight_names(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    found = (match for name in names if (match := INDEXER_WEIGHT.search(name)))
    return frozenset(int(match[1]) for match in found) if names else None


def _weight_names(folder: Path) -> Iterator[str]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    for path in indices:
        yield from json.loads(path.read_text())["weight_map"]
    for path in () if indices else sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > HEADER_LIMIT:
                raise ValueError(f"{path}: a header of {size} bytes")
            yield from (name for name in json.loads(file.read(size)) if name != "__metadata__")


def check_checkpoint(geometry: KVGeometry, indexers: Iterable[int]) -> None:
    """Rejects a checkpoint with indexers in layers that reuse another layer's choice. Raises ConfigError.

    A platform that builds those would cache their keys, and one that doesn't could not load them.
    """
    extra = sorted(set(indexers) & _shared(geometry))
    if extra:
        rule = (
            f"layers {_listed(extra)} reuse another layer's choice, and the checkpoint has indexers in them"
        )
        fix = "serve a checkpoint without these weights, or without the option that makes layers share"
        raise ConfigError(geometry.types_source, geometry.index_topk_pattern, rule, fix)


def built_layers(models: Iterable[Any]) -> dict[int, tuple[bool, bool]]:
    """Returns (has an indexer, reuses another layer's choice) by layer index.

    models: modules whose MLA layers have the attributes `prefix`, `skip_topk` and `mla_attn`, as vLLM's do.
    """
    found = {}
    for model in models:
        for module in model.modules():
            attention = getattr(module, "mla_attn", None)
            index = re.search(r"layers\.(\d+)\.", str(getattr(module, "prefix", "")) + ".")
            if attention is not None and index is not None and hasattr(module, "skip_topk"):
                indexer = getattr(attention, "indexer", None)
                found[int(index[1])] = (indexer is not None, bool(module.skip_topk))
    return found


def check_built(geometry: KVGeometry, built: Mapping[int, tuple[bool, bool]]) -> None:
    """Compares every layer of the model that was built with the geometry. Raises ConfigError."""
    problems = []
    for layer in range(geometry.num_layers):
        owns = geometry.has_indexer_cache(layer)
        if layer not in built:
            problems.append(f"layer {layer} has no sparse attention")
        elif built[layer] != (owns, not owns):
            has, reuses = built[layer]
            indexer, choice = "an" if has else "no", "reuses a" if reuses else "makes its own"
            shown = f"has {indexer} indexer and {choice} choice"
            problems.append(f"layer {layer} {shown}, and is {'full' if owns else 'shared'} here")
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        rule = f"vLLM has built another model than the config describes: {'; '.join(problems[:3])}{more}"
        fix = (
            "make indexer_types, index_topk_pattern and index_topk_freq in config.json agree with the weights"
        )
        raise ConfigError(geometry.types_source, geometry.index_topk_pattern, rule, fix)


def check_runner(runner: Any, geometry: KVGeometry) -> None:
    """`check_built` for a model runner that has loaded its model and, with drafts, their model."""
    drafter = getattr(runner, "drafter", None)
    models = [model for model in (runner.model, getattr(drafter, "model", None)) if model is not None]
    check_built(geometry, built_layers(model for model in models if hasattr(model, "modules")))


def _shared(geometry: KVGeometry) -> set[int]:
    return {layer for layer, kind in enumerate(geometry.indexer_types) if kind == "shared"}


def _listed(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return f"{shown} and {len(layers) - 6} more" if len(layers) > 6 else shown
