"""Run inside the Ascend environment by test_ascend.py: our subclasses against the released vllm-ascend."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_ascend.worker.worker  # the only order in which upstream's modules can be imported
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.platforms import current_platform
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec
from vllm_ascend.distributed.kv_transfer import register_connector
from vllm_ascend.platform import NPUPlatform

from vllm_kvoffload import plugin
from vllm_kvoffload.connectors.ascend_store.connector import AscendStoreConnector
from vllm_kvoffload.connectors.multi import KVOffloadMultiConnector
from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.platforms.ascend import (
    attention,
    hooks,
    prefill_attention,
    runner,
    symbols,
    worker,
)
from vllm_kvoffload.platforms.ascend.connectors import name_modules
from vllm_kvoffload.platforms.ascend.platform import (
    PREFILL_BACKEND,
    SPARSE_BACKEND,
    WORKER,
    KVOffloadNPUPlatform,
    name_indexers,
)
from vllm_kvoffload.platforms.refusal import StartupRefusedError
from vllm_kvoffload.settings.store import SCHEDULER

SFA_SYMBOLS = [
    s for s in symbols.SYMBOLS if s.module == symbols._SFA and s.parameters is not None and "." in s.name
]


@pytest.mark.parametrize("symbol", symbols.SYMBOLS, ids=lambda s: s.path)
def test_symbol(symbol: symbols.Symbol) -> None:
    assert symbols.find_problem(symbol) == ""


def copied_sfa(source: str) -> str:
    """The name of a module made of changed source of upstream's attention."""
    name = "copied_sfa_v1"
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, name, "exec"), module.__dict__)
    return name


def sfa_source() -> str:
    return Path(sys.modules[symbols._SFA].__file__).read_text()


@pytest.mark.parametrize("symbol", SFA_SYMBOLS, ids=lambda s: s.name)
def test_a_renamed_symbol_is_named(symbol: symbols.Symbol) -> None:
    kind, method = symbol.name.split(".")
    head, tail = sfa_source().split(f"class {kind}(", 1)
    changed, count = re.subn(rf"def {method}\(", f"def {method}_renamed(", tail, count=1)
    assert count == 1
    moved = replace(symbol, module=copied_sfa(f"{head}class {kind}({changed}"))
    found = symbols.find_problem(moved)
    assert found == f"{moved.path} is missing"


def test_a_new_required_parameter_and_a_lost_field_are_named() -> None:
    symbol = next(s for s in SFA_SYMBOLS if s.name == "AscendSFAImpl.rope_single")
    source = sfa_source().replace("def rope_single(\n        self,", "def rope_single(\n        self, fresh,")
    found = symbols.find_problem(replace(symbol, module=copied_sfa(source)))
    assert "rope_single(fresh, x, cos, sin): fresh is new and required" in found
    metadata = next(s for s in symbols.SYMBOLS if s.name == "AscendSFAMetadata")
    source = sfa_source().replace("    cum_query_lens: torch.Tensor\n", "    query_ends: torch.Tensor\n")
    assert "no cum_query_lens" in symbols.find_problem(replace(metadata, module=copied_sfa(source)))


def test_a_problem_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm_ascend.worker.worker.NPUWorker, "get_kv_cache_spec")
    with pytest.raises(StartupRefusedError, match=r"NPUWorker\.get_kv_cache_spec.*install vllm-ascend=="):
        symbols.check_symbols("worker")


def test_the_installed_release_is_the_supported_one() -> None:
    assert symbols._installed() == symbols.RELEASE
    assert symbols.version_problem() is None


def upstream_base(kind: type) -> type:
    """The class that one of ours extends."""
    return next(base for base in kind.__mro__ if base.__module__.startswith("vllm_ascend."))


def own_names(kind: type) -> set[str]:
    """What our class and our other bases define."""
    ours = (base for base in kind.__mro__ if base.__module__.startswith("vllm_kvoffload."))
    return {name for base in ours for name in vars(base) if name != "__init__" or base is kind}


