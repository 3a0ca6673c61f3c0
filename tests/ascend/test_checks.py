"""Start-up refusals of the Ascend platform, one line each; version range and symbol table without
vllm-ascend.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.platforms.ascend import checks, symbols
from vllm_kvoffload.platforms.ascend.caches import (
    IndexerLayout,
    LayerCache,
    bound_entries,
    connector_entries,
    indexer_layouts,
    layer_caches,
)
from vllm_kvoffload.platforms.ascend.connectors import name_modules
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV
from vllm_kvoffload.settings.connectors import connector_parts
from vllm_kvoffload.settings.errors import ConfigError

HF = {
    "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048,
    "index_head_dim": 128, "model_type": "deepseek_v32", "num_nextn_predict_layers": 1,
}  # fmt: skip
MEMFABRIC = {"transfer_backend": "memfabric"}
DECODE = {"kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_consumer", "extra": MEMFABRIC}
PREFILL = {"kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_producer", "extra": MEMFABRIC}
STORE = {"backend": "local", "use_layerwise": True, "layerwise_num_shared_buffers": 2}
PREFILL_STORE = {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer", "extra": STORE}
WHOLE_CACHES = {"backend": "local", "use_layerwise": True, "layerwise_independent_layers": "all"}
JOINT = {
    "kv_connector": "MultiConnector", "kv_role": "kv_producer",
    "extra": {"connectors": [
        {"kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_producer",
         "kv_connector_extra_config": MEMFABRIC},
        {"kv_connector": "AscendStoreConnector", "kv_role": "kv_producer",
         "kv_connector_extra_config": STORE},
    ]},
}  # fmt: skip


def engine(**changes: Any) -> Any:
    """A decode engine's configuration, as far as the checks look at it."""
    given: dict[str, Any] = {
        "additional": {"sparse_kv_offload_config": {"enabled": True, "topk_buffer_size": 4096}},
        "transfer": DECODE, "pp": 1, "pcp": 1, "dcp": 1, "v2": False, "eager": True, "mode": "NONE",
        "block_size": 128, "hybrid": False, "hf": HF, "speculative": None, "splits": [checks.ATTENTION_OP],
        "scheduler": None, "dbo": False,
        **changes,
    }  # fmt: skip
    transfer = given["transfer"]
    if transfer is not None:
        transfer = SimpleNamespace(
            kv_connector=transfer["kv_connector"], kv_role=transfer["kv_role"], kv_port=20050,
            kv_connector_extra_config=copy.deepcopy(transfer["extra"]), kv_connector_module_path=None,
        )  # fmt: skip
        name_modules(transfer)
    return SimpleNamespace(
        additional_config=given["additional"],
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**given["hf"]), dtype=torch.bfloat16, enable_sleep_mode=False,
            enforce_eager=given["eager"], is_hybrid=given["hybrid"], max_model_len=4096, model="m",
            revision=None,
        ),
        cache_config=SimpleNamespace(
            block_size=given["block_size"], cache_dtype="bfloat16", prefix_caching_hash_algo="sha256"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, scheduler_cls=given["scheduler"]),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=given["pp"], prefill_context_parallel_size=given["pcp"],
            decode_context_parallel_size=given["dcp"], data_parallel_size=1, tensor_parallel_size=1,
            use_ubatching=given["dbo"],
        ),
        speculative_config=given["speculative"],
        use_v2_model_runner=given["v2"],
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(name=given["mode"]), splitting_ops=given["splits"]
        ),
    )  # fmt: skip


def drafting(method: str, enforce_eager: bool | None = None) -> SimpleNamespace:
    return SimpleNamespace(num_speculative_tokens=1, method=method, enforce_eager=enforce_eager)


def with_options(**options: Any) -> dict[str, Any]:
    section = {"enabled": True, "topk_buffer_size": 4096, **options}
    return {"sparse_kv_offload_config": section}


def beside(**others: Any) -> dict[str, Any]:
    return {**with_options(), **others}


