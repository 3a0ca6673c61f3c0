from types import SimpleNamespace

import pytest

from tests.unit.model_configs import deepseek_v3_2, glm_5_3
from vllm_kvoffload.geometry import Component, GeometryError, IndexGroup, KVGeometry, resolve_indexer_types
from vllm_kvoffload.settings.errors import ConfigError

FULL_5_3 = (0, 1, 2, *range(6, 78, 4))
MILLION = 10**6
MIB_TOKENS = 1 << 20


def pattern(**config):
    config = {"num_hidden_layers": 8, **config}
    return "".join("F" if kind == "full" else "S" for kind in resolve_indexer_types(config)[0])


# -------------------------------------------------------------------------------------------- IndexShare rule


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "FFFFFFFF"),
        ({"index_topk_freq": None}, "FFFFFFFF"),
        ({"index_topk_freq": 0}, "FFFFFFFF"),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 5}, "FFFFFFFF"),
        # offset is 2 when absent: vLLM's default, one layer less than GLM's explicit 3
        ({"index_topk_freq": 4}, "FFSSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": None}, "FFSSSFSS"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, "FFFSSSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSFSFSFS"),
        ({"index_topk_pattern": "FSSFSSSS"}, "FSSFSSSS"),
        ({"index_topk_pattern": list("FSSFSSSF")}, "FSSFSSSF"),
        ({"index_topk_pattern": "FSSFSSSF", "index_topk_freq": 2}, "FSSFSSSF"),
        ({"indexer_types": ["full"] + ["shared"] * 7, "index_topk_pattern": "FFFFFFFF"}, "FSSSSSSS"),
        # entries for MTP layers, after the target's
        ({"indexer_types": ["full"] * 8 + ["shared"]}, "FFFFFFFF"),
        ({"index_topk_pattern": "FSFSFSFSF"}, "FSFSFSFS"),
    ],
)
def test_index_share_rule(config, expected):
    assert pattern(**config) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"indexer_types": ["shared"] + ["full"] * 7}, ["indexer_types", "layer 0 is shared", "Fix: "]),
        ({"index_topk_pattern": "SFFFFFFF"}, ["index_topk_pattern", "layer 0 is shared"]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["index_skip_topk_offset 0", "layer 0"]),
        ({"indexer_types": ["full", "half"] + ["full"] * 6}, ["indexer_types[1]='half'", "full", "shared"]),
        ({"index_topk_pattern": "FFXFFFFF"}, ["index_topk_pattern[2]='X'"]),
        ({"indexer_types": ["full", None] + ["full"] * 6}, ["indexer_types[1]=None"]),
        ({"indexer_types": ["full"] * 7}, ["indexer_types", "7 entries for 8 layers"]),
        ({"indexer_types": []}, ["0 entries for 8 layers"]),
        ({"index_topk_pattern": "FSS"}, ["index_topk_pattern='FSS'", "3 entries for 8 layers"]),
        ({"index_topk_pattern": 4}, ["index_topk_pattern=4", "list or a string"]),
        ({"index_topk_freq": -4}, ["index_topk_freq=-4", "at least 1"]),
        ({"index_topk_freq": "4"}, ["index_topk_freq='4'", "integer"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers=None"]),
    ],
)
def test_index_share_errors(config, words):
    with pytest.raises(GeometryError) as caught:
        pattern(**config)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("drop", [(), ("indexer_types",)])
def test_glm_rules_agree(drop):
    config = {key: value for key, value in glm_5_3().items() if key not in drop}
    geometry = KVGeometry.from_hf_config(config)
    assert geometry.indexer_layers == FULL_5_3
    assert geometry.indexer_types.count("full") == 21
    assert geometry.indexer_types.count("shared") == 57
    assert geometry.index_topk_pattern[:14] == "FFFSSSFSSSFSSS"


def test_glm_without_offset_differs():
    """The trap: dropping the offset moves the boundary by a layer, and nothing else would notice."""
    geometry = KVGeometry.from_hf_config(glm_5_3(indexer_types=None, index_skip_topk_offset=None))
    assert geometry.index_topk_pattern[:7] == "FFSSSFS"


