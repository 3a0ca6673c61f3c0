"""The Ascend platform without an NPU: against the real vllm-ascend, and on the simulated one.

Everything that imports vllm-ascend runs in one process with an environment of its own (`ascend_env.py`),
since its vLLM is another one than the CPU platform's. Its test modules are `inside_*.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests import ROOT
from tests.ascend import ascend_env
from vllm_kvoffload.sparse.paged import PagedKV
from vllm_kvoffload.sparse.step import StepBatch

HERE = Path(__file__).parent
BLOCKS, BLOCK, LATENT, TOPK, SCALE = 24, 16, 64, 32, 0.1  # of adapter_model.py
RECORDED = ("portable", "kernels", "compact", "drafts", "bf16", "shared buffers")  # of inside_*.py
INSIDE_S = 480

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ascend() -> Path:
    """The environment, made at first use."""
    try:
        return ascend_env.make(ROOT / "build" / "ascend-env")
    except ascend_env.EnvironmentUnavailable as error:
        pytest.skip(f"the package index has no vllm-ascend for this machine: {error}")


@pytest.fixture(scope="module")
def twin() -> Path:
    """The AscendC kernels, built for the CPU twin."""
    from tests.ascendc import twin_kernels

    return twin_kernels.build()


@pytest.fixture(scope="module")
def inside(ascend: Path, twin: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int, Path]:
    """(output, exit status, folder of records) of the tests inside."""
    records = tmp_path_factory.mktemp("records")
    wants = {"KVOFFLOAD_RECORDS": str(records), "KVOFFLOAD_KERNELS_TWIN": str(twin)}
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "inside.ini"), "--rootdir", str(HERE)]
    command += ["-p", "tests.ascend.prelude", "-v", *map(str, sorted(HERE.glob("inside_*.py")))]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**ascend_env.variables(ascend), **wants},
        capture_output=True,
        text=True,
        timeout=INSIDE_S,
        check=False,
    )
    return done.stdout + done.stderr, done.returncode, records


def test_all_tests_inside_pass(inside: tuple[str, int, Path]) -> None:
    output, status, _ = inside
    assert status == 0, output[-20000:]
    for name in (
        "test_symbol", "test_names_are_ours", "test_same_outputs", "test_piecewise_graphs",
        "test_full_graphs", "test_draft_passes", "test_a_prefix_comes_out_of_the_store",
        "test_register_save_and_load",
    ):  # fmt: skip
        assert name in output  # none of the modules was left out


@pytest.mark.parametrize("name", RECORDED)
def test_the_cpu_platform_gives_the_same(name: str, inside: tuple[str, int, Path]) -> None:
    """Bit for bit: prefill chunks, decodes, mixtures and drafts, whatever the simulated NPU was given."""
    compared = 0
    for number, record in enumerate(cpu_platform(inside[2] / f"{name}.pt")):
        for layer, (found, expected) in enumerate(record):
            assert torch.equal(found, expected), f"pass {number}, layer {layer}"
            compared += len(found)
    assert compared > 500


def test_control_another_choice(inside: tuple[str, int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvoffload.platforms.cpu import attention

    attend = attention.sparse_mla_attend
    monkeypatch.setattr(
        attention, "sparse_mla_attend", lambda q, rows, index, *rest: attend(q, rows, index[:, :-1], *rest)
    )
    pairs = [pair for record in cpu_platform(inside[2] / "portable.pt") for pair in record]
    assert not all(torch.equal(found, expected) for found, expected in pairs)


def cpu_platform(records: Path) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """For each pass and layer: what the CPU platform's indexer and attention return, and the adapter did."""
    from vllm_kvoffload.platforms.cpu.attention import CPUSparseMLAImpl
    from vllm_kvoffload.platforms.cpu.indexer import write_topk

    loaded: list[dict[str, Any]] = torch.load(records, weights_only=False)
    layers = 1 + max(given["layer"] for record in loaded for given in record["layers"])
    rows = loaded[0]["layers"][0]["rows"]
    topk = torch.full((96, TOPK), -1, dtype=torch.int32)
    impls = []
    for _ in range(layers):
        impl = object.__new__(CPUSparseMLAImpl)
        impl.kv = PagedKV(torch.zeros((BLOCKS, BLOCK, rows.shape[1]), dtype=rows.dtype))
        impl.scale, impl.kv_lora_rank, impl.topk_indices_buffer = SCALE, LATENT, topk
        impls.append(impl)
    indexers: dict[int, torch.Tensor] = {}
    results = []
    for record in loaded:
        batch = StepBatch(
            query_start_loc=record["starts"].astype(np.int32),
            seq_lens=record["lengths"].astype(np.int32),
            block_table=record["blocks"],
            slot_mapping=record["slots"],
            block_size=BLOCK,
        )
        pairs = []
        for given in record["layers"]:
            layer, impl = given["layer"], impls[given["layer"]]
            if "key" in given:
                keys = given["key"][: len(record["slots"])]
                empty = torch.zeros((BLOCKS, BLOCK, keys.shape[1]), dtype=keys.dtype)
                cache = indexers.setdefault(layer, empty)
                cache.view(-1, keys.shape[1]).index_copy_(0, record["slots"], keys)
                tokens = len(record["slots"])
                write_topk(given["index_q"][:tokens], given["weights"][:tokens], cache, batch, topk)
            impl.num_heads = given["q"].shape[1]
            assert impl.kv is not None
            impl.kv.append(given["rows"], record["slots"])
            metadata = SimpleNamespace(batch=batch)
            found, _ = impl.forward_mqa(given["q"], torch.empty(0), metadata, None)  # type: ignore[arg-type]
            pairs.append((found, given["out"]))
        results.append(pairs)
    return results
