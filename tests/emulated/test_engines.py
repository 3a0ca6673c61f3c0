"""The released vLLM and vllm-ascend on the emulated NPU: whole engines, with and without the offload."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated.emulator_env import environment
from tests.emulated.engines import (
    COMPILED,
    DELAYS,
    GUARD,
    MODELS,
    TOKENS,
    graphs,
    offload,
    operators,
    run,
    start,
)
from vllm_kvoffload.demo.checkpoint import build_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Answers = list[dict[str, Any]]
Expected = Callable[..., Answers]


@pytest.fixture(scope="module")
def python() -> Path:
    return environment()


@pytest.fixture(scope="module")
def kernels(python: Path) -> dict[str, str]:
    return operators(python)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: build_checkpoint(folder / name.replace(", ", "-"), MODELS[name])


@pytest.fixture(scope="module")
def without(
    python: Path, models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Expected:
    """Answers of an eager engine without the offload and without delays, once for each model and options."""
    found: dict[str, Answers] = {}

    def get(model: str = "GLM, dense", **options: Any) -> Answers:
        key = f"{model} {options}"
        if key not in found:
            folder = tmp_path_factory.mktemp("without")
            done = run(python, folder, models(model), options, {})
            check_rounds(done)
            found[key] = done["answers"]
        return found[key]

    return get


def check_rounds(done: dict[str, Any]) -> None:
    """The rounds did what they are for: chunks, prefix hits, a preemption, different answers."""
    assert done["counters"]["vllm:num_preemptions"] > 0
    assert any(answer["cached"] for answer in done["answers"])
    assert len({tuple(answer["token_ids"]) for answer in done["answers"]}) >= 6


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
    done = run(python, tmp_path, tmp_path / "model", options, {}, rounds=[prompts])
    assert [answer["token_ids"] for answer in done["answers"]] == answers


SEGMENT = {"hidden": ["memfabric_hybrid"]}  # host pool and rows without MemFabric
TP2, SYNC = {"tensor_parallel_size": 2}, {"async_scheduling": False}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "enforce_eager": True}}
CASES: dict[str, dict[str, Any]] = {
    "operators": {},
    "operators, segment": {"job": SEGMENT},
    "MemFabric's copies": {"kernels": False},
    "torch": {"kernels": False, "job": SEGMENT},
    "compact": {"section": {"delivery": "compact"}},
    "delays": {"settings": DELAYS},
    "compact, delays": {"settings": DELAYS, "section": {"delivery": "compact"}},
    "guard": {"settings": GUARD, "kernels": False},
    "guard, operators": {"settings": GUARD, "job": SEGMENT},
    "synchronous scheduling": {"options": SYNC},
    "PIECEWISE": {"options": graphs("PIECEWISE"), "settings": COMPILED},
    "FULL_DECODE_ONLY": {"options": graphs("FULL_DECODE_ONLY"), "settings": COMPILED},
    "FULL_DECODE_ONLY, delays": {"options": graphs("FULL_DECODE_ONLY"), "settings": {**COMPILED, **DELAYS}},
    "TP 2": {"base": TP2, "options": TP2},
    "MTP 1": {"model": "GLM, MTP", "base": MTP, "options": MTP, "section": {"topk_buffer_size": 4096}},
    "experts": {"model": "GLM, experts"},
    "DeepSeek-V3.2": {"model": "DeepSeek-V3.2"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_offload_changes_nothing(
    python: Path,
    kernels: dict[str, str],
    models: Callable[[str], Path],
    without: Expected,
    tmp_path: Path,
    case: str,
) -> None:
    """Token ids and log-probabilities to the bit, of chunks, prefix hits and preempted requests."""
    given = CASES[case]
    model = given.get("model", "GLM, dense")
    settings = {**(kernels if given.get("kernels", True) else {}), **given.get("settings", {})}
    options = offload(given.get("options"), **given.get("section", {}))
    done = run(python, tmp_path, models(model), options, settings, **given.get("job", {}))
    check_rounds(done)
    assert done["answers"] == without(model, **given.get("base", {}))


def test_more_than_the_model_selects(
    python: Path, kernels: dict[str, str], models: Callable[[str], Path], tmp_path: Path
) -> None:
    """A prompt longer than the top-k, and than a partition: tokens are selected, and evicted."""
    rng = random.Random(2)
    prompts = [[[rng.randrange(5, 2000) for _ in range(2100)]]]
    wide = {"max_model_len": 2304, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 20}
    model = models("GLM, dense")
    expected = run(python, tmp_path / "without", model, wide, {}, rounds=prompts)
    done = run(python, tmp_path / "with", model, offload(wide), kernels, rounds=prompts)
    assert done["answers"] == expected["answers"]


def test_the_cpu_platform_agrees(models: Callable[[str], Path], without: Expected, tmp_path: Path) -> None:
    """Another vLLM, with kernels of its own: log-probabilities are equal within 16-bit rounding up to the
    first token that differs, and most tokens don't."""
    settings = {"VLLM_PLUGINS": "kvoffload,kvoffload_cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 64 << 20}
    done = run(Path(sys.executable), tmp_path, models("GLM, dense"), options, settings)
    same = 0
    for ours, theirs in zip(without(), done["answers"], strict=True):
        for n, (a, b) in enumerate(zip(ours["token_ids"], theirs["token_ids"], strict=True)):
            if a != b:
                break
            assert ours["logprobs"][n] == pytest.approx(theirs["logprobs"][n], abs=0.15)
            same += 1
    assert same > 40


PLANTED: dict[str, dict[str, Any]] = {
    "missing_stream_wait": {"settings": DELAYS, "section": {"delivery": "compact"}},
    "lease_ignored": {},
    "wrong_block_table": {},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_changes_the_answers(
    python: Path,
    kernels: dict[str, str],
    models: Callable[[str], Path],
    without: Expected,
    tmp_path: Path,
    bug: str,
) -> None:
    """On the adapter's own code, each in an engine that gives the right answers without it."""
    given = PLANTED[bug]
    options = offload(given.get("options"), **given.get("section", {}))
    settings = {**kernels, **given.get("settings", {})}
    done = run(python, tmp_path, models("GLM, dense"), options, settings, planted=bug)
    assert done["answers"] != without()


@pytest.mark.parametrize(
    ("bug", "options", "settings", "message"),
    [
        ("host_reads_device_memory", {}, GUARD, "host code touches device memory"),
        (  # over another step's batch the plan's slots don't fit the selected tokens
            "buffer_not_refilled",
            graphs("FULL_DECODE_ONLY"),
            COMPILED,
            "npu_sparse_flash_attention would ignore indices behind a -1",
        ),
        (
            "capture_waits",
            graphs("FULL_DECODE_ONLY"),
            COMPILED,
            "can't wait for a copy while a stream is captured",
        ),
    ],
)
def test_a_planted_bug_ends_the_engine(
    python: Path,
    kernels: dict[str, str],
    models: Callable[[str], Path],
    tmp_path: Path,
    bug: str,
    options: dict[str, Any],
    settings: dict[str, str],
    message: str,
) -> None:
    done, output = start(
        python, tmp_path, models("GLM, dense"), offload(options), {**kernels, **settings}, planted=bug
    )
    assert done.returncode
    assert message in done.stdout + done.stderr
    assert not output.exists()
