"""Engines on the emulated NPU: models, jobs and how they are run."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

from tests.emulated.emulator_env import child
from tests.emulated.operators.build import build
from vllm_kvoffload.demo.spec import CheckpointSpec

ASCEND = "ascend,ascend_kv_connector,ascend_model,ascend_service_profiling"
PLUGINS = {"VLLM_PLUGINS": f"kvoffload,{ASCEND}"}
TOKENS = 8
DSA: dict[str, Any] = {
    "layer_pattern": "FFF", "dtype": "bfloat16", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 8,
}  # fmt: skip
MODELS = {
    "GLM, dense": CheckpointSpec(num_dense_layers=3, **DSA),
    "GLM, experts": CheckpointSpec(num_dense_layers=1, **DSA),
    "GLM, MTP": CheckpointSpec(num_dense_layers=1, num_mtp_layers=1, **DSA),
    "DeepSeek-V3.2": CheckpointSpec(model_type="deepseek_v32", num_dense_layers=1, **DSA),
}
BLOCKS = 8  # one is vLLM's own: the last round of `rounds` needs nine, so that a request is preempted
OPTIONS = {
    "block_size": 128, "max_model_len": 1024, "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": BLOCKS,
}  # fmt: skip
DELAYS = {"NPU_EMULATOR_DELAY_US": "2000"}
GUARD = {"NPU_EMULATOR_GUARD": "1"}


def graphs(mode: str) -> dict[str, Any]:
    """Options of an engine with graphs. The pattern and the graph backend that are switched off don't fit
    torch 2.13 or want quantisation."""
    return {
        "enforce_eager": False,
        "compilation_config": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 2, 4]},
        "additional_config": {
            "ascend_compilation_config": {"fuse_norm_quant": False, "enable_npugraph_ex": False}
        },
    }


COMPILED = {"VLLM_USE_AOT_COMPILE": "0", "VLLM_USE_MEGA_AOT_ARTIFACT": "0"}


def rounds() -> list[list[list[int]]]:
    """Prompts in chunks; prefix hits; a batch that preempts."""
    rng = random.Random(1)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(5, 2000) for _ in range(length)]

    first = [prompt(n) for n in (4, 150, 300)]
    again = [first[2][:256] + prompt(30), first[2]]
    return [first, again, [prompt(250) for _ in range(3)]]


def offload(options: dict[str, Any] | None = None, **section: Any) -> dict[str, Any]:
    """An engine's options with the offload."""
    given = dict(options or {})
    values = {"enabled": True, "topk_buffer_size": 2048, "dram_size_per_dp_GB": 1, **section}
    given["additional_config"] = {**given.get("additional_config", {}), "sparse_kv_offload_config": values}
    return given


def start(
    python: Path, folder: Path, model: Path, options: dict[str, Any], settings: dict[str, str], **job: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs an engine in one process to its end. Returns the process and its output's path."""
    folder.mkdir(parents=True, exist_ok=True)
    given, output = folder / "job.json", folder / "output.json"
    asked = {
        "rounds": rounds(),
        "tokens": TOKENS,
        "model": str(model),
        "options": {**OPTIONS, **options},
        **job,
    }
    given.write_text(json.dumps(asked))
    wants = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "INFO", **PLUGINS, **settings}
    return child(python, "engine_child.py", str(given), str(output), timeout_s=800, **wants), output


def run(
    python: Path, folder: Path, model: Path, options: dict[str, Any], settings: dict[str, str], **job: Any
) -> dict[str, Any]:
    """The engine's output, see engine_child.py."""
    done, output = start(python, folder, model, options, settings, **job)
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def operators(python: Path) -> dict[str, str]:
    """Has an engine use the AscendC kernels, on the CPU twin."""
    return {"KVOFFLOAD_ASCEND_OPS": str(build(python.parents[1]))}
