"""What each kind of engine refuses at start-up on Ascend: one table, every cell tried.

A cell holds what the refusal names, "-" where the engine starts. Options are those that the page on Ascend
lists as refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.ascend.test_checks import (
    DECODE,
    HF,
    JOINT,
    PREFILL,
    PREFILL_STORE,
    WHOLE_CACHES,
    beside,
    drafting,
    engine,
    with_options,
)
from vllm_kvoffload.platforms.ascend import checks
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV
from vllm_kvoffload.settings.errors import ConfigError

ENGINES: dict[str, dict[str, Any]] = {
    "aggregated": {"transfer": None},
    "decode": {"transfer": DECODE},
    "prefill": {"transfer": PREFILL, "additional": {}},
    "store": {"transfer": PREFILL_STORE, "additional": {}},
    "whole caches": {"transfer": {**PREFILL_STORE, "extra": WHOLE_CACHES}, "additional": {}},
    "joint": {"transfer": JOINT, "additional": {}},
    "neither": {"transfer": None, "additional": {}},
}
PIECEWISE = {"eager": False, "mode": "PIECEWISE"}
FULL = {"eager": False, "mode": "FULL_DECODE_ONLY"}

# (option, the change, what is named for each engine in the order above)
TABLE: list[tuple[str, dict[str, Any], str]] = [
    ("nothing", {}, "- - - - - - -"),
    ("pipeline parallelism", {"pp": 2}, "pipeline_parallel_size " * 6 + "-"),
    ("prefill context parallelism", {"pcp": 2}, "prefill_context_parallel_size " * 6 + "-"),
    ("decode context parallelism", {"dcp": 2}, "decode_context_parallel_size " * 6 + "-"),
    ("DSA-CP", {"more": {"enable_dsa_cp": True}}, "enable_dsa_cp " * 6 + "-"),
    ("DBO", {"dbo": True}, "enable_dbo " * 6 + "-"),
    ("Model Runner V2", {"v2": True}, "V2 V2 - V2 V2 V2 -"),
    ("piecewise graphs", PIECEWISE, "- - - enforce_eager - enforce_eager -"),
    ("piecewise graphs with attention", {**PIECEWISE, "splits": []},
     "splitting_ops splitting_ops - enforce_eager splitting_ops enforce_eager -"),
    ("full graphs", FULL, "cudagraph_mode cudagraph_mode - enforce_eager cudagraph_mode enforce_eager -"),
    ("C8 main cache", {"more": {"enable_sparse_sfa_c8": True}},
     "enable_sparse_sfa_c8 enable_sparse_sfa_c8 - enable_sparse_sfa_c8 - enable_sparse_sfa_c8 -"),
    ("C8 indexer", {"more": {"enable_sparse_li_c8": True}}, "- - - - - - -"),
    ("hybrid cache", {"hybrid": True}, "hybrid hybrid - hybrid - hybrid -"),
    ("block size 64", {"block_size": 64}, "block_size block_size - block_size - block_size -"),
    ("a scheduler", {"scheduler": "a.Scheduler"}, "- - - scheduler_cls scheduler_cls scheduler_cls -"),
    ("index_topk 1024", {"hf": {**HF, "index_topk": 1024}}, "index_topk index_topk - - - - -"),
    ("no indexer", {"hf": {k: v for k, v in HF.items() if k != "index_topk"}},
     "index_topk index_topk indexer indexer indexer indexer -"),
    ("compressed caches", {"hf": {**HF, "compress_ratios": [4]}}, "compress_ratios " * 7),
    ("MTP", {"speculative": drafting("mtp")}, "- - - - - - -"),
    ("eagle3", {"speculative": drafting("eagle3")},
     "speculative_config.method speculative_config.method - - - - -"),
    ("xlite", {"more": {"xlite_graph_config": {"enabled": True}}}, "xlite xlite - - - - -"),
    ("compact delivery", {"options": {"delivery": "compact"}}, "delivery delivery - - - - -"),
    ("two sets per id", {"options": {"placement": "two_sets"}}, "placement placement - - - - -"),
    ("device cache kept", {"options": {"keep_device_kv_cache": True}},
     "keep_device_kv_cache keep_device_kv_cache - - - - -"),
]  # fmt: skip


def cells() -> list[Any]:
    found = []
    for option, change, names in TABLE:
        for kind, named in zip(ENGINES, names.split(), strict=True):
            found.append(pytest.param(kind, change, named, id=f"{option}-{kind}"))
    return found


def configuration(kind: str, change: dict[str, Any]) -> SimpleNamespace:
    given = {**ENGINES[kind], **change}
    more, options = given.pop("more", {}), given.pop("options", {})
    offloads = "additional" not in given
    given["additional"] = {**(with_options(**options) if offloads else {}), **more}
    return engine(**given)


@pytest.mark.parametrize(("kind", "change", "named"), cells())
def test_cell(kind: str, change: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KERNELS_ENV, raising=False)
    config = configuration(kind, change)
    if named == "-":
        checks.check_ascend(config)
        return
    with pytest.raises(ConfigError) as caught:
        checks.check_ascend(config)
    line = str(caught.value)
    assert named in line
    assert ". Fix: " in line
    assert "\n" not in line


def test_other_keys_of_additional_config_are_not_ours() -> None:
    checks.check_ascend(engine(additional=beside(weight_prefetch_config={"enabled": True})))
