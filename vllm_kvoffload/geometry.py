"""KV geometry of a sparse-attention (DSA) model: layers, index groups, components, bytes.

Computed from the HF config. Owns the mapping from global layer indices to groups and cache indices, and the
byte sizes of rows. Imports neither torch nor vLLM: a config is any object or mapping with the HF names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from vllm_kvoffload.settings.errors import ConfigError

IndexerType = Literal["full", "shared"]

MAIN_LAYOUTS = ("cpu", "ascend", "fp8")
INDEXER_LAYOUTS = ("model", "float32", "fp8", "int8", "mxfp4")

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4}
_TYPE_NAMES: dict[object, IndexerType] = {"full": "full", "F": "full", "shared": "shared", "S": "shared"}
_FP8_BLOCK = 128  # elements per 4-byte scale, in the main latent and in the indexer key alike
_MXFP4_BLOCK = 32  # elements per 1-byte ue8m0 scale
_LOGITS_ALIGN = 256  # columns; score kernels pad each row of fp32 logits to 1024 bytes


class GeometryError(ConfigError):
    """The model's config describes no KV geometry that this package supports."""


@dataclass(frozen=True)
class Component:
    """One tensor of a cache. row_bytes: of one token in one layer."""

    name: str
    row_bytes: int


@dataclass(frozen=True)
class IndexGroup:
    """Layers that share top-k indices, in order; `owner`, the first of them, computes the indices.

    index: position among the model's groups. layers: global layer indices. is_mtp: a group of draft layers.
    """

    index: int
    owner: int
    layers: tuple[int, ...]
    is_mtp: bool

    @property
    def followers(self) -> tuple[int, ...]:
        """The layers that reuse the owner's top-k indices."""
        return self.layers[1:]


