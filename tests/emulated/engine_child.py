"""Runs one engine in the emulator's environment: python engine_child.py JOB.json OUTPUT.json

JOB: {"model": folder, "hidden": [modules], "prompts": [[token ids]], "tokens": n, "options": LLM's}.
OUTPUT: for each prompt the "token_ids" and "logprobs" of a greedy generation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for name in job.get("hidden", ()):  # as if it weren't installed
        sys.modules[name] = None  # type: ignore[assignment]
    import torch_npu  # noqa: F401  the emulator starts with it
    from vllm import LLM, SamplingParams

    options = {"enforce_eager": True, "max_model_len": 1024, "gpu_memory_utilization": 0.5, "max_num_seqs": 4}
    llm = LLM(job["model"], skip_tokenizer_init=True, **{**options, **job.get("options", {})})
    params = SamplingParams(
        max_tokens=job["tokens"], temperature=0, detokenize=False, logprobs=1, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    results = []
    for output in llm.generate(prompts, params, use_tqdm=False):  # type: ignore[arg-type]
        choice = output.outputs[0]
        steps = zip(choice.token_ids, choice.logprobs or [], strict=True)
        results.append(
            {"token_ids": list(choice.token_ids), "logprobs": [step[token].logprob for token, step in steps]}
        )
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