@pytest.mark.parametrize(
    "kind",
    [attention.KVOffloadSFAImpl, attention.KVOffloadSFAMetadataBuilder, attention.KVOffloadSFABackend,
     prefill_attention.SharedBufferSFAImpl, prefill_attention.SharedBufferSFABackend,
     runner.KVOffloadNPUModelRunner, worker.KVOffloadNPUWorker, KVOffloadNPUPlatform],
)  # fmt: skip
def test_overrides_can_be_called_as_what_they_override(kind: type) -> None:
    base = upstream_base(kind)
    overrides = [n for n in own_names(kind) if inspect.isroutine(getattr(kind, n)) and hasattr(base, n)]
    assert overrides
    for name in overrides:
        ours, theirs = (inspect.signature(getattr(k, name)).parameters for k in (kind, base))
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in ours.values()):
            continue
        assert list(ours)[: len(theirs)] == [n for n in theirs if n != "kwargs"], name


def test_every_override_of_a_private_name_stands_in_the_table() -> None:
    listed = {s.name for s in symbols.SYMBOLS}
    kinds = (
        attention.KVOffloadSFAImpl,
        prefill_attention.SharedBufferSFAImpl,
        runner.KVOffloadNPUModelRunner,
        worker.KVOffloadNPUWorker,
    )
    for kind in kinds:
        base = upstream_base(kind)
        for name in own_names(kind):
            if inspect.isfunction(getattr(kind, name)) and hasattr(base, name) and name != "shutdown":
                assert f"{base.__name__}.{name}" in listed, name


# ------------------------------------------------------------------------------------------- registration


STORE: dict[str, Any] = {
    "kv_connector": "AscendStoreConnector",
    "kv_connector_extra_config": {
        "backend": "local",
        "use_layerwise": True,
        "layerwise_num_shared_buffers": 3,
    },
}
REMOTE = {
    "kv_connector": "SfaRemoteD2HConnector", "kv_role": "kv_producer",
    "kv_connector_extra_config": {"transfer_backend": "memfabric"},
}  # fmt: skip


def register_connector_once() -> None:
    if "MooncakeConnectorV1" not in KVConnectorFactory._registry:
        register_connector()


def connector_class(**options: Any) -> type:
    config = KVTransferConfig(kv_role="kv_producer", **options)
    name_modules(config)
    return KVConnectorFactory.get_connector_class(config)