@dataclass(frozen=True)
class KVGeometry:
    """Layers, index groups and byte sizes of one model. MTP layers follow the target's in global indices.

    indexer_types: "full" or "shared" for each target layer. types_source: the config key they come from.
    num_mtp_layers: draft layers with a KV cache. mtp_index_share: later draft steps reuse the first step's
        top-k indices.
    main_components, indexer_components: one row, that is one token in one layer, of each cache.
    """

    model_type: str
    indexer_types: tuple[IndexerType, ...]
    types_source: str
    index_topk: int
    main_components: tuple[Component, ...]
    indexer_components: tuple[Component, ...]
    num_speculative_tokens: int = 0
    num_mtp_layers: int = 0
    mtp_index_share: bool = False

    @classmethod
    def from_hf_config(
        cls,
        hf_config: object,
        *,
        layout: str = "cpu",
        dtype: object = None,
        indexer_layout: str | None = None,
        num_speculative_tokens: int = 0,
        mtp: bool = True,
    ) -> KVGeometry:
        """Geometry of a model.

        layout: main cache, "cpu" (one 576-wide tensor), "ascend" (nope and rope apart) or "fp8" (656 B).
        dtype: of unquantised caches, a name or a torch dtype; None uses the config's, else bfloat16.
        indexer_layout: "model" (same type as the main cache), "float32", "fp8" (132 B), "int8" (130 B) or
            "mxfp4" (68 B); None is "fp8" under the fp8 layout, else "model".
        num_speculative_tokens: drafts per step. mtp: drafts come from the checkpoint's own MTP layers.
        Raises GeometryError: no sparse indexer, missing or invalid config values, unknown layout.
        """
        config = _text_config(hf_config)
        index_topk = _required_int(config, "index_topk", "the model has no sparse attention indexer")
        _refuse_unsupported(config)
        item_bytes = _item_bytes(config, dtype)
        indexer_layout = indexer_layout or ("fp8" if layout == "fp8" else "model")
        types, source = resolve_indexer_types(config)
        return cls(
            model_type=str(_get(config, "model_type", "unknown")),
            indexer_types=types,
            types_source=source,
            index_topk=index_topk,
            main_components=_main_components(config, layout, item_bytes),
            indexer_components=_indexer_components(config, indexer_layout, item_bytes),
            num_speculative_tokens=num_speculative_tokens,
            num_mtp_layers=_num_mtp_layers(config, num_speculative_tokens) if mtp else 0,
            mtp_index_share=bool(_get(config, "index_share_for_mtp_iteration", False)),
        )

    # ----------------------------------------------------------------------------------------- layers, groups

    @property
    def num_target_layers(self) -> int:
        """Layers of the target model."""
        return len(self.indexer_types)

    @property
    def num_layers(self) -> int:
        """Layers with a main KV cache: the target's and the MTP layers."""
        return self.num_target_layers + self.num_mtp_layers

    @property
    def mtp_layers(self) -> range:
        """Global indices of the MTP layers."""
        return range(self.num_target_layers, self.num_layers)

    @property
    def index_topk_pattern(self) -> str:
        """The resolved types of the target layers in vLLM's spelling, such as "FFFSSSF"."""
        return "".join("F" if kind == "full" else "S" for kind in self.indexer_types)

    @cached_property
    def groups(self) -> tuple[IndexGroup, ...]:
        """All index groups in layer order. Each MTP layer is a group; with mtp_index_share all form one."""
        members: list[list[int]] = []
        for layer, kind in enumerate(self.indexer_types):
            if kind == "full":
                members.append([layer])
            else:
                members[-1].append(layer)
        for layer in self.mtp_layers:
            if self.mtp_index_share and layer > self.num_target_layers:
                members[-1].append(layer)
            else:
                members.append([layer])
        return tuple(
            IndexGroup(index, layers[0], tuple(layers), layers[0] >= self.num_target_layers)
            for index, layers in enumerate(members)
        )

    @cached_property
    def indexer_layers(self) -> tuple[int, ...]:
        """Global indices of the layers that own an indexer cache: full layers and all MTP layers.

        vLLM builds an indexer with a cache in every MTP layer, even where later draft steps skip it.
        """
        full = (layer for layer, kind in enumerate(self.indexer_types) if kind == "full")
        return (*full, *self.mtp_layers)

    @cached_property
    def _group_by_layer(self) -> tuple[IndexGroup, ...]:
        return tuple(group for group in self.groups for _ in group.layers)

    @cached_property
    def _indexer_index(self) -> dict[int, int]:
        return {layer: index for index, layer in enumerate(self.indexer_layers)}

    def group_of(self, layer: int) -> IndexGroup:
        """The index group of a global layer index. Raises IndexError for a layer the model doesn't have."""
        return self._group_by_layer[self.main_index(layer)]

    def is_owner(self, layer: int) -> bool:
        """Whether this layer computes the top-k indices of its group."""
        return self.group_of(layer).owner == layer

    def has_indexer_cache(self, layer: int) -> bool:
        """Whether this layer owns an indexer cache."""
        return self.main_index(layer) in self._indexer_index

    def main_index(self, layer: int) -> int:
        """Global layer index to position among the main caches. Raises IndexError for a layer the model
        doesn't have.

        The two are equal as long as every layer has a main cache, but callers must not rely on that.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer {layer} is not one of the {self.num_layers} layers with a KV cache")
        return layer

    def main_layer(self, index: int) -> int:
        """Inverse of `main_index`."""
        return self.main_index(index)

    def indexer_index(self, layer: int) -> int:
        """Global layer index to position among the indexer caches. Raises IndexError if it has none."""
        index = self._indexer_index.get(self.main_index(layer))
        if index is None:
            raise IndexError(
                f"layer {layer} reuses layer {self.group_of(layer).owner}'s top-k indices: no indexer cache"
            )
        return index

    def indexer_layer(self, index: int) -> int:
        """Inverse of `indexer_index`."""
        if not 0 <= index < len(self.indexer_layers):
            raise IndexError(f"{index} is not one of the {len(self.indexer_layers)} indexer caches")
        return self.indexer_layers[index]

    # -------------------------------------------------------------------------------------------------- bytes

    @property
    def main_row_bytes(self) -> int:
        """Main KV of one token in one layer."""
        return sum(component.row_bytes for component in self.main_components)

    @property
    def indexer_row_bytes(self) -> int:
        """Indexer key of one token in one layer that owns an indexer cache."""
        return sum(component.row_bytes for component in self.indexer_components)

    @property
    def main_bytes_per_token(self) -> int:
        """Main KV of one token over all layers, MTP layers included."""
        return self.main_row_bytes * self.num_layers

    @property
    def indexer_bytes_per_token(self) -> int:
        """Indexer keys of one token over all layers, MTP layers included."""
        return self.indexer_row_bytes * len(self.indexer_layers)

    @property
    def bytes_per_token(self) -> int:
        """Device bytes of one token without offload."""
        return self.main_bytes_per_token + self.indexer_bytes_per_token

    @property
    def offload_factor(self) -> float:
        """Limit of tokens with offload / tokens without, for growing device and unlimited host memory."""
        return self.bytes_per_token / self.indexer_bytes_per_token

    def indexer_read_bytes(self, context_tokens: int) -> int:
        """Indexer bytes that one step of the target model reads for a request, drafts excluded."""
        return self.indexer_types.count("full") * self.indexer_row_bytes * context_tokens

    def transfer_bytes(self, tokens: int) -> tuple[int, int]:
        """(main, indexer) bytes transferred from prefill to decode for a request of this length."""
        return self.main_bytes_per_token * tokens, self.indexer_bytes_per_token * tokens

    @staticmethod
    def logits_buffer_bytes(query_rows: int, context_tokens: int) -> int:
        """fp32 scores of one indexer layer: each row padded to 256 columns."""
        return 4 * query_rows * -(-context_tokens // _LOGITS_ALIGN) * _LOGITS_ALIGN

    def describe(self) -> str:
        """The start-up log line. It contains the resolved list, because engines differ in their defaults."""
        full = self.indexer_types.count("full")
        components = "+".join(f"{c.name} {c.row_bytes}" for c in self.main_components)
        indexer = "+".join(f"{c.name} {c.row_bytes}" for c in self.indexer_components)
        drafts = f" + {self.num_mtp_layers} MTP" if self.num_mtp_layers else ""
        return (
            f"KV geometry of {self.model_type}: {self.num_target_layers} layers{drafts}, {full} full and "
            f"{self.num_target_layers - full} shared in {len(self.groups)} index groups, "
            f"index_topk {self.index_topk}, main KV {self.main_row_bytes} B ({components}) and indexer "
            f"{self.indexer_row_bytes} B ({indexer}) per token and layer, "
            f"indexer types {self.index_topk_pattern} (from {self.types_source})"
        )


# -------------------------------------------------------------------------------------------- IndexShare rule


def resolve_indexer_types(hf_config: object) -> tuple[tuple[IndexerType, ...], str]:
    """Returns (types of the target layers, their source), from the first of these in the config:

    1. `indexer_types`, a list of "full" and "shared";
    2. `index_topk_pattern`, a string or list of F and S;
    3. layer i is full iff max(i - offset + 1, 0) % freq == 0, with freq = `index_topk_freq` (1 when absent or
       0) and offset = `index_skip_topk_offset` (2 when absent).

    A list may be longer than the model (entries for MTP layers); the extra entries are ignored.
    Raises GeometryError: shared before any full layer, unknown type, list too short, negative frequency.
    """
    config = _text_config(hf_config)
    layers = _required_int(config, "num_hidden_layers", "the number of layers is unknown")
    for key in ("indexer_types", "index_topk_pattern"):
        listed = _get(config, key)
        if listed is not None:
            types, source = _listed_types(key, listed, layers), key
            break
    else:
        freq = _optional_int(config, "index_topk_freq", 1) or 1
        offset = _optional_int(config, "index_skip_topk_offset", 2)
        if freq < 1:
            raise GeometryError(
                "index_topk_freq", freq, "must be at least 1", "correct the model's config.json"
            )
        types = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))
        source = f"index_topk_freq {freq}, index_skip_topk_offset {offset}"
    if types[0] == "shared":
        rule = "layer 0 is shared, but there is no full layer before it whose top-k indices it could reuse"
        raise GeometryError(
            source, _abbreviate(types), rule, "make the first layer full in the model's config.json"
        )
    return types, source


def _listed_types(key: str, listed: object, layers: int) -> tuple[IndexerType, ...]:
    if not isinstance(listed, Sequence):
        raise GeometryError(key, listed, "must be a list or a string", "correct the model's config.json")
    if len(listed) < layers:
        rule = f"has {len(listed)} entries for {layers} layers"
        raise GeometryError(
            key, _abbreviate(listed), rule, "give one entry for each layer in the model's config.json"
        )
    types: list[IndexerType] = []
    for layer, name in enumerate(listed[:layers]):
        kind = _TYPE_NAMES.get(name) if isinstance(name, str) else None
        if kind is None:
            raise GeometryError(
                f"{key}[{layer}]",
                name,
                "unknown indexer type",
                'use "full" or "shared" (F or S in a pattern)',
            )
        types.append(kind)
    return tuple(types)


def _abbreviate(listed: Sequence[object]) -> str:
    return "".join(str(name)[:1].upper() for name in listed)


# ----------------------------------------------------------------------------------------- reading the config


def _get(config: object, key: str, default: Any = None) -> Any:
    if isinstance(config, Mapping):
        return config.get(key, default)
    return getattr(config, key, default)


def _text_config(config: object) -> object:
    """The part with the language model's values: multimodal configs nest it."""
    nested = _get(config, "text_config")
    return nested if nested is not None and _get(config, "index_topk") is None else config


