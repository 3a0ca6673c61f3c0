"""Drafts that need no model: verification alone goes through the offload."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.golden.engine import worst_difference
from tests.golden.lab import Lab, Result

pytestmark = pytest.mark.slow

DRAFTS = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    }
}


def run(directory: Path, offload: dict[str, Any] | None) -> Result:
    """The workload on an engine in a process of its own.

    vLLM's proposer imports numba, which vLLM's own search for kernels in modules, at every engine's start,
    then trips over: so the two have a process each.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (directory, offload))


def _run(directory: Path, offload: dict[str, Any] | None) -> Result:
    lab = Lab(directory)
    try:
        return lab.run("mixed", offload=offload, **DRAFTS)
    finally:
        lab.close()


def test_ngram_drafts(lab, tmp_path):
    lab.close()
    plain, offloading = run(tmp_path, None), run(tmp_path, {"topk_buffer_size": 256})
    assert worst_difference(offloading.outcomes, plain.outcomes) == 0.0
    assert offloading.trace.drafts == plain.trace.drafts
    assert max(offloading.trace.accepted) > 0
    assert min(offloading.trace.accepted) == 0
    assert offloading.trace.stats["hits"] > 0