@pytest.mark.parametrize("order", list(itertools.permutations(("ours", "theirs"))), ids="-".join)
def test_names_are_ours_in_any_order_of_plugins(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = {
        name: loader
        for name, loader in KVConnectorFactory._registry.items()
        if "ascend" not in name.lower() and "Mooncake" not in name and name not in ("UCMConnector",)
    }
    upstream.pop("RecomputeCPUOffloadConnector", None)
    monkeypatch.setattr(KVConnectorFactory, "_registry", upstream)
    for plugin_of in order:
        {"ours": plugin.register_general, "theirs": register_connector}[plugin_of]()
    assert "AscendStoreConnector" in KVConnectorFactory._registry  # upstream's own went through
    found = connector_class(kv_connector="SfaRemoteD2HConnector")
    assert found.__module__ == "vllm_kvoffload.connectors.sfa_remote_d2h.connector"
    assert connector_class(**STORE) is AscendStoreConnector
    joint = {"connectors": [{**STORE, "kv_role": "kv_producer"}, REMOTE]}
    for name in ("MultiConnector", "KVOffloadMultiConnector"):
        assert connector_class(kv_connector=name, kv_connector_extra_config=joint) is KVOffloadMultiConnector


def test_upstream_keeps_its_store_where_nothing_of_ours_is_asked_for() -> None:
    register_connector_once()
    options = {"backend": "memcache", "use_layerwise": True}
    found = connector_class(kv_connector="AscendStoreConnector", kv_connector_extra_config=options)
    assert found.__module__.startswith("vllm_ascend.")


def test_names_are_there_before_vllm_looks_for_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does early in engines with graphs, at which ours are not registered."""
    monkeypatch.setattr(NPUPlatform, "apply_config_platform_defaults", lambda _: None)
    config = KVTransferConfig(kv_role="kv_producer", **STORE)
    KVOffloadNPUPlatform.apply_config_platform_defaults(SimpleNamespace(kv_transfer_config=config))
    assert KVConnectorFactory.get_connector_class(config) is AscendStoreConnector
    source = inspect.getsource(VllmConfig.__post_init__)
    first = source.index("apply_config_platform_defaults")
    assert first < source.index("get_connector_class") < source.index("check_and_update_config")


def test_a_module_path_of_the_user_stays_and_parts_of_a_multi_connector_get_theirs() -> None:
    inner = [{"kv_connector": "SfaRemoteD2HConnector"}, {"kv_connector": "Other"}]
    config = KVTransferConfig(
        kv_connector="SfaRemoteD2HConnector", kv_connector_module_path="mine", kv_role="kv_producer",
        kv_connector_extra_config={"connectors": inner},
    )  # fmt: skip
    name_modules(config)
    assert config.kv_connector_module_path == "mine"
    assert inner[0]["kv_connector_module_path"].startswith("vllm_kvoffload.")
    assert "kv_connector_module_path" not in inner[1]


# ------------------------------------------------------------------------------------------------ platform


def test_the_platform_is_adopted_once_for_all_who_hold_it() -> None:
    plugin.register_general()
    plugin.register_general()
    assert type(current_platform) is KVOffloadNPUPlatform
    assert isinstance(current_platform, NPUPlatform)
    assert hooks.is_npu_platform(current_platform)
    assert not hooks.is_npu_platform(SimpleNamespace())


def test_an_unknown_release_keeps_its_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbols, "_installed", lambda: "0.30.0rc2")
    platform, seen = NPUPlatform(), []
    monkeypatch.setattr(NPUPlatform, "apply_config_platform_defaults", seen.append)
    hooks.adopt_platform(platform)
    assert type(platform) is NPUPlatform
    store = KVTransferConfig(
        kv_role="kv_both",
        kv_connector="AscendStoreConnector",
        kv_connector_extra_config={"backend": "memcache"},
    )
    plain = SimpleNamespace(additional_config={"enable_dsa_cp": True}, kv_transfer_config=store)
    platform.apply_config_platform_defaults(plain)
    assert seen == [plain]
    asking = SimpleNamespace(
        additional_config={"sparse_kv_offload_config": {"enabled": True}}, kv_transfer_config=None
    )
    with pytest.raises(StartupRefusedError, match=r"vllm-ascend='0\.30\.0rc2': .*too new"):
        platform.apply_config_platform_defaults(asking)
    assert seen == [plain]


def test_indexers_of_shared_layers_are_not_built(tmp_path: Path) -> None:
    """With the two keys that our platform writes; a checkpoint names one of them, or neither."""
    from vllm_ascend.patch.worker.patch_deepseek_v2 import _should_skip_indexer_init

    names = {f"model.layers.{n}.self_attn.indexer.wk.weight": "a" for n in (0, 2, 4)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    base = {
        "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 2048,
        "index_head_dim": 128, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    for spelling in (
        {"indexer_types": ["full", "shared", "full", "shared"]},
        {"index_topk_pattern": "FSFS"},
        {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    ):
        config = SimpleNamespace(**base, **spelling)
        geometry = KVGeometry.from_hf_config(config, layout="ascend", num_speculative_tokens=1)
        name_indexers(SimpleNamespace(model=str(tmp_path), hf_text_config=config), geometry)
        skipped = [
            _should_skip_indexer_init(config, f"model.layers.{layer}.self_attn", kind == "S")
            for layer, kind in enumerate(config.index_topk_pattern + "S")
        ]
        assert skipped == [False, True, False, True, False]  # the last one is the MTP layer's


@pytest.mark.parametrize(
    ("enabled", "transfer", "expected"),
    [
        (True, None, SPARSE_BACKEND),
        (False, STORE, PREFILL_BACKEND),
        (False, None, "vllm_ascend.attention.sfa_v1.AscendSFABackend"),
    ],
)
def test_the_backend_is_ours_where_it_has_to_be(
    enabled: bool, transfer: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sparse_kv_offload_config": {"enabled": enabled}}
    given = KVTransferConfig(kv_role="kv_producer", **transfer) if transfer else None
    name_modules(given)
    config = SimpleNamespace(additional_config=options, kv_transfer_config=given)
    module = "vllm_kvoffload.platforms.ascend.platform.get_current_vllm_config_or_none"
    monkeypatch.setattr(module, lambda: config)
    wanted = SimpleNamespace(use_mla=True, use_sparse=True, use_compress=False)
    assert KVOffloadNPUPlatform.get_attn_backend_cls(None, wanted) == expected


def test_paths_lead_to_our_classes() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(WORKER) is worker.KVOffloadNPUWorker
    backend = resolve_obj_by_qualname(SPARSE_BACKEND)
    assert backend.get_impl_cls() is attention.KVOffloadSFAImpl
    assert backend.get_builder_cls() is attention.KVOffloadSFAMetadataBuilder
    backend = resolve_obj_by_qualname(PREFILL_BACKEND)
    assert backend.get_impl_cls() is prefill_attention.SharedBufferSFAImpl


def test_init_device_makes_our_runner_and_the_name_is_put_back() -> None:
    module = vllm_ascend.worker.worker
    original = module.NPUModelRunner
    with hooks.runner_class(runner.KVOffloadNPUModelRunner):
        assert module.NPUModelRunner is runner.KVOffloadNPUModelRunner
    assert module.NPUModelRunner is original
    assert "NPUModelRunner(self.vllm_config, self.device)" in inspect.getsource(module.NPUWorker.init_device)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_scheduler_drops_a_first_step_over_lost_blocks(recompute: bool) -> None:
    from vllm.config import SchedulerConfig

    config = SchedulerConfig.default_factory(scheduler_cls=SCHEDULER)
    scheduler: Any = object.__new__(config.get_scheduler_cls())
    blocks = {"first": [1, 2], "later": [3, 4, 5], "other": [6, 7]}
    computed = {"first": 200, "later": 300, "other": 250}
    evicted: set[int] = set()
    scheduler.running = [SimpleNamespace(request_id=n, num_computed_tokens=c) for n, c in computed.items()]
    scheduler.skipped_waiting, scheduler.failed_recving_kv_req_ids = [], set()
    scheduler.block_size, scheduler.recompute_kv_load_failures = 128, recompute
    scheduler.kv_cache_manager = SimpleNamespace(
        get_block_ids=lambda name: (blocks[name],), evict_blocks=evicted.update
    )
    lost = scheduler._handle_invalid_blocks({2, 4}, {"first": 200, "later": 44, "other": 100})
    assert lost == {"first", "later"}
    after = {request.request_id: request.num_computed_tokens for request in scheduler.running}
    assert after == {"first": 0 if recompute else 200, "later": 128, "other": 250}
    assert evicted == {2, 4, 5}  # lost blocks, and blocks computed from them


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("quantised", [False, True])
def test_page_sizes_are_what_the_geometry_says(quantised: bool) -> None:
    config = {
        "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"], "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "index_topk": 2048, "index_head_dim": 128, "dtype": "bfloat16",
    }  # fmt: skip
    layout = "int8" if quantised else "model"
    geometry = KVGeometry.from_hf_config(config, layout="ascend", indexer_layout=layout)
    pages = 0
    for kind in geometry.indexer_types:
        dims = (512, 64, 128 if kind == "full" else 0)
        spec = AscendMLAAttentionSpec(
            block_size=128, num_kv_heads=1, head_size=sum(dims), sparse_head_dim=dims, dtype=torch.bfloat16,
            cache_sparse_li_c8=quantised and kind == "full",
        )  # fmt: skip
        pages += spec.page_size_bytes
    assert pages == geometry.bytes_per_token * 128


def test_the_stat_logger_is_one_of_this_vllm() -> None:
    from vllm.v1.metrics.loggers import StatLoggerBase

    from vllm_kvoffload.metrics.stat_logger import OffloadStatLogger

    assert issubclass(OffloadStatLogger, StatLoggerBase)
    assert not inspect.isabstract(OffloadStatLogger)
    assert StatLoggerBase.__abstractmethods__
