"""Locates each layer's KV in this process, in the terms of the wire and the transfer engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvoffload.connectors.sfa_remote_d2h.facts import clipped
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import LayerLayout
from vllm_kvoffload.transfer import Region

_LAYER = re.compile(r"\blayers\.(\d+)\b")
_MODEL_KEYS = (
    "model_type", "num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "kv_lora_rank",
    "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk", "index_head_dim",
    "index_n_heads", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip


def layer_index(name: str) -> int:
    """Parses the layer number from a cache's name. Raises ValueError."""
    match = _LAYER.search(name)
    if match is None:
        raise ValueError(f"no layer number in {name!r}")
    return int(match[1])


@dataclass(frozen=True)
class Layout:
    """KV of this process: layers in computation order, and the memory regions that hold them."""

    layers: tuple[LayerLayout, ...]
    regions: tuple[Region, ...]
    num_blocks: int

    @classmethod
    def of(cls, caches: Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]], num_blocks: int) -> Layout:
        """Builds the layout from the caches that vLLM registers: per name one or more tensors [blocks,
        ...].

        Raises ValueError if a block is not contiguous or the numbers of blocks differ.
        """
        main: dict[int, list[tuple[int, int, int]]] = {}
        indexer: dict[int, list[tuple[int, int, int]]] = {}
        # Storages may share an address but differ in length: keep all of them.
        regions: dict[tuple[int, int], Region] = {}
        for name, cache in caches.items():
            kind = indexer if "indexer" in name.lower() else main
            for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
                kind.setdefault(layer_index(name), []).append(_component(name, tensor, num_blocks))
                storage = tensor.untyped_storage()
                device = "host" if tensor.device.type == "cpu" else tensor.device.type
                base, nbytes = storage.data_ptr(), storage.nbytes()
                regions[base, nbytes] = Region(base, nbytes, device)
        layers = [LayerLayout(n, tuple(main[n]), tuple(indexer.get(n, ()))) for n in sorted(main)]
        if not layers:
            raise ValueError("there is no KV cache")
        return cls(tuple(layers), _merged(regions.values()), num_blocks)

    def facts(self, model: Any, dtype: object, block_size: int) -> dict[str, str]:
        """Returns the facts that both sides must agree on. model: the HF text config."""
        values = {key: _text(getattr(model, key, None)) for key in _MODEL_KEYS}
        values |= {"dtype": str(dtype), "block_size": str(block_size), "layers": str(len(self.layers))}
        return {**values, "block_bytes": clipped(_sizes(self.layers))}


def _text(value: object) -> str:
    return clipped(json.dumps(value, sort_keys=True, default=str))


def _sizes(layers: Sequence[LayerLayout]) -> str:
    """Lists bytes of a block per layer, equal neighbours merged: "0-2: 128, indexer 32; 3: 128"."""
    runs: list[tuple[int, int, str]] = []
    for layer in layers:
        main, indexer = ("+".join(map(str, sizes)) for sizes in layer.sizes)
        text = f"{main}, indexer {indexer}" if indexer else main
        if runs and runs[-1][1:] == (layer.index - 1, text):
            runs[-1] = (runs[-1][0], layer.index, text)
        else:
            runs.append((layer.index, layer.index, text))
    return "; ".join(f"{a}: {text}" if a == b else f"{a}-{b}: {text}" for a, b, text in runs)


def _merged(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Merges overlapping regions."""
    merged: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.address, region.nbytes)):
        last = merged[-1] if merged else None
        if last is None or region.address >= last.address + last.nbytes or region.device != last.device:
            merged.append(region)
        else:
            end = max(last.address + last.nbytes, region.address + region.nbytes)
            merged[-1] = Region(last.address, end - last.address, last.device)
    return tuple(merged)


def _component(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[int, int, int]:
    if tensor.shape[0] % num_blocks or not tensor[0].is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"{name}: blocks of shape {shape}, strides {strides} can't be pulled one by one")
    if tensor.shape[0] != num_blocks:  # kernel blocks, several per scheduler block
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: kernel blocks that are not contiguous")
        tensor = tensor.view(num_blocks, -1)
    item = tensor.element_size()
    return tensor.data_ptr(), tensor.stride(0) * item, tensor[0].numel() * item