# --------------------------------------------------------------------------------------------- layers, groups


def test_glm_groups():
    geometry = KVGeometry.from_hf_config(glm_5_3())
    assert len(geometry.groups) == 21
    assert geometry.groups[:4] == (
        IndexGroup(0, 0, (0,), False),
        IndexGroup(1, 1, (1,), False),
        IndexGroup(2, 2, (2, 3, 4, 5), False),
        IndexGroup(3, 6, (6, 7, 8, 9), False),
    )
    assert geometry.groups[-1] == IndexGroup(20, 74, (74, 75, 76, 77), False)
    assert geometry.groups[2].followers == (3, 4, 5)
    assert [layer for group in geometry.groups for layer in group.layers] == list(range(78))


def test_deepseek_every_layer_is_its_own_group():
    geometry = KVGeometry.from_hf_config(deepseek_v3_2())
    assert geometry.num_layers == 61
    assert geometry.groups == tuple(IndexGroup(i, i, (i,), False) for i in range(61))
    assert geometry.indexer_layers == tuple(range(61))


def test_mtp_layers_come_with_drafts_only():
    assert KVGeometry.from_hf_config(glm_5_3()).num_mtp_layers == 0
    assert KVGeometry.from_hf_config(glm_5_3(), num_speculative_tokens=3, mtp=False).num_mtp_layers == 0
    geometry = KVGeometry.from_hf_config(glm_5_3(), num_speculative_tokens=3)
    assert geometry.num_speculative_tokens == 3
    assert geometry.num_target_layers == 78
    assert geometry.num_layers == 79
    assert list(geometry.mtp_layers) == [78]
    assert geometry.groups[-1] == IndexGroup(21, 78, (78,), True)
    assert geometry.indexer_layers == (*FULL_5_3, 78)
    assert geometry.indexer_index(78) == 21


@pytest.mark.parametrize(
    ("share", "groups"),
    [(False, [(78,), (79,), (80,)]), (True, [(78, 79, 80)]), (None, [(78,), (79,), (80,)])],
)
def test_mtp_groups_and_index_sharing_over_drafts(share, groups):
    config = glm_5_3(num_nextn_predict_layers=3, index_share_for_mtp_iteration=share)
    geometry = KVGeometry.from_hf_config(config, num_speculative_tokens=3)
    assert [group.layers for group in geometry.groups if group.is_mtp] == groups
    assert geometry.indexer_layers[-3:] == (78, 79, 80)  # each keeps its cache, shared or not
    assert geometry.group_of(79).owner == groups[-1 if share else 1][0]


def test_drafts_without_mtp_layers():
    with pytest.raises(GeometryError, match=r"num_nextn_predict_layers=0.*num_speculative_tokens is 2"):
        KVGeometry.from_hf_config(glm_5_3(num_nextn_predict_layers=0), num_speculative_tokens=2)


def test_layer_conversions():
    geometry = KVGeometry.from_hf_config(glm_5_3(), num_speculative_tokens=1)
    for layer in range(79):
        assert geometry.main_layer(geometry.main_index(layer)) == layer
        group = geometry.group_of(layer)
        assert layer in group.layers
        assert geometry.groups[group.index] == group
        assert geometry.is_owner(layer) == geometry.has_indexer_cache(layer) == (layer in (*FULL_5_3, 78))
    for index, layer in enumerate(geometry.indexer_layers):
        assert geometry.indexer_index(layer) == index
        assert geometry.indexer_layer(index) == layer


@pytest.mark.parametrize("layer", [-1, 78])
@pytest.mark.parametrize(
    "method", ["main_index", "main_layer", "indexer_index", "group_of", "has_indexer_cache"]
)
def test_conversions_refuse_foreign_layers(method, layer):
    with pytest.raises(IndexError, match="not one of the 78 layers"):
        getattr(KVGeometry.from_hf_config(glm_5_3()), method)(layer)


