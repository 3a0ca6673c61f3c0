"""The released vLLM and vllm-ascend on the emulated NPU: whole engines, with and without the offload."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated.emulator_env import child, environment
from vllm_kvoffload.demo.checkpoint import build_checkpoint
from vllm_kvoffload.demo.spec import CheckpointSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ASCEND = "ascend,ascend_kv_connector,ascend_model,ascend_service_profiling"
TOKENS = 8
OFFLOAD = {"sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 4096, "dram_size_per_dp_GB": 1}}
DSA: dict[str, Any] = {
    "layer_pattern": "FFF", "dtype": "bfloat16", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 8,
}  # fmt: skip
MODELS = {
    "GLM, dense": CheckpointSpec(num_dense_layers=3, **DSA),
    "GLM, experts": CheckpointSpec(num_dense_layers=1, **DSA),
    "DeepSeek-V3.2": CheckpointSpec(model_type="deepseek_v32", num_dense_layers=1, **DSA),
}


@pytest.fixture(scope="module")
def python() -> Path:
    return environment()


def run(python: Path, folder: Path, job: dict[str, Any], **settings: str) -> Any:
    given, output = folder / "job.json", folder / "output.json"
    given.write_text(json.dumps(job))
    wants = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", **settings}
    done = child(python, "engine_child.py", str(given), str(output), timeout_s=800, **wants)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(output.read_text())


def decisive_prompts(model: Any, count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts for which no rounding changes a greedy token, and their tokens in float32."""
    rng, prompts, answers = random.Random(0), [], []
    while len(prompts) < count:
        prompt = [rng.randrange(5, 500) for _ in range(rng.choice((3, 5, 40, 150)))]
        with torch.inference_mode():
            found = model.generate(
                torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
        best = torch.stack([score[0].log_softmax(-1).topk(2).values for score in found.scores])
        if (best[:, 0] - best[:, 1]).min() > 0.3:
            prompts.append(prompt)
            answers.append(found.sequences[0, len(prompt) :].tolist())
    return prompts, answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_qwen3_generates_what_hugging_face_does(python: Path, tmp_path: Path, ranks: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    prompts, answers = decisive_prompts(model.float(), 3)
    options = {"tensor_parallel_size": ranks}
    job = {"model": str(tmp_path / "model"), "prompts": prompts, "tokens": TOKENS, "options": options}
    results = run(python, tmp_path, job, VLLM_PLUGINS=ASCEND)
    assert [result["token_ids"] for result in results] == answers


@pytest.mark.parametrize("name", MODELS)
def test_the_offload_changes_nothing(python: Path, tmp_path: Path, name: str) -> None:
    """Token ids and log-probabilities, also of a prompt in chunks, longer than what an indexer chooses."""
    model = build_checkpoint(tmp_path / "model", MODELS[name])
    rng = random.Random(1)
    prompts = [[11, 48, 85, 122], [rng.randrange(5, 2000) for _ in range(2100)]]
    options = {"block_size": 128, "max_model_len": 4096, "max_num_batched_tokens": 1024}
    job = {
        "model": str(model), "prompts": prompts, "tokens": TOKENS, "options": options,
        "hidden": ["memfabric_hybrid"],
    }  # fmt: skip
    plugins = {"VLLM_PLUGINS": f"kvoffload,{ASCEND}"}
    expected = run(python, tmp_path, job, **plugins)
    job["options"] = {**options, "additional_config": OFFLOAD}
    assert run(python, tmp_path, job, **plugins) == expected
    assert len({tuple(result["token_ids"]) for result in expected}) == len(prompts)
