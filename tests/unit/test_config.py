import json
import pickle
from dataclasses import replace

import pytest

from vllm_kvoffload.policies import POLICIES
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import (
    SECTION,
    EngineFacts,
    SparseOffloadConfig,
    parse_sparse_offload,
    valid_buffer_sizes,
    validate_sparse_offload,
)
from vllm_kvoffload.settings.values import GIB

# As in the public documentation of the feature, to the letter.
DOCUMENTED = """{
    "sparse_kv_offload_config": {
        "enabled": true,
        "topk_buffer_size": 4096,
        "dram_size_per_dp_GB": 128
    }
}"""
ENABLED = SparseOffloadConfig(enabled=True)
DECODE = EngineFacts(index_topk=2048, block_size=128, max_num_seqs=64, kv_role="kv_consumer")
AGGREGATED = replace(DECODE, kv_role=None)


def section(**keys):
    return {"sparse_kv_offload_config": keys}


# ---------------------------------------------------------------------------------------------------- parsing


def test_documented_example_is_accepted():
    config = parse_sparse_offload(json.loads(DOCUMENTED))
    assert config == SparseOffloadConfig(
        enabled=True, topk_buffer_size=4096, dram_size_per_dp_GB=128, keep_device_kv_cache=False
    )
    assert config.dram_bytes == 128 * GIB == 137438953472
    validate_sparse_offload(config, DECODE)


def test_defaults():
    config = parse_sparse_offload(section())
    assert config == SparseOffloadConfig()
    assert not config.enabled
    assert (config.topk_buffer_size, config.dram_size_per_dp_GB, config.keep_device_kv_cache) == (
        4096,
        128,
        False,
    )
    assert (config.ways, config.policy, config.delivery, config.prefill_buffers) == (
        16,
        "rrip",
        "in_place",
        2,
    )
    assert config.num_sets == 256


def test_the_number_of_sets_follows_the_placement():
    config = SparseOffloadConfig(topk_buffer_size=8192)
    assert config.num_sets == 512
    assert replace(config, placement="two_sets").num_sets == 1024
    assert replace(config, placement="two_sets", ways=32).num_sets == 512


def test_only_one_set_plans_as_published():
    config = SparseOffloadConfig(delivery="compact", policy="fifo")
    assert config.plans_as_published
    assert not replace(config, placement="two_sets").plans_as_published


@pytest.mark.parametrize("absent", [None, {}, {"torchair_graph_config": {"enabled": True}, "refresh": True}])
def test_absent_means_disabled(absent):
    assert parse_sparse_offload(absent) == SparseOffloadConfig()


def test_every_key_is_read():
    keys = {
        "enabled": True,
        "topk_buffer_size": 8192,
        "dram_size_per_dp_GB": 7,
        "keep_device_kv_cache": True,
        "ways": 32,
        "placement": "two_sets",
        "policy": "clock",
        "delivery": "in_place",
        "prefill_buffers": 8,
        "trace_path": "trace.kvt",
    }
    assert parse_sparse_offload(section(**keys)) == SparseOffloadConfig(**keys)


