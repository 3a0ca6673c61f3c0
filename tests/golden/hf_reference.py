"""Hugging Face transformers as the reference: log-probabilities and selections of a demo checkpoint.

    model = load_reference(directory)  # or with changed config keys, for negative controls
    run = run_reference(model, token_ids, record=True)  # float32, whole prompt, in chunks
    difference = compare_logprobs(run.logprobs, other)

It runs on CPU in float32. Scoring needs `chunk * index_n_heads * length * 4` bytes, so long prompts want
small chunks; chunked and unchunked runs agree up to rounding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F


@dataclass
class IndexerRecord:
    """Top-k indices of one indexer for every position.

    selected: bool [T, T], row t marks the positions that query t attends to (never later than t).
    margin: float32 [T], score of the last chosen minus score of the first unchosen visible position, +inf
    where all visible positions are chosen. A margin near rounding noise means that another correct
    implementation may choose differently.
    """

    selected: torch.Tensor
    margin: torch.Tensor


@dataclass
class ReferenceRun:
    """logprobs: float32 [T, V], row t is the distribution of token t + 1. indexers: by layer, if recorded."""

    token_ids: list[int]
    logprobs: torch.Tensor
    indexers: dict[int, IndexerRecord] = field(default_factory=dict)

    def prompt_logprobs(self) -> torch.Tensor:
        """float32 [T - 1]: log-probability of every prompt token after the first, like vLLM's."""
        following = torch.tensor(self.token_ids[1:]).unsqueeze(1)
        return self.logprobs[:-1].gather(1, following).squeeze(1)

    def minimal_margin(self) -> float:
        """Smallest selection margin of all layers and positions; +inf when nothing was recorded."""
        return min((float(record.margin.min()) for record in self.indexers.values()), default=float("inf"))


@dataclass(frozen=True)
class Difference:
    """Absolute differences of two log-probability arrays."""

    maximum: float
    mean: float
    worst_position: int

    def within(self, tolerance: float) -> bool:
        """Whether no element differs by more than `tolerance` (NaN never is)."""
        return self.maximum <= tolerance


def load_reference(directory: str | Path, **overrides: Any) -> Any:
    """The checkpoint as a transformers model in float32 on CPU.

    `overrides` replace config keys, for negative controls. Raises ValueError for a key the config lacks.
    """
    config_class, model_class = _classes(Path(directory))
    config = config_class.from_pretrained(directory)
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise ValueError(f"{key}: the config of {directory} has no such key")
        setattr(config, key, value)
    model: Any = model_class.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


@torch.no_grad()
def run_reference(
    model: Any, token_ids: Sequence[int], chunk: int | None = 256, record: bool = False
) -> ReferenceRun:
    """Log-probabilities of every position; `chunk` query tokens at a time (None: all at once)."""
    from transformers import DynamicCache

    length = len(token_ids)
    if length == 0:
        raise ValueError("token_ids: at least one token is needed")
    inputs = torch.tensor([list(token_ids)])
    records: dict[int, IndexerRecord] = {}
    rows = []
    with _recording(model, records, length) if record else _nothing():
        cache = DynamicCache(config=model.config)
        for start in range(0, length, chunk or length):
            part = inputs[:, start : start + (chunk or length)]
            logits = model(part, past_key_values=cache, use_cache=True).logits[0]
            rows.append(torch.log_softmax(logits.float(), dim=-1))
    return ReferenceRun(list(token_ids), torch.cat(rows), records)


def clear_prompt(
    model: Any, candidates: Iterable[Sequence[int]], margin: float = 3e-6, chunk: int = 256
) -> ReferenceRun:
    """The recorded run of the first candidate prompt whose selections are all clear by at least `margin`.

    Two correct implementations differ by rounding, and a rounding that swaps two positions at the end of one
    choice moves log-probabilities by as much as a real error. Prompts of about 400 tokens on a tiny model are
    mostly clear, 1200 tokens on a six-layer one hardly ever. Raises ValueError when no candidate is clear.
    """
    best = 0.0
    for candidate in candidates:
        run = run_reference(model, candidate, chunk=chunk, record=True)
        if run.minimal_margin() >= margin:
            return run
        best = max(best, run.minimal_margin())
    raise ValueError(
        f"margin: no candidate reaches {margin}, the best has {best}; use shorter or more prompts"
    )