def test_shared_layers_have_no_indexer_cache():
    geometry = KVGeometry.from_hf_config(glm_5_3())
    with pytest.raises(IndexError, match="layer 5 reuses layer 2's top-k indices"):
        geometry.indexer_index(5)
    with pytest.raises(IndexError, match="21 indexer caches"):
        geometry.indexer_layer(21)


# ------------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize(
    ("options", "main", "indexer"),
    [
        ({"layout": "cpu"}, [("kv", 1152)], [("key", 256)]),
        ({"layout": "cpu", "dtype": "float16"}, [("kv", 1152)], [("key", 256)]),
        ({"layout": "cpu", "dtype": "torch.float32"}, [("kv", 2304)], [("key", 512)]),
        ({"layout": "cpu", "indexer_layout": "float32"}, [("kv", 1152)], [("key", 512)]),
        ({"layout": "ascend"}, [("nope", 1024), ("rope", 128)], [("key", 256)]),
        (
            {"layout": "ascend", "indexer_layout": "int8"},
            [("nope", 1024), ("rope", 128)],
            [("key", 128), ("scale", 2)],
        ),
        ({"layout": "fp8"}, [("kv", 656)], [("key", 132)]),
        ({"layout": "fp8", "indexer_layout": "mxfp4"}, [("kv", 656)], [("key", 68)]),
        # only the rope part follows the dtype, and it is always in 16 bits here
        ({"layout": "fp8", "dtype": "float32"}, [("kv", 656)], [("key", 132)]),
    ],
)
def test_components(options, main, indexer):
    geometry = KVGeometry.from_hf_config(glm_5_3(), **options)
    assert geometry.main_components == tuple(Component(*c) for c in main)
    assert geometry.indexer_components == tuple(Component(*c) for c in indexer)
    assert geometry.main_row_bytes == sum(size for _, size in main)
    assert geometry.indexer_row_bytes == sum(size for _, size in indexer)


def test_dtype_comes_from_the_config():
    assert KVGeometry.from_hf_config(glm_5_3(dtype="float32")).main_row_bytes == 2304
    assert KVGeometry.from_hf_config(deepseek_v3_2(torch_dtype="float32")).main_row_bytes == 2304
    assert KVGeometry.from_hf_config(glm_5_3(dtype="float32"), dtype="bfloat16").main_row_bytes == 1152
    assert KVGeometry.from_hf_config(glm_5_3(dtype=None)).main_row_bytes == 1152


def test_glm_published_figures():
    """Published for GLM-5.3 in the FP8 layout."""
    geometry = KVGeometry.from_hf_config(glm_5_3(), layout="fp8")
    assert geometry.main_row_bytes == 512 + 4 * 4 + 64 * 2 == 656
    assert geometry.main_bytes_per_token == 51168  # "about 50 KB"
    assert geometry.indexer_bytes_per_token == 21 * 132 == 2772
    assert geometry.indexer_read_bytes(1) == 2772
    assert geometry.indexer_row_bytes * 10**5 == pytest.approx(13.2e6)
    assert geometry.indexer_read_bytes(10**5) == pytest.approx(277e6, rel=0.002)
    assert geometry.indexer_row_bytes * MILLION == pytest.approx(132e6)
    assert geometry.indexer_read_bytes(MILLION) == pytest.approx(2.77e9, rel=0.002)
    main, indexer = geometry.transfer_bytes(MIB_TOKENS)
    assert main == pytest.approx(53.7e9, rel=0.001)
    assert indexer == pytest.approx(2.9e9, rel=0.005)
    assert indexer / main == pytest.approx(0.05, abs=0.005)


def test_logits_buffer_figures():
    size = KVGeometry.logits_buffer_bytes
    assert size(1, 100) == size(1, 256) == 1024
    assert size(1, 257) == size(1, 512) == 2048
    assert size(1, 2048) == 8192
    assert size(32, 10**5) == pytest.approx(12.8e6, rel=0.01)
    assert size(32, MILLION) == pytest.approx(128e6, rel=0.01)
    assert size(0, 100) == size(1, 0) == 0