def _optional_int(config: object, key: str, default: int) -> int:
    value = _get(config, key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise GeometryError(key, value, "must be an integer", "correct the model's config.json")
    return value


def _required_int(config: object, key: str, why: str) -> int:
    value = _optional_int(config, key, 0)
    if value < 1:
        rule = f"{why}: its config needs a positive {key}"
        raise GeometryError(key, _get(config, key), rule, "use a DSA model (DeepSeek-V3.2, GLM-5.x)")
    return value


def _refuse_unsupported(config: object) -> None:
    if _get(config, "compress_ratios") is not None:
        rule = "models with a compressed KV cache are not supported"
        raise GeometryError(
            "compress_ratios", _get(config, "compress_ratios"), rule, "serve it without KV offload"
        )
    if _optional_int(config, "index_kpool", 1) > 1:
        rule = "models that pool indexer keys are not supported"
        raise GeometryError("index_kpool", _get(config, "index_kpool"), rule, "serve it without KV offload")


def _num_mtp_layers(config: object, num_speculative_tokens: int) -> int:
    if num_speculative_tokens == 0:
        return 0
    layers = _optional_int(config, "num_nextn_predict_layers", 0)
    if layers < 1:
        rule = f"num_speculative_tokens is {num_speculative_tokens}, but the checkpoint has no MTP layers"
        fix = "leave num_speculative_tokens out, or use another draft method"
        raise GeometryError("num_nextn_predict_layers", layers, rule, fix)
    return layers


def _item_bytes(config: object, dtype: object) -> int:
    given = next(
        (d for d in (dtype, _get(config, "dtype"), _get(config, "torch_dtype")) if d is not None), "bfloat16"
    )
    name = str(given).removeprefix("torch.")
    if name not in _ITEM_BYTES:
        raise GeometryError("dtype", name, f"must be one of {', '.join(_ITEM_BYTES)}", "set --dtype bfloat16")
    return _ITEM_BYTES[name]


def _main_components(config: object, layout: str, item_bytes: int) -> tuple[Component, ...]:
    latent = _required_int(config, "kv_lora_rank", "the model has no MLA latent")
    rope = _required_int(config, "qk_rope_head_dim", "the model has no MLA rope part")
    if layout == "cpu":
        return (Component("kv", (latent + rope) * item_bytes),)
    if layout == "ascend":
        return (Component("nope", latent * item_bytes), Component("rope", rope * item_bytes))
    if layout == "fp8":
        # One tensor: the latent in FP8 with a scale for each block, the rope part in 16 bits.
        _require_multiple("kv_lora_rank", latent, _FP8_BLOCK)
        return (Component("kv", latent + latent // _FP8_BLOCK * 4 + rope * 2),)
    raise GeometryError("layout", layout, f"must be one of {', '.join(MAIN_LAYOUTS)}", "choose one of these")


def _indexer_components(config: object, layout: str, item_bytes: int) -> tuple[Component, ...]:
    dim = _required_int(config, "index_head_dim", "the model has no sparse attention indexer")
    if layout in ("model", "float32"):
        return (Component("key", dim * (4 if layout == "float32" else item_bytes)),)
    if layout == "fp8":
        _require_multiple("index_head_dim", dim, _FP8_BLOCK)
        return (Component("key", dim + dim // _FP8_BLOCK * 4),)
    if layout == "int8":
        # Ascend's quantised indexer keeps its 16-bit scale in a tensor of its own.
        return (Component("key", dim), Component("scale", 2))
    if layout == "mxfp4":
        _require_multiple("index_head_dim", dim, _MXFP4_BLOCK)
        return (Component("key", dim // 2 + dim // _MXFP4_BLOCK),)
    raise GeometryError(
        "indexer_layout", layout, f"must be one of {', '.join(INDEXER_LAYOUTS)}", "choose one of these"
    )


def _require_multiple(key: str, value: int, block: int) -> None:
    if value % block:
        raise GeometryError(
            key, value, f"must be a multiple of {block} in this layout", "choose another layout"
        )
