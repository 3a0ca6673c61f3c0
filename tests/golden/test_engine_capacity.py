"""With one device budget: how many tokens fit with and without offload, and that they really do."""

from __future__ import annotations

import pytest

from tests.golden.engine import Job, engine, worst_difference
from tests.golden.workloads import prompt
from vllm_kvoffload.demo.checkpoint import MODELS

pytestmark = pytest.mark.slow

BLOCK, ROWS, SLOTS, WAYS, BUFFERS, LONGEST = 64, 4, 128, 16, 2, 2048
BUDGET = 8 << 20
OFFLOAD = {"topk_buffer_size": SLOTS, "ways": WAYS, "prefill_buffers": BUFFERS}
OPTIONS = {
    "max_num_seqs": ROWS,
    "max_model_len": LONGEST,
    "kv_cache_memory_bytes": BUDGET,
    "max_num_batched_tokens": 512,
}
JOBS = tuple(Job(prompt(2000, 40 + n), max_tokens=20) for n in range(ROWS))


def expected_blocks(offload: bool) -> int:
    """The formula, from the model's sizes alone."""
    spec = MODELS["glm-tiny"]
    row = 4 * (spec.kv_lora_rank + spec.qk_rope_head_dim)
    main = spec.num_layers * row
    indexers = spec.layer_pattern.count("F")
    indexer = 4 * spec.index_head_dim * indexers
    if not offload:
        return BUDGET // (BLOCK * (main + indexer))
    hot = ROWS * SLOTS * main
    residency = indexers * ROWS * (5 * SLOTS + SLOTS // WAYS + 4)
    plan = 4 * (3 * ROWS * spec.index_topk + 2 * ROWS) + 48
    staging = BUFFERS * LONGEST * row
    return (BUDGET - hot - residency - plan - staging) // (BLOCK * indexer)


def test_more_tokens_in_the_same_device_memory(lab):
    lab.close()
    directory = lab.checkpoint("glm-tiny")
    with engine(directory, **OPTIONS) as plain:
        baseline_blocks = plain.num_blocks
        assert baseline_blocks == expected_blocks(offload=False)
        plain.run(JOBS)
        assert max(map(len, plain.trace.schedule)) == 1  # no two of them fit together
    with engine(directory, OFFLOAD, **OPTIONS) as offloading:
        assert offloading.num_blocks == expected_blocks(offload=True)
        manager = offloading.manager
        used = manager.device_bytes + sum(
            cache.numel() * cache.element_size() for name, cache in _indexer_caches(offloading).items()
        )
        assert 0.98 * BUDGET < used <= BUDGET
        results = offloading.run(JOBS)
        assert not offloading.trace.preempted
        assert max(map(len, offloading.trace.schedule)) == ROWS
        assert offloading.trace.peak_blocks == ROWS * -(-2020 // BLOCK)
        assert offloading.trace.peak_blocks > 2 * (baseline_blocks - 1)
        schedule = offloading.trace.schedule
    roomy = {**OPTIONS, "kv_cache_memory_bytes": 8 * BUDGET}
    with engine(directory, **roomy) as plain:
        expected = plain.run(JOBS)
        assert plain.trace.schedule == schedule
    assert all(outcome.finished for outcome in results)
    assert worst_difference(results, expected) == 0.0


def _indexer_caches(under_test):
    context = under_test.runner.compilation_config.static_forward_context
    return {name: layer.kv_cache for name, layer in context.items() if name.endswith("k_cache")}