@pytest.mark.parametrize(
    ("key", "value", "rule", "fix"),
    [
        ("enabled", "false", "must be true or false, not a str", "write true or false"),
        ("enabled", 1, "must be true or false, not a int", "write true or false"),
        ("enabled", None, "must be true or false", "write true or false"),
        ("keep_device_kv_cache", "false", "must be true or false, not a str", "write true or false"),
        ("topk_buffer_size", 4096.0, "must be an integer, not a float", "whole number"),
        ("topk_buffer_size", "4096", "must be an integer, not a str", "without quotes"),
        ("topk_buffer_size", True, "must be an integer, not a bool", "whole number"),
        ("topk_buffer_size", None, "must be an integer", "whole number"),
        ("topk_buffer_size", 0, "must be at least 1", "set it to 1"),
        ("topk_buffer_size", -4096, "must be at least 1", "set it to 1"),
        ("dram_size_per_dp_GB", 0.5, "must be an integer, not a float", "whole number"),
        ("dram_size_per_dp_GB", "128GB", "must be an integer, not a str", "without quotes"),
        ("dram_size_per_dp_GB", 0, "must be at least 1", "set it to 1"),
        ("ways", 8, "must be 16 or 32", "set it to 16"),
        ("ways", 64, "must be 16 or 32", "set it to 32"),
        ("ways", "16", "must be an integer", "without quotes"),
        ("placement", "one", "must be one of one_set, two_sets", 'set it to "one_set"'),
        ("placement", 2, "must be one of one_set, two_sets", "set it to"),
        ("policy", "mru", f"must be one of {', '.join(POLICIES)}", 'set it to "rrip"'),
        ("policy", "RRIP", "must be one of fifo, clock, ", 'set it to "rrip"'),
        ("policy", "clok", "must be one of fifo, clock, ", 'set it to "clock"'),
        ("policy", ["fifo"], "must be one of", "set it to"),
        ("delivery", "compactly", "must be one of in_place, compact", 'set it to "compact"'),
        ("delivery", "copy", "must be one of in_place, compact", 'set it to "in_place"'),
        ("prefill_buffers", 1, "must be from 2 to 8", "set it to 2"),
        ("trace_path", None, "must be a string", '"" for none'),
        ("trace_path", "/no/such/dir/a.kvt", "its directory does not exist", "create /no/such/dir"),
        ("prefill_buffers", 9, "must be from 2 to 8", "set it to 8"),
        ("topk_bufer_size", 4096, "did you mean 'topk_buffer_size'?", "rename it to 'topk_buffer_size'"),
        (
            "dram_size_per_dp_gb",
            128,
            "did you mean 'dram_size_per_dp_GB'?",
            "rename it to 'dram_size_per_dp_GB'",
        ),
        ("Enabled", True, "did you mean 'enabled'?", "rename it to 'enabled'"),
        ("zzz", 1, "no such key", "the keys are enabled, topk_buffer_size, dram_size_per_dp_GB"),
    ],
)
def test_bad_values(key, value, rule, fix):
    with pytest.raises(ConfigError) as caught:
        parse_sparse_offload(section(**{key: value}))
    assert_one_clear_line(caught.value, f"sparse_kv_offload_config.{key}", value, rule, fix)


def test_values_are_checked_even_when_disabled():
    with pytest.raises(ConfigError, match="dram_size_per_dp_GB"):
        parse_sparse_offload(section(enabled=False, dram_size_per_dp_GB="64"))


@pytest.mark.parametrize("value", [True, None, [], "on"])
def test_section_must_be_an_object(value):
    with pytest.raises(ConfigError) as caught:
        parse_sparse_offload({"sparse_kv_offload_config": value})
    assert_one_clear_line(caught.value, "sparse_kv_offload_config", value, "must be a JSON object", "enabled")


def test_additional_config_must_be_an_object():
    with pytest.raises(ConfigError, match="additional_config='x': must be a JSON object"):
        parse_sparse_offload("x")


@pytest.mark.parametrize("name", ["sparse_kv_offload", "sparse_kv_ofload_config", "sparse-kv-offload-config"])
def test_misspelt_section_does_not_run_without_offload(name):
    with pytest.raises(ConfigError) as caught:
        parse_sparse_offload({name: {"enabled": True}})
    fix = "rename it to 'sparse_kv_offload_config'"
    assert_one_clear_line(caught.value, name, {"enabled": True}, "no such key", fix)


# ------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("facts", [DECODE, AGGREGATED])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"num_speculative_tokens": 1},
        {"num_kv_cache_groups": 1},
        {"block_size": 16},
        {"block_size": 4096},
        {"index_topk": 4096},
        {"max_num_seqs": 1},
    ],
)
def test_supported_engines(facts, changes):
    validate_sparse_offload(ENABLED, replace(facts, **changes))


def test_debug_option_is_accepted():
    validate_sparse_offload(replace(ENABLED, keep_device_kv_cache=True), DECODE)


def test_disabled_fits_every_engine():
    facts = EngineFacts(
        index_topk=None,
        block_size=48,
        max_num_seqs=0,
        uses_v2_runner=True,
        kv_role="kv_producer",
        sleep_mode=True,
    )
    validate_sparse_offload(SparseOffloadConfig(), facts)