REFUSED = [
    ({"pcp": 2}, "prefill_context_parallel_size"),
    ({"dcp": 2}, "decode_context_parallel_size"),
    ({"pp": 2}, "pipeline_parallel_size"),
    ({"additional": beside(enable_dsa_cp=True)}, "dsa_context_parallel"),
    ({"hybrid": True}, "hybrid KV cache"),
    ({"hf": {**HF, "compress_ratios": [1, 4]}}, "compress"),
    ({"additional": beside(enable_sparse_sfa_c8=True)}, "enable_sparse_sfa_c8"),
    ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER"),
    ({"eager": False, "mode": "FULL_DECODE_ONLY"}, "cudagraph_mode"),
    ({"eager": False, "mode": "FULL_AND_PIECEWISE"}, "cudagraph_mode"),
    ({"transfer": PREFILL}, "kv_role=kv_producer"),
    ({"additional": {}}, "pulls into the host pool"),
    ({"block_size": 64}, "block_size"),
    ({"eager": False, "mode": "FULL"}, "cudagraph_mode"),
    ({"eager": False, "mode": "PIECEWISE", "splits": []}, "splitting_ops"),
    ({"eager": False, "mode": "PIECEWISE", "splits": None}, "splitting_ops"),
    ({"additional": with_options(delivery="compact")}, "delivery"),
    ({"additional": with_options(keep_device_kv_cache=True)}, "keep_device_kv_cache"),
    ({"additional": with_options(placement="two_sets")}, "placement"),
    ({"additional": beside(xlite_graph_config={"enabled": True})}, "xlite"),
    ({"hf": {**HF, "index_topk": 1024}}, "index_topk"),
    ({"hf": {k: v for k, v in HF.items() if k != "index_topk"}}, "index_topk"),
    ({"transfer": {**DECODE, "extra": {}}}, "transfer_backend"),
    ({"transfer": {**DECODE, "extra": {"transfer_backend": "nixl"}}}, "does not work on npu"),
    (
        {"speculative": SimpleNamespace(num_speculative_tokens=1, method="eagle3")},
        "speculative_config.method",
    ),
    *(
        ({**change, "additional": change.get("additional", {}), "transfer": transfer}, named)
        for transfer in (PREFILL_STORE, JOINT)
        for change, named in (
            ({"eager": False, "mode": "PIECEWISE"}, "which a compiled graph has no place for"),
            ({"pp": 2}, "pipeline_parallel_size"),
            ({"pcp": 2}, "prefill_context_parallel_size"),
            ({"dcp": 2}, "decode_context_parallel_size"),
            ({"v2": True}, "VLLM_USE_V2_MODEL_RUNNER"),
            ({"scheduler": "their.own.Scheduler"}, "scheduler_cls"),
            ({"hybrid": True}, "hybrid KV cache"),
            ({"block_size": 64}, "block_size"),
            ({"additional": {"enable_dsa_cp": True}}, "enable_dsa_cp"),
            ({"additional": {"enable_sparse_sfa_c8": True}}, "enable_sparse_sfa_c8"),
            ({"additional": with_options()}, "kv_role=kv_producer"),
            ({"hf": {k: v for k, v in HF.items() if k != "index_topk"}}, "no sparse attention indexer"),
        )
    ),
    (
        {
            "additional": {}, "eager": False, "mode": "FULL",
            "transfer": {**PREFILL_STORE, "extra": WHOLE_CACHES},
        },
        "cudagraph_mode",
    ),
    (
        {"additional": {}, "transfer": {**PREFILL_STORE, "kv_connector": "MooncakeConnectorStoreV1"}},
        "name AscendStoreConnector",
    ),
    ({"additional": {}, "transfer": {**PREFILL_STORE, "kv_role": "kv_consumer"}}, "engines that prefill"),
    (
        {"additional": {}, "transfer": {**PREFILL_STORE, "extra": {**STORE, "backend": "memcache"}}},
        "PYTHONHASHSEED",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"), REFUSED, ids=[f"{n}-{named}" for n, (_, named) in enumerate(REFUSED)]
)
def test_refused_in_one_line(change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = engine(**change)
    with pytest.raises(ConfigError) as caught:
        checks.check_ascend(config)
    line = str(caught.value)
    assert named in line
    assert "Fix: " in line
    assert "\n" not in line


FULL = [{"eager": False, "mode": mode} for mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")]


@pytest.mark.parametrize("graphs", FULL)
@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"additional": with_options(delivery="compact", policy="rrip")}, 'delivery to "in_place"'),
        (
            {"additional": with_options(trace_path="/tmp/trace")},
            "leave sparse_kv_offload_config.trace_path out",
        ),
        ({"speculative": drafting("mtp")}, 'add "enforce_eager": true to --speculative-config'),
    ],
)
def test_full_graphs_are_refused_where_layers_need_the_host(
    graphs: dict[str, Any], change: dict[str, Any], fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNELS_ENV, "libkvoffload_ascend.so")
    with pytest.raises(ConfigError, match=r"cudagraph_mode.*full graph") as caught:
        checks.check_ascend(engine(**graphs, **change))
    assert fix in str(caught.value)
    assert '{"cudagraph_mode": "PIECEWISE"}' in str(caught.value)


