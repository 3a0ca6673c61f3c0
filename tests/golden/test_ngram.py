"""Drafts that need no model: verification alone goes through the offload."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

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


def run(directory: Path) -> tuple[Result, Result]:
    """The workload without and with offload, on engines in a process of their own.

    vLLM's proposer imports numba, which vLLM's own search for kernels in modules, at every engine's start,
    then trips over.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_run, (directory,))


def _run(directory: Path) -> tuple[Result, Result]:
    lab = Lab(directory)
    try:
        plain = lab.run("mixed", **DRAFTS)
        return plain, lab.run("mixed", offload={"topk_buffer_size": 256}, **DRAFTS)
    finally:
        lab.close()


def test_ngram_drafts(lab, tmp_path):
    lab.close()
    plain, offloading = run(tmp_path)
    assert worst_difference(offloading.outcomes, plain.outcomes) == 0.0
    assert offloading.trace.drafts == plain.trace.drafts
    assert max(offloading.trace.accepted) > 0
    assert min(offloading.trace.accepted) == 0
    assert offloading.trace.stats["hits"] > 0