def test_draft_steps_are_not_in_the_target_read():
    geometry = KVGeometry.from_hf_config(glm_5_3(), layout="fp8", num_speculative_tokens=3)
    assert geometry.indexer_read_bytes(1) == 2772
    assert geometry.indexer_bytes_per_token == 22 * 132
    assert geometry.main_bytes_per_token == 79 * 656


@pytest.mark.parametrize(
    ("config", "options", "ratio"),
    [
        # host bytes per device byte, as Ascend's published examples have them
        (deepseek_v3_2(), {"layout": "ascend"}, 4.5),
        (
            glm_5_3(num_hidden_layers=8, indexer_types=["full", *["shared"] * 3] * 2),
            {"layout": "ascend"},
            18,
        ),
        (
            glm_5_3(num_hidden_layers=8, indexer_types=["full", *["shared"] * 3] * 2),
            {"layout": "ascend", "indexer_layout": "int8"},
            35.446,
        ),
    ],
)
def test_host_to_device_ratio(config, options, ratio):
    geometry = KVGeometry.from_hf_config(config, **options)
    assert geometry.main_bytes_per_token / geometry.indexer_bytes_per_token == pytest.approx(ratio, abs=0.001)
    assert geometry.offload_factor == pytest.approx(1 + ratio, abs=0.001)
    assert geometry.bytes_per_token == geometry.main_bytes_per_token + geometry.indexer_bytes_per_token


# --------------------------------------------------------------------------------------- configs of all kinds


def test_config_may_be_an_object_or_nested():
    expected = KVGeometry.from_hf_config(glm_5_3())
    assert KVGeometry.from_hf_config(SimpleNamespace(**glm_5_3())) == expected
    assert KVGeometry.from_hf_config({"model_type": "outer", "text_config": glm_5_3()}) == expected
    assert KVGeometry.from_hf_config(SimpleNamespace(text_config=SimpleNamespace(**glm_5_3()))) == expected


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (
            {"model_type": "llama", "num_hidden_layers": 32},
            {},
            ["index_topk=None", "no sparse attention indexer"],
        ),
        (glm_5_3(index_topk=True), {}, ["index_topk=True", "integer"]),
        (glm_5_3(kv_lora_rank=None), {}, ["kv_lora_rank=None", "MLA"]),
        (glm_5_3(compress_ratios=[1, 4]), {}, ["compress_ratios", "not supported"]),
        (glm_5_3(index_kpool=2), {}, ["index_kpool=2", "not supported"]),
        (glm_5_3(), {"layout": "cuda"}, ["layout='cuda'", "cpu, ascend, fp8"]),
        (glm_5_3(), {"indexer_layout": "int4"}, ["indexer_layout='int4'", "mxfp4"]),
        (glm_5_3(), {"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        (glm_5_3(kv_lora_rank=96), {"layout": "fp8"}, ["kv_lora_rank=96", "multiple of 128"]),
        (glm_5_3(index_head_dim=96), {"indexer_layout": "fp8"}, ["index_head_dim=96", "multiple of 128"]),
        (glm_5_3(index_head_dim=80), {"indexer_layout": "mxfp4"}, ["index_head_dim=80", "multiple of 32"]),
    ],
)
def test_errors_are_typed_and_say_what_is_wrong(config, options, words):
    with pytest.raises(GeometryError) as caught:
        KVGeometry.from_hf_config(config, **options)
    assert isinstance(caught.value, ConfigError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_describe_is_one_line_with_the_resolved_list():
    line = KVGeometry.from_hf_config(glm_5_3(), layout="ascend", num_speculative_tokens=3).describe()
    assert "\n" not in line
    for part in (
        "glm_moe_dsa",
        "78 layers + 1 MTP",
        "21 full and 57 shared in 22 index groups",
        "index_topk 2048",
        "1152 B (nope 1024+rope 128)",
        "256 B (key 256)",
        "FFFSSSFSSSF" + "SSSF" * 16 + "SSS (from indexer_types)",
    ):
        assert part in line
    assert "index_topk_freq 4, index_skip_topk_offset 2" in (
        KVGeometry.from_hf_config(glm_5_3(indexer_types=None, index_skip_topk_offset=None)).describe()
    )
