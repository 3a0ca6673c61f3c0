"""The geometry against the indexers of a checkpoint and of a model that was built."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.built_model import (
    built_layers,
    check_built,
    check_checkpoint,
    checkpoint_indexers,
)
from vllm_kvoffload.settings.errors import ConfigError

CONFIG = {
    "num_hidden_layers": 4, "index_topk_pattern": "FFSS", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_topk": 2048, "index_head_dim": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip


def geometry(**changes: Any) -> KVGeometry:
    return KVGeometry.from_hf_config({**CONFIG, **changes}, num_speculative_tokens=1)


class Layer(torch.nn.Module):
    """Has the attributes of vLLM's MLA layer."""

    def __init__(self, index: int, has_indexer: bool, skip_topk: bool) -> None:
        super().__init__()
        self.prefix = f"model.layers.{index}.self_attn"
        self.skip_topk = skip_topk
        self.mla_attn = torch.nn.Module()
        self.mla_attn.indexer = torch.nn.Identity() if has_indexer else None


def models(*layers: tuple[bool, bool]) -> list[torch.nn.Module]:
    """A target of all layers but the last, which is the draft's."""
    made = [Layer(index, *kind) for index, kind in enumerate(layers)]
    return [torch.nn.Sequential(*made[:-1]), torch.nn.Sequential(made[-1])]


FULL, SHARED, UNUSED, BLIND = (True, False), (False, True), (True, True), (False, False)


def test_a_model_as_the_config_says() -> None:
    check_built(geometry(), built_layers(models(FULL, FULL, SHARED, SHARED, FULL)))


@pytest.mark.parametrize(
    ("built", "says"),
    [
        (
            (FULL, FULL, UNUSED, SHARED, FULL),
            "layer 2 has an indexer and reuses a choice, and is shared here",
        ),
        ((FULL, FULL, FULL, FULL, FULL), "layer 3 has an indexer and makes its own choice, and is shared"),
        (
            (FULL, SHARED, SHARED, SHARED, FULL),
            "layer 1 has no indexer and reuses a choice, and is full here",
        ),
        ((FULL, FULL, BLIND, SHARED, FULL), "layer 2 has no indexer and makes its own choice"),
        ((FULL, FULL, SHARED, SHARED), "layer 4 has no sparse attention"),
        (
            (FULL, FULL, SHARED, SHARED, SHARED),
            "layer 4 has no indexer and reuses a choice, and is full here",
        ),
    ],
    ids=str,
)
def test_another_model_is_refused(built: tuple[tuple[bool, bool], ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"index_topk_pattern='FFSS': .*{says}.*Fix: "):
        check_built(geometry(), built_layers(models(*built)))


@pytest.mark.parametrize("indexed", [False, True], ids=["one file", "index"])
def test_the_layers_of_a_checkpoint(tmp_path: Path, indexed: bool) -> None:
    folder = build_checkpoint(tmp_path / "glm", replace(MODELS["glm-tiny"], num_mtp_layers=1))
    if indexed:
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
            names = dict.fromkeys(file.keys(), "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        (folder / "model.safetensors").unlink()
    assert checkpoint_indexers(folder) == {0, 1, 4}


def test_names_that_cannot_be_read_say_nothing(tmp_path: Path) -> None:
    assert checkpoint_indexers(tmp_path / "somebody" / "model") is None
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    assert checkpoint_indexers(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert checkpoint_indexers(tmp_path) is None


def test_indexers_in_shared_layers_of_a_checkpoint_are_refused() -> None:
    check_checkpoint(geometry(), {0, 1, 4})
    with pytest.raises(ConfigError, match=r"index_topk_pattern='FFSS': layers 2, 3 reuse .*Fix: serve"):
        check_checkpoint(geometry(), range(5))


def test_the_cpu_engine_refuses_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvoffload.platforms.cpu.worker import KVOffloadCPUWorker
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    worker: Any = object.__new__(KVOffloadCPUWorker)
    worker.settings = type("Settings", (), {"model": geometry()})
    target, draft = models(FULL, FULL, SHARED, SHARED, FULL)
    worker.model_runner = type("Runner", (), {"model": target, "drafter": type("D", (), {"model": draft})})
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker.load_model", lambda *_, **__: None)
    worker.load_model(load_dummy_weights=False)
    target[2].skip_topk = False
    with pytest.raises(StartupRefusedError, match="layer 2 has no indexer and makes its own choice"):
        worker.load_model()