@torch.no_grad()
def greedy(
    model: Any,
    token_ids: Sequence[int],
    steps: int,
    chunk: int = 256,
    before_step: Callable[[Any, int], None] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Greedy continuation: `steps` token ids and their log-probability rows, float32 [steps, V].

    `before_step(cache, step)` may alter the transformers cache between prefill and decode (corruption
    controls).
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    inputs = torch.tensor([list(token_ids)])
    logits = torch.empty(0)
    for start in range(0, len(token_ids), chunk):
        logits = model(inputs[:, start : start + chunk], past_key_values=cache, use_cache=True).logits
    chosen: list[int] = []
    rows = []
    for step in range(steps):
        rows.append(torch.log_softmax(logits[0, -1].float(), dim=-1))
        chosen.append(int(rows[-1].argmax()))
        if step + 1 < steps:
            if before_step is not None:
                before_step(cache, step)
            logits = model(torch.tensor([[chosen[-1]]]), past_key_values=cache, use_cache=True).logits
    return chosen, torch.stack(rows)


def compare_logprobs(left: torch.Tensor, right: torch.Tensor) -> Difference:
    """Difference of two equally shaped arrays [T] or [T, V]; a NaN on either side gives a NaN maximum."""
    if left.shape != right.shape:
        raise ValueError(f"shapes differ: {tuple(left.shape)} and {tuple(right.shape)}")
    gap = (left.double() - right.double()).abs()
    per_position = gap.reshape(gap.shape[0], -1).amax(dim=1)
    return Difference(float(per_position.max()), float(gap.mean()), int(per_position.argmax()))


def consecutive_overlap(record: IndexerRecord, start: int) -> float:
    """Mean share of a choice that the previous position had chosen as well, positions from `start` on."""
    before, after = record.selected[start - 1 : -1], record.selected[start:]
    return float(((before & after).sum(1) / after.sum(1)).float().mean())


def indexer_scores(
    indexer: Any,
    hidden_states: torch.Tensor,
    q_resid: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
) -> torch.Tensor:
    """float32 [S, L]: scores of S query tokens over L cached keys (after norm and rope), no causal mask.

    Our own statement of the formula; `run_reference(record=True)` fails where transformers chooses
    differently.
    """
    rope = indexer.qk_rope_head_dim
    cos, sin = (item[0, :, : rope // 2].unsqueeze(1) for item in position_embeddings)
    q = indexer.wq_b(q_resid)[0].unflatten(-1, (indexer.n_heads, indexer.head_dim)).float()
    if indexer.config.model_type == "glm_moe_dsa":
        even, odd = q[..., 0:rope:2], q[..., 1:rope:2]
    else:
        even, odd = q[..., : rope // 2], q[..., rope // 2 : rope]
    q = torch.cat([even * cos - odd * sin, odd * cos + even * sin, q[..., rope:]], dim=-1)
    dots = F.relu(torch.einsum("shd,ld->shl", q, keys[0].float()) * indexer.head_dim**-0.5)
    weights = indexer.weights_proj(hidden_states)[0].float() * indexer.n_heads**-0.5
    return torch.einsum("sh,shl->sl", weights, dots)


def _classes(directory: Path) -> tuple[Any, Any]:
    """Config and model class by name: once vLLM has run, the Auto classes give DeepSeek-V3 for V3.2."""
    import transformers

    model_type = json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
    stems = {"glm_moe_dsa": "GlmMoeDsa", "deepseek_v32": "DeepseekV32", "deepseek_v3": "DeepseekV3"}
    stem = stems[model_type]
    return getattr(transformers, stem + "Config"), getattr(transformers, stem + "ForCausalLM")


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _recording(model: Any, records: dict[int, IndexerRecord], length: int) -> Iterator[None]:
    handles = []
    for index, layer in enumerate(model.model.layers):
        indexer = getattr(layer.self_attn, "indexer", None)
        if indexer is not None:
            records[index] = IndexerRecord(
                torch.zeros(length, length, dtype=torch.bool), torch.full((length,), float("inf"))
            )
            hook = _hook(records[index], index)
            handles.append(indexer.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(record: IndexerRecord, layer: int) -> Callable[..., None]:
    def hook(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        hidden_states, q_resid, position_embeddings = args[:3]
        keys = kwargs["past_key_values"].layers[layer].indexer_keys
        visible, count = keys.shape[1], hidden_states.shape[1]
        scores = indexer_scores(module, hidden_states, q_resid, position_embeddings, keys)
        causal = torch.arange(visible) <= torch.arange(visible - count, visible).unsqueeze(1)
        scores = scores.masked_fill(~causal, float("-inf"))
        chosen = torch.zeros(count, visible, dtype=torch.bool)
        chosen.scatter_(1, output[0].long(), True)
        chosen &= causal
        rows = slice(visible - count, visible)
        record.selected[rows, :visible] = chosen
        lowest = scores.masked_fill(~chosen, float("inf")).amin(1)
        highest = scores.masked_fill(chosen, float("-inf")).amax(1)
        margin = lowest - highest
        scale = scores.masked_fill(~causal, 0.0).abs().amax(1)
        if bool((margin < -1e-4 * scale).any()):
            raise AssertionError(f"layer {layer}: transformers' choice does not follow the documented score")
        record.margin[rows] = margin

    return hook