@pytest.mark.parametrize("graphs", FULL)
def test_full_graphs_take_the_kernels(graphs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_ENV, "libkvoffload_ascend.so")
    checks.check_ascend(engine(**graphs))
    checks.check_ascend(engine(**graphs, speculative=drafting("mtp", True)))
    checks.check_ascend(engine(**graphs, speculative=drafting("ngram")))
    if graphs["mode"] == "FULL_AND_PIECEWISE":
        with pytest.raises(ConfigError, match="splitting_ops"):
            checks.check_ascend(engine(**graphs, splits=[]))
    monkeypatch.delenv(KERNELS_ENV)
    with pytest.raises(ConfigError, match="Fix: run kvoffload build-ops"):
        checks.check_ascend(engine(**graphs))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"transfer": None},
        {"eager": False, "mode": "PIECEWISE"},
        {"transfer": PREFILL, "additional": {}},
        {"transfer": PREFILL, "additional": {}, "eager": False, "mode": "FULL"},
        {"transfer": PREFILL_STORE, "additional": {}},
        {"transfer": JOINT, "additional": {}},
        {
            "transfer": {**PREFILL_STORE, "extra": WHOLE_CACHES},
            "additional": {},
            "eager": False,
            "mode": "PIECEWISE",
        },
        {"transfer": {**PREFILL_STORE, "extra": {"backend": "mooncake", "any": 1}}, "additional": {}},
        {"additional": beside(enable_sparse_li_c8=True)},
        {"speculative": drafting("mtp")},
    ],
    ids=str,
)
def test_accepted(change: dict[str, Any]) -> None:
    config = engine(**change)
    checks.check_ascend(config)


def test_compact_delivery_takes_kernels_and_their_own_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = engine(additional=with_options(delivery="compact"))
    monkeypatch.delenv(KERNELS_ENV, raising=False)
    with pytest.raises(ConfigError, match="kernels, which are not built"):
        checks.check_ascend(config)
    monkeypatch.setenv(KERNELS_ENV, str(tmp_path))
    checks.check_ascend(config)
    published = engine(additional=with_options(delivery="compact", policy="fifo"))
    with pytest.raises(ConfigError, match="as published"):
        checks.check_ascend(published)


def test_quantised_indexer_keys_are_a_layout_of_their_own() -> None:
    plain, quantised = engine(), engine(additional=beside(enable_sparse_li_c8=True))
    assert EngineSettings.of(plain, "npu").model.indexer_row_bytes == 256
    assert EngineSettings.of(quantised, "npu").model.indexer_row_bytes == 130
    assert [c.row_bytes for c in EngineSettings.of(plain, "npu").model.main_components] == [1024, 128]


@pytest.mark.parametrize("version", ["0.23.0", "0.23.0.post1", "0.23.1"])
def test_versions_that_work(version: str) -> None:
    assert symbols.version_problem(version) is None


@pytest.mark.parametrize(
    ("version", "side"), [("0.22.1rc1", "old"), ("0.18.0", "old"), ("0.24.0rc1", "new"), ("1.0.0", "new")]
)
def test_versions_that_do_not(version: str, side: str) -> None:
    problem = str(symbols.version_problem(version))
    assert f"too {side}" in problem
    assert "install vllm-ascend==0.23.0.post1" in problem
    assert ("uninstall vllm-kvoffload" in problem) == (side == "new")


def test_a_symbol_of_a_package_that_is_not_there_is_named() -> None:
    missing = symbols.Symbol("no_such_package.module", "Class.method", "a test")
    assert symbols.find_problem(missing).startswith("no_such_package.module can't be imported")
    assert (
        symbols.find_problem(symbols.Symbol("json", "loads_fast", "a test")) == "json.loads_fast is missing"
    )


def test_every_symbol_says_why() -> None:
    assert all(symbol.reason for symbol in symbols.SYMBOLS)
    assert len({symbol.path for symbol in symbols.SYMBOLS}) == len(symbols.SYMBOLS)


# -------------------------------------------------------------------------------------- whose connector it is

OURS = "vllm_kvoffload.connectors.ascend_store.connector"


def has_our_store(transfer: Any) -> bool:
    parts = connector_parts(transfer)
    return any(part.name == "AscendStoreConnector" and part.is_ours(registered=False) for part in parts)


