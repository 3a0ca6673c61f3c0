"""Configurations that the CPU platform rejects: one line, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

OFFLOAD = {"enabled": True, "topk_buffer_size": 256, "dram_size_per_dp_GB": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model") / "glm-tiny", MODELS["glm-tiny"])


def configure(checkpoint: Path, offload: dict[str, Any], **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 64 << 20,
        "dtype": "float32",
        "enforce_eager": True,
    }
    arguments = {**defaults, **options, "additional_config": {"sparse_kv_offload_config": offload}}
    return EngineArgs(model=str(checkpoint), **arguments).create_engine_config()


def test_the_users_choices_survive(checkpoint: Path) -> None:
    """vLLM's dense CPU MLA path would force a block size, no chunked prefill and no prefix caching."""
    config = configure(checkpoint, OFFLOAD, block_size=128, max_num_batched_tokens=512)
    assert config.cache_config.block_size == 128
    assert config.cache_config.enable_prefix_caching
    assert config.scheduler_config.enable_chunked_prefill
    assert config.scheduler_config.max_num_batched_tokens == 512
    assert config.model_config.hf_text_config.index_topk_pattern == "FFSS"
    assert "-rotary_embedding" in config.compilation_config.custom_ops


@pytest.mark.parametrize(
    ("offload", "options", "expected"),
    [
        ({**OFFLOAD, "topk_buffer_size": 96}, {}, "topk_buffer_size=96"),
        ({**OFFLOAD, "polcy": "rrip"}, {}, "did you mean 'policy'"),
        ({**OFFLOAD, "enabled": "true"}, {}, "enabled='true'"),
        (OFFLOAD, {"kv_cache_memory_bytes": None}, "kv_cache_memory_bytes=None"),
        (OFFLOAD, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (OFFLOAD, {"num_gpu_blocks_override": 1 << 20}, "num_gpu_blocks_override=1048576"),
        (
            OFFLOAD,
            {
                "speculative_config": {
                    "method": "ngram_gpu",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 2,
                }
            },
            "speculative_config.method='ngram_gpu'",
        ),
        (
            OFFLOAD,
            {
                "kv_transfer_config": {
                    "kv_connector": "ExampleConnector",
                    "kv_role": "kv_consumer",
                    "kv_connector_extra_config": {},
                }
            },
            "kv_transfer_config.kv_connector='ExampleConnector'",
        ),
    ],
)
def test_refusals(checkpoint: Path, offload: dict[str, Any], options: dict[str, Any], expected: str) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    with pytest.raises(StartupRefusedError) as caught:
        configure(checkpoint, offload, **options)
    assert expected in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_an_indexer_is_refused(tmp_path: Path) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    with pytest.raises(StartupRefusedError, match=r"index_topk.*DSA model"):
        configure(build_checkpoint(tmp_path / "mla", MODELS["mla"]), OFFLOAD)


def test_without_offload_nothing_of_it_is_checked(checkpoint: Path) -> None:
    configure(checkpoint, {"enabled": False}, num_gpu_blocks_override=1 << 20)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("glm-tiny", {"enable_lora": True}, r"enable_lora=True: .*Triton"),
        ("glm-tiny", {"kv_offloading_size": 1.0}, r"kv_offloading_size=1.0: .*GPU"),
        ("glm-tiny", {"speculative_config": {**NGRAM, "method": "ngram_gpu"}}, r"method='ngram_gpu': .*CPU"),
        ("glm-tiny", {"speculative_config": {**NGRAM, **SYNTHETIC}}, r"method='synthetic': .*CPU"),
    ],
)
def test_what_vllm_has_no_cpu_kernels_for_is_refused(
    tmp_path: Path, model: str, options: dict[str, Any], expected: str
) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    with pytest.raises(StartupRefusedError, match=expected):
        configure(build_checkpoint(tmp_path / model, MODELS[model]), {"enabled": False}, **options)


@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_a_cache_of_another_type_is_refused(checkpoint: Path, dtype: str) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    with pytest.raises(StartupRefusedError, match=f"kv_cache_dtype='{dtype}': .*own type.*Fix: "):
        configure(checkpoint, {"enabled": False}, kv_cache_dtype=dtype)


def test_another_model_runner_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(StartupRefusedError, match=r"VLLM_USE_V2_MODEL_RUNNER=True: .*Fix: "):
        configure(checkpoint, {"enabled": False})


def store(**extra: Any) -> dict[str, Any]:
    options = {"backend": "local", "use_layerwise": True, "layerwise_num_shared_buffers": 2, **extra}
    return {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": options,
    }


def test_shared_buffers_and_prefix_caching(checkpoint: Path) -> None:
    """A block's KV outlives its step in the store only: vLLM's own prefix cache would find nothing."""
    off = {"enabled": False}
    assert not configure(checkpoint, off, kv_transfer_config=store()).cache_config.enable_prefix_caching
    unshared = store(layerwise_independent_layers="all")
    assert configure(checkpoint, off, kv_transfer_config=unshared).cache_config.enable_prefix_caching
    configure(checkpoint, off, kv_transfer_config=unshared, enforce_eager=False)


@pytest.mark.parametrize(
    ("extra", "options", "expected"),
    [
        ({}, {"enforce_eager": False}, "enforce_eager=False"),
        ({"layerwise_independent_layers": [4]}, {}, "there is no layer 4"),
        ({"layerwise_shared_buffers": 3}, {}, "did you mean 'layerwise_num_shared_buffers'"),
        ({"backend": "memcache"}, {}, "PYTHONHASHSEED=None"),
        ({}, {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler_cls="),
    ],
)
def test_refused_stores(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    extra: dict[str, Any],
    options: dict[str, Any],
    expected: str,
) -> None:
    from vllm_kvoffload.platforms.refusal import StartupRefusedError

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(StartupRefusedError) as caught:
        configure(checkpoint, {"enabled": False}, kv_transfer_config=store(**extra), **options)
    assert expected in str(caught.value)
    assert "Fix: " in str(caught.value)
