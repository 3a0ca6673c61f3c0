"""Small random checkpoints of DSA models, built locally in seconds.

`build_checkpoint(path, spec)` writes a directory that vLLM and Hugging Face transformers both load:
config.json, model.safetensors and a tokenizer. Everything follows from the spec and its seed. The weights
are random, but not shapeless (`weights.py`): attention matters, and consecutive steps select overlapping,
slowly moving sets of tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_kvoffload.demo import text, weights
from vllm_kvoffload.demo.spec import CheckpointSpec

MARKER = "kvoffload_demo.json"
"""Marker file of our directories: only a directory that contains it is ever replaced."""

_LAYOUT_VERSION = 1
"""Part of the digest; raise it when the files written for an unchanged spec change."""

_ARCHITECTURES = {
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def spec_digest(spec: CheckpointSpec) -> str:
    """Returns the hexadecimal digest of everything that determines a checkpoint's content."""
    content = {
        "spec": dataclasses.asdict(spec),
        "layout": _LAYOUT_VERSION,
        "weights": weights.VERSION,
        "text": text.text_digest(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_GLM = CheckpointSpec()
_TINY = CheckpointSpec(
    layer_pattern="FFSS",
    hidden_size=128,
    q_lora_rank=64,
    kv_lora_rank=64,
    index_topk=64,
    intermediate_size=256,
    moe_intermediate_size=64,
    n_routed_experts=4,
)
_WIDE = CheckpointSpec(
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
    index_head_dim=128,
    index_topk=512,
)

_ASCEND = dataclasses.replace(
    _WIDE, layer_pattern="FFFFF", dtype="bfloat16", index_topk=2048, index_n_heads=8, num_dense_layers=4
)
"""What vllm-ascend's operators take. Every layer has an indexer: vLLM 0.23 loads no others from a checkpoint
that isn't quantised."""

MODELS: Mapping[str, CheckpointSpec] = {
    "glm": _GLM,
    "glm-576": _WIDE,
    "glm-ascend": _ASCEND,
    "glm-tiny": _TINY,
    "dsv32": dataclasses.replace(_GLM, model_type="deepseek_v32", layer_pattern="FFFFFF"),
    "dsv32-tiny": dataclasses.replace(_TINY, model_type="deepseek_v32", layer_pattern="FFF"),
    "glm-mtp": dataclasses.replace(_GLM, num_mtp_layers=1, mtp_index_share=True),
    "glm-tiny-mtp": dataclasses.replace(_TINY, num_mtp_layers=1, mtp_index_share=True),
    "dsv32-tiny-mtp": dataclasses.replace(
        _TINY, model_type="deepseek_v32", layer_pattern="FFF", num_mtp_layers=1
    ),
    "mla": dataclasses.replace(_WIDE, model_type="deepseek_v3", layer_pattern="FFFF"),
}
"""Named specs: the demo's GLM, one with true row sizes (512 + 64), a tiny one for tests, DeepSeek-V3.2
(every layer has an indexer; serve it with tokenizer mode "hf"), variants with an MTP layer, and an MLA
model without sparse attention, for refusals; its row sizes are the only ones that vLLM's own CPU attention
takes."""


def model_config(spec: CheckpointSpec) -> dict[str, Any]:
    """config.json of a spec, with the keys that vLLM needs and transformers' own save would leave out."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[spec.model_type]],
        "model_type": spec.model_type,
        "dtype": spec.dtype,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "hidden_size": spec.hidden_size,
        "hidden_act": "silu",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_attention_heads,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": spec.q_lora_rank,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "v_head_dim": spec.v_head_dim,
        "first_k_dense_replace": spec.num_dense_layers,
        "moe_layer_freq": 1,
        "intermediate_size": spec.intermediate_size,
        "moe_intermediate_size": spec.moe_intermediate_size,
        "n_routed_experts": spec.n_routed_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        # transformers hard-codes 1e-6 in the two latent norms, vLLM takes this value there too
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": spec.num_mtp_layers,
        "use_cache": True,
        "initializer_range": 0.02,
        "pad_token_id": text.PAD_ID,
        "bos_token_id": text.BOS_ID,
        "eos_token_id": [text.EOS_ID, text.END_ID],
    }
    if spec.has_indexer:
        config |= {
            "index_topk": spec.index_topk,
            "index_n_heads": spec.index_n_heads,
            "index_head_dim": spec.index_head_dim,
            "indexer_rope_interleave": spec.indexer_rope_interleave,
        }
    if spec.model_type == "glm_moe_dsa":
        if spec.sharing_key == "indexer_types":
            config["indexer_types"] = [{"F": "full", "S": "shared"}[letter] for letter in spec.layer_pattern]
        else:
            config["index_topk_pattern"] = spec.layer_pattern
        if spec.num_mtp_layers:
            config["index_share_for_mtp_iteration"] = spec.mtp_index_share
    return config


def build_checkpoint(path: str | os.PathLike[str], spec: CheckpointSpec) -> Path:
    """Build the checkpoint of `spec` at `path`, or reuse the one there when it has the same digest.

    The directory appears complete or not at all: it is written beside `path` and renamed. An older
    checkpoint of this builder is replaced. Raises FileExistsError when `path` is something else,
    ImportError without torch, safetensors or tokenizers.
    """
    target = Path(path)
    digest = spec_digest(spec)
    if _digest_at(target) == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_directory(target) as work:
        new = work / "new"
        new.mkdir()
        _write(new, spec, digest)
        if _digest_at(target) == digest:  # built by another process meanwhile
            return target
        with contextlib.suppress(FileNotFoundError):
            os.replace(target, work / "old")
        try:
            os.replace(new, target)
        except OSError:
            # another process was faster: fine if it is the same checkpoint
            if _digest_at(target) != digest:
                raise
    return target


def _digest_at(target: Path) -> str | None:
    """Digest of the checkpoint at `target`, None when nothing is there, "" when the marker can't be read."""
    if not target.exists():
        return None
    if target.is_dir() and not any(target.iterdir()):
        return ""
    marker = target / MARKER
    if not marker.is_file():
        raise FileExistsError(
            f"{target} exists and is not a demo checkpoint (no {MARKER} in it); choose another path"
        )
    try:
        content = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError:
        return ""
    return str(content.get("digest", "")) if isinstance(content, dict) else ""


@contextlib.contextmanager
def _temporary_directory(target: Path) -> Iterator[Path]:
    """A directory on `target`'s file system, so that a rename from it is atomic."""
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(directory: Path, spec: CheckpointSpec, digest: str) -> None:
    from safetensors.torch import save_file

    tensors = weights.random_weights(spec)
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    text.write_tokenizer(directory, spec.vocab_size, spec.max_position_embeddings)
    generation = {
        "pad_token_id": text.PAD_ID,
        "bos_token_id": text.BOS_ID,
        "eos_token_id": [text.EOS_ID, text.END_ID],
    }
    marker = {"digest": digest, "spec": dataclasses.asdict(spec)}
    files = {"config.json": model_config(spec), "generation_config.json": generation, MARKER: marker}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
