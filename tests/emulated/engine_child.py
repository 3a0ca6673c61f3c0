"""Runs one engine: python engine_child.py JOB.json OUTPUT.json

JOB: {"model": folder, "hidden": [modules], "rounds": [[prompts of token ids]], "tokens": n, "options": LLM's,
"planted": a name of planted.py}. The prompts of a round are given together, the rounds one after the other.
OUTPUT: "answers": for each prompt of all rounds the "token_ids" and "logprobs" of a greedy generation,
and the "cached" tokens;
"counters": vLLM's own and the plugin's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any


def counters(llm: Any) -> dict[str, float]:
    """Sums over labels, by name."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if isinstance(getattr(metric, "value", None), int | float):
            found[metric.name] = found.get(metric.name, 0) + metric.value
    return found


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in job.get("hidden", ()):  # as if it weren't installed
        sys.modules[name] = None  # type: ignore[assignment]
    with contextlib.suppress(ImportError):
        importlib.import_module("torch_npu")  # the emulator starts with it
    from vllm import LLM, SamplingParams

    options = {
        "enforce_eager": True, "max_model_len": 1024, "gpu_memory_utilization": 0.5, "max_num_seqs": 4,
        "disable_log_stats": False, **job.get("options", {}),
    }  # fmt: skip
    if job.get("planted"):
        sys.path.insert(0, str(Path(__file__).parent))
        importlib.import_module("planted").plant(job["planted"])
    llm = LLM(job["model"], skip_tokenizer_init=True, **options)
    params = SamplingParams(
        max_tokens=job["tokens"], temperature=0, detokenize=False, logprobs=1, ignore_eos=True
    )
    answers = []
    for prompts in job["rounds"]:
        given: Any = [{"prompt_token_ids": ids} for ids in prompts]
        for output in llm.generate(given, params, use_tqdm=False):
            choice = output.outputs[0]
            steps = zip(choice.token_ids, choice.logprobs or [], strict=True)
            logprobs = [step[token].logprob for token, step in steps]
            cached = output.num_cached_tokens
            answers.append({"token_ids": list(choice.token_ids), "logprobs": logprobs, "cached": cached})
    Path(sys.argv[2]).write_text(json.dumps({"answers": answers, "counters": counters(llm)}))


if __name__ == "__main__":
    main()