@pytest.mark.parametrize(
    ("extra", "ours"),
    [
        (STORE, True),
        ({**STORE, "backend": "memcache"}, True),
        (WHOLE_CACHES, True),
        ({"backend": "Local"}, True),
        ({"backend": "memcache", "use_layerwise": True}, False),
        ({"backend": "mooncake"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_the_store_is_ours_where_only_ours_can_do_what_is_asked_for(
    extra: dict[str, Any], ours: bool
) -> None:
    alone = engine(transfer={**PREFILL_STORE, "extra": extra}).kv_transfer_config
    assert has_our_store(alone) == ours
    assert alone.kv_connector_module_path == (OURS if ours else None)
    part = {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    other = {"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}
    multi = engine(transfer={**JOINT, "extra": {"connectors": [other, part]}}).kv_transfer_config
    assert has_our_store(multi) == ours
    assert multi.kv_connector_module_path == ("vllm_kvoffload.connectors.multi" if ours else None)


def test_a_module_path_makes_the_store_ours() -> None:
    config = engine(transfer={**PREFILL_STORE, "extra": {"backend": "memcache"}})
    config.kv_transfer_config.kv_connector_module_path = OURS
    assert EngineSettings.of(config, "npu").store is not None
    config.kv_transfer_config.kv_connector_module_path = "elsewhere"
    assert EngineSettings.of(config, "npu").store is None


# ---------------------------------------------------------------------------------------------- cache entries

MAIN = "model.layers.3.self_attn.attn"
INDEXER = "model.layers.3.self_attn.indexer.k_cache"


def tensors(count: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((1,), n) for n in range(count))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_combined_and_split_entries_become_the_same(count: int) -> None:
    parts = tensors(count)
    combined = layer_caches({MAIN: parts})
    apart = {MAIN: parts[:2], **({INDEXER: parts[2:]} if count > 2 else {})}
    assert combined == layer_caches(apart) == {MAIN: LayerCache(parts[:2], parts[2:])}
    assert combined[MAIN].combined == parts
    assert connector_entries(combined) == apart


def combined_spec(width: int, quantised: bool = False) -> Any:
    """Of 0.23: one for a layer."""
    return SimpleNamespace(
        block_size=128, num_kv_heads=1, dtype=torch.bfloat16, sparse_head_dim=(512, 64, width),
        cache_sparse_li_c8=quantised, c8_k_cache_dtype=torch.int8, c8_k_scale_cache_dtype=torch.float16,
    )  # fmt: skip


def split_specs(quantised: bool = False) -> dict[str, Any]:
    """Of later releases: main KV and indexer apart."""
    dtype, scale = (torch.int8, 1) if quantised else (torch.bfloat16, 0)
    main = SimpleNamespace(block_size=128, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    indexer = SimpleNamespace(
        block_size=128, num_kv_heads=1, head_size=128, dtype=dtype, scale_dim=scale, scale_dtype=torch.float16
    )
    return {MAIN: main, INDEXER: indexer}


@pytest.mark.parametrize("quantised", [False, True])
def test_combined_and_split_specs_say_the_same(quantised: bool) -> None:
    expected = IndexerLayout(
        128, 1, 128, torch.int8 if quantised else torch.bfloat16, torch.float16 if quantised else None
    )
    for specs in ({MAIN: combined_spec(128, quantised)}, split_specs(quantised)):
        assert indexer_layouts(specs) == {MAIN: expected}
    shared = split_specs()
    del shared[INDEXER]
    assert indexer_layouts(shared) == indexer_layouts({MAIN: combined_spec(0)}) == {MAIN: None}
    with pytest.raises(ValueError, match=r"model\.layers\.3\.self_attn\.indexer"):
        indexer_layouts({INDEXER: split_specs()[INDEXER]})


def test_attention_finds_entries_of_the_form_that_its_specs_have() -> None:
    parts = tensors(3)
    caches = {MAIN: LayerCache(parts[:2], parts[2:])}
    assert bound_entries(caches, {MAIN: combined_spec(128)}) == {MAIN: parts}
    assert bound_entries(caches, split_specs()) == {MAIN: parts[:2], INDEXER: parts[2:]}


@pytest.mark.parametrize(
    "entries",
    [{MAIN: tensors(1)}, {MAIN: tensors(5)}, {INDEXER: tensors(1)}, {MAIN: tensors(3), INDEXER: tensors(1)}],
    ids=["one tensor", "five", "indexer alone", "indexer twice"],
)
def test_other_entries_are_refused(entries: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.layers\.3"):
        layer_caches(entries)