OPTION = "sparse_kv_offload_config.enabled"


@pytest.mark.parametrize(
    ("changes", "key", "value", "rule", "fix"),
    [
        ({"index_topk": None}, OPTION, True, "no index_topk", f"set {OPTION} to false"),
        ({"has_compress_ratios": True}, OPTION, True, "compress_ratios", f"set {OPTION} to false"),
        ({"num_kv_cache_groups": 2}, OPTION, True, "2 KV cache groups", f"set {OPTION} to false"),
        ({"kv_role": "kv_producer"}, OPTION, True, "kv_role=kv_producer", "remove sparse_kv_offload_config"),
        ({"kv_role": "kv_both"}, OPTION, True, "kv_role=kv_both", "set kv_role to kv_consumer"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size",
            2,
            "must be 1",
            "--pipeline-parallel-size 1",
        ),
        (
            {"prefill_context_parallel_size": 4},
            "prefill_context_parallel_size",
            4,
            "must be 1",
            "--prefill-context-parallel-size 1",
        ),
        (
            {"decode_context_parallel_size": 8},
            "decode_context_parallel_size",
            8,
            "must be 1",
            "--decode-context-parallel-size 1",
        ),
        (
            {"dsa_context_parallel": True},
            "dsa_context_parallel",
            True,
            "must be off",
            "enable_dsa_cp to false",
        ),
        (
            {"uses_v2_runner": True},
            "VLLM_USE_V2_MODEL_RUNNER",
            True,
            "runner V1",
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8", "16 or 32 bit", "--kv-cache-dtype auto"),
        (
            {"kv_cache_dtype": "fp8_ds_mla"},
            "kv_cache_dtype",
            "fp8_ds_mla",
            "16 or 32",
            "--kv-cache-dtype auto",
        ),
        ({"sleep_mode": True}, "enable_sleep_mode", True, "sleep mode", "drop --enable-sleep-mode"),
        ({"max_num_seqs": 0}, "max_num_seqs", 0, "at least 1", "--max-num-seqs 1"),
        ({"block_size": 48}, "block_size", 48, "power of two", "--block-size 32"),
        ({"block_size": 0}, "block_size", 0, "power of two", "--block-size 128"),
    ],
)
def test_unsupported_engines(changes, key, value, rule, fix):
    with pytest.raises(ConfigError) as caught:
        validate_sparse_offload(ENABLED, replace(DECODE, **changes))
    assert_one_clear_line(caught.value, key, value, rule, fix)


@pytest.mark.parametrize(
    ("size", "ways", "changes", "rule", "fix"),
    [
        (1024, 16, {}, "at least 2048 = (1 + 0 speculative tokens) * index_topk 2048", "set it to 2048"),
        (
            4096,
            16,
            {"num_speculative_tokens": 3},
            "at least 8192 = (1 + 3 speculative tokens)",
            "set it to 8192",
        ),
        (4096, 16, {"num_speculative_tokens": 2}, "at least 6144", "set it to 8192"),
        (4096, 16, {"block_size": 8192}, "divisible by block_size 8192", "set it to 8192"),
        (4100, 16, {}, "divisible by block_size 128", "set it to 4096 or 8192"),
        (6144, 16, {}, "topk_buffer_size / ways (16) must be a power of two", "set it to 4096 or 8192"),
        (6144, 32, {"index_topk": 6000}, "topk_buffer_size / ways (32) must be", "set it to 8192"),
        (2064, 16, {"block_size": 16}, "topk_buffer_size / ways (16) must be", "set it to 2048 or 4096"),
        (24, 16, {"index_topk": 8, "block_size": 8}, "topk_buffer_size / ways (16)", "set it to 16 or 32"),
        (16, 32, {"index_topk": 8, "block_size": 16}, "topk_buffer_size / ways (32)", "set it to 32"),
    ],
)
def test_hot_pool_size(size, ways, changes, rule, fix):
    config = replace(ENABLED, topk_buffer_size=size, ways=ways)
    facts = replace(DECODE, **changes)
    with pytest.raises(ConfigError) as caught:
        validate_sparse_offload(config, facts)
    assert_one_clear_line(caught.value, "sparse_kv_offload_config.topk_buffer_size", size, rule, fix)
    for suggestion in caught.value.fix.removeprefix("set it to ").split(" or "):
        validate_sparse_offload(replace(config, topk_buffer_size=int(suggestion)), facts)


@pytest.mark.parametrize(
    ("given", "ways", "used"),
    [
        (6144, 16, 4096),
        (12288, 16, 8192),
        (18432, 16, 16384),
        (20480, 32, 16384),
        (2176, 16, 2048),
        (4096, 32, 4096),
    ],
)
def test_sizes_of_vllm_ascend_are_rounded_down(given, ways, used):
    """Its sizes are multiples of blocks; a partition here has a power of two of sets."""
    config = parse_sparse_offload({SECTION: {"enabled": True, "topk_buffer_size": given, "ways": ways}})
    assert config.topk_buffer_size == used
    validate_sparse_offload(config, DECODE)
    assert (config.rounded == "") == (used == given)
    assert used == given or all(
        word in config.rounded for word in (str(given), str(used), "topk_buffer_size")
    )


def test_a_size_that_is_too_small_once_rounded_is_refused_as_it_was_given():
    config = parse_sparse_offload({SECTION: {"enabled": True, "topk_buffer_size": 6144}})
    with pytest.raises(ConfigError) as caught:
        validate_sparse_offload(config, replace(DECODE, num_speculative_tokens=2))
    assert_one_clear_line(
        caught.value,
        "sparse_kv_offload_config.topk_buffer_size",
        6144,
        "gives hot pools of 4096 slots (a power of two of sets), which must be at least 6144",
        "set it to 8192",
    )


@pytest.mark.parametrize("size", [4100, 6145, 100, 8])
def test_sizes_that_are_no_multiple_of_a_block_are_not_rounded(size):
    assert parse_sparse_offload({SECTION: {"topk_buffer_size": size}}).topk_buffer_size == size


def test_keys_of_vllm_ascend_that_switch_nothing_on_are_accepted():
    section = {"enabled": True, "use_fused_overlap": False, "fused_op_type": "none"}
    assert parse_sparse_offload({SECTION: section}) == parse_sparse_offload({SECTION: {"enabled": True}})


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("use_fused_overlap", True, "on a stream of its own"),
        ("use_fused_overlap", "false", "must be true or false"),
        ("fused_op_type", "fused_copy_sfa", "operators of its own"),
        ("fused_op_type", None, "operators of its own"),
        ("fused_op", "none", "did you mean 'fused_op_type'"),
    ],
)
def test_keys_of_vllm_ascend_that_would_switch_something_on_are_refused(key, value, rule):
    with pytest.raises(ConfigError) as caught:
        parse_sparse_offload({SECTION: {"enabled": True, key: value}})
    assert caught.value.key == f"sparse_kv_offload_config.{key}"
    assert rule in caught.value.rule


def test_valid_buffer_sizes():
    assert valid_buffer_sizes(4096, 16, 2048) == [4096]
    assert valid_buffer_sizes(5000, 16, 2048) == [4096, 8192]
    assert valid_buffer_sizes(5000, 16, 4097) == [8192]
    assert valid_buffer_sizes(1, 32, 1) == [32]


# ----------------------------------------------------------------------------------------------------- errors


def assert_one_clear_line(error, key, value, rule, fix):
    text = str(error)
    assert isinstance(error, ValueError)
    assert (error.key, error.value) == (key, value)
    assert text.startswith(f"{key}={value!r}: ")
    assert rule in error.rule
    assert fix in error.fix
    assert text.endswith(f"Fix: {error.fix}")
    assert "\n" not in text


def test_error_survives_pickling_and_long_values():
    error = ConfigError("key", ["x" * 500, "\n"], "a rule\nof two lines", "a fix")
    assert len(str(error)) < 150
    assert "\n" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.key, copy.value, copy.rule, copy.fix) == (error.key, error.value, error.rule, error.fix)
