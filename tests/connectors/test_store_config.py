"""Options of AscendStoreConnector: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import pytest

from vllm_kvoffload.layerwise.buffer_plan import BufferOptions
from vllm_kvoffload.settings.connectors import ConnectorPart, nested_parts
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.store import AscendStoreConfig, find_store_options, parse_ascend_store

PUBLISHED = {
    "backend": "memcache",
    "use_layerwise": True,
    "layerwise_num_shared_buffers": 3,
    "layerwise_independent_layers": [0],
}


def test_the_published_configuration():
    options = parse_ascend_store("kv_producer", PUBLISHED)
    assert options.backend == "memcache"
    assert options.buffers == BufferOptions(3, (0,))
    assert options.prefetch_layers == 3
    assert (options.max_transfer_blocks, options.max_transfer_bytes) == (0, 0)


def test_keys_of_later_releases_are_accepted():
    options = parse_ascend_store(
        "kv_producer", {**PUBLISHED, "qos_priority": 4, "memcache_dp_init_barrier": False}
    )
    assert options.qos_priority == 4
    assert parse_ascend_store("kv_producer", PUBLISHED).qos_priority is None


def test_without_layerwise_nothing_is_shared():
    assert parse_ascend_store("kv_both", {"backend": "LOCAL"}).buffers == BufferOptions(None, "all")


@pytest.mark.parametrize(
    ("role", "options", "message"),
    [
        ("kv_consumer", {}, "kv_role='kv_consumer'"),
        ("kv_producer", {"backend": None}, "required"),
        ("kv_producer", {"backend": "mooncake"}, "this backend is not supported"),
        ("kv_producer", {"backend": "memcached"}, "must be one of local, memcache"),
        ("kv_producer", {"use_layerwise": "true"}, "must be true or false"),
        ("kv_producer", {"layerwise_num_shared_buffer": 3}, "did you mean 'layerwise_num_shared_buffers'?"),
        ("kv_producer", {"layerwise_num_shared_buffers": 0}, "must be at least 1"),
        ("kv_producer", {"layerwise_prefetch_layers": 0}, "at least 1"),
        ("kv_producer", {"layerwise_max_transfer_bytes": -1}, "at least 0"),
        ("kv_producer", {"consumer_is_to_load": True}, "SfaRemoteD2HConnector"),
        ("kv_producer", {"load_async": True}, "awaited layer by layer"),
        *(
            ("kv_producer", {"qos_priority": value}, "qos_priority")
            for value in (5, -1, "3", True, None, 1.0)
        ),
        ("kv_producer", {"qos_priority": 1, "backend": "local"}, "for MemCache's transfers"),
        ("kv_producer", {"memcache_dp_init_barrier": 1}, "must be true or false"),
        ("kv_producer", {"prefill_pp_size": 2}, "pipeline parallelism is not supported"),
        *(
            ("kv_producer", {"local_dram_size_GB": size}, "above 0")
            for size in (0, -1, "4", True, float("nan"), float("inf"), 1e9, None)
        ),
        ("kv_producer", {"use_layerwise": False}, "is without effect unless use_layerwise"),
        (
            "kv_producer",
            {
                "use_layerwise": False,
                "layerwise_num_shared_buffers": None,
                "layerwise_independent_layers": [1],
            },
            "layerwise_independent_layers=[1]",
        ),
    ],
)
def test_refusals(role, options, message):
    with pytest.raises(ConfigError) as error:
        parse_ascend_store(role, {**PUBLISHED, **options})
    assert message in str(error.value)
    assert "Fix:" in str(error.value)


def joint(*parts: dict) -> dict:
    return {"connectors": [{"kv_role": "kv_producer", **part} for part in parts]}


def found_options(name: str, role: str, extra: dict) -> AscendStoreConfig | None:
    return find_store_options(nested_parts(ConnectorPart(name, role, extra)))


STORE = {"kv_connector": "AscendStoreConnector", "kv_connector_extra_config": PUBLISHED}
REMOTE = {"kv_connector": "SfaRemoteD2HConnector", "kv_connector_extra_config": {"transfer_backend": "nixl"}}


@pytest.mark.parametrize("name", ["MultiConnector", "KVOffloadMultiConnector"])
def test_in_a_multi_connector(name):
    for parts in ((REMOTE, STORE), (STORE, REMOTE)):
        found = found_options(name, "kv_producer", joint(*parts))
        assert found is not None
        assert found.buffers == BufferOptions(3, (0,))
    assert found_options(name, "kv_producer", joint(REMOTE)) is None


def test_other_connectors_are_left_alone():
    assert found_options("NixlConnector", "kv_both", {"anything": 1}) is None
    parts = {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}
    assert found_options("MultiConnector", "kv_producer", parts) is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "must be a list of kv-transfer configs"),
        (joint(STORE, STORE), "only one AscendStoreConnector"),
        ({"connectors": [{**STORE, "kv_role": "kv_both"}]}, "have the role of the engine"),
    ],
)
def test_refused_multi_connectors(extra, message):
    with pytest.raises(ConfigError, match=message):
        found_options("MultiConnector", "kv_producer", extra)
