"""Buffer plans: what shares memory, what must not, and what an engine refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.layerwise.buffer_plan import CacheLayer, geometry_layers, plan_buffers
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.store import BufferOptions, parse_buffer_options


def equal_layers(count: int) -> list[CacheLayer]:
    return [CacheLayer(n, "mla", 1152) for n in range(count)]


def test_the_published_example():
    plan = plan_buffers(equal_layers(8), BufferOptions(3, (0,)))
    assert plan.slots == ((0,), (1, 4, 7), (2, 5), (3, 6))
    assert plan.predecessors == {4: 1, 7: 4, 5: 2, 6: 3}
    assert plan.has_reuse
    assert plan.factor == 2.0
    assert plan.describe() == (
        "Layerwise KV cache reuse merged 8 descriptors into 4 descriptors using 4 buffer assignments."
    )


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        (BufferOptions(1, ()), ((0, 1, 2, 3),)),
        (BufferOptions(1, (-1,)), ((3,), (0, 1, 2))),
        (BufferOptions(2, (0, -4)), ((0,), (1, 3), (2,))),
        (BufferOptions(9, ()), ((0,), (1,), (2,), (3,))),
        (BufferOptions(2, "all"), ((0,), (1,), (2,), (3,))),
        (BufferOptions(), ((0,), (1,), (2,), (3,))),
    ],
)
def test_options(options, slots):
    plan = plan_buffers(equal_layers(4), options)
    assert plan.slots == slots
    assert plan.has_reuse == (len(slots) < 4)
    assert plan.factor == 4 / len(slots)


def test_an_indexer_follows_its_layer():
    """Layers 0, 1 and 3 have one. Layer 2 owns none, but lies in a slot that has one."""
    layers = [CacheLayer(n, "mla", 1152, "key" if n != 2 else None, 256 if n != 2 else 0) for n in range(4)]
    plan = plan_buffers(layers, BufferOptions(1, (0,)))
    assert plan.slots == ((0,), (1, 2, 3))
    assert (plan.num_caches, plan.num_buffers) == (7, 4)
    assert plan.logical_bytes == 4 * 1152 + 3 * 256
    assert plan.physical_bytes == 2 * 1152 + 2 * 256


def test_positions_count_layers_with_a_cache():
    plan = plan_buffers([CacheLayer(n, "mla", 64) for n in (9, 3, 61)], BufferOptions(1, (-1,)))
    assert [layer.index for layer in plan.layers] == [3, 9, 61]
    assert plan.slots == ((2,), (0, 1))


def test_mtp_layers_take_part():
    config = {
        "model_type": "deepseek_v32", "num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "index_topk": 64, "index_head_dim": 128, "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
    }  # fmt: skip
    geometry = KVGeometry.from_hf_config(config, layout="cpu", dtype="bfloat16", num_speculative_tokens=1)
    plan = plan_buffers(geometry_layers(geometry), BufferOptions(2, (-1,)))
    assert len(plan.layers) == 5
    assert plan.slots == ((4,), (0, 2), (1, 3))
    assert plan.physical_bytes == 3 * (1152 + 256)


@given(
    kinds=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=40),
    shared=st.integers(1, 9),
    data=st.data(),
)
def test_every_plan(kinds, shared, data):
    count = len(kinds)
    alone = data.draw(st.lists(st.integers(-count, count - 1), max_size=5))
    sizes = {"a": 1152, "b": 656}
    layers = [
        CacheLayer(n, kind, sizes[kind], "key" if indexer else None, 132 if indexer else 0)
        for n, (kind, indexer) in enumerate(kinds)
    ]
    plan = plan_buffers(layers, BufferOptions(shared, tuple(alone)))
    assert sorted(p for owners in plan.slots for p in owners) == list(range(count))
    for owners in plan.slots:
        assert list(owners) == sorted(owners)
        assert len({plan.layers[p].main for p in owners}) == 1, "caches that differ never share"
    for layer in alone:
        assert plan.slots[plan.slot_of[layer % count]] == (layer % count,)
    per_bucket = {"a": 0, "b": 0}
    for owners in plan.slots:
        if owners[0] not in {layer % count for layer in alone}:
            per_bucket[str(plan.layers[owners[0]].main)] += 1
    assert all(number <= shared for number in per_bucket.values())
    for later, earlier in plan.predecessors.items():
        assert earlier < later
        assert plan.slot_of[earlier] == plan.slot_of[later]
    assert plan.physical_bytes <= plan.logical_bytes
    assert plan.has_reuse == (len(plan.slots) < count)
    # Dealt evenly: no buffer of a bucket has two owners more than another.
    for kind in "ab":
        lengths = [
            len(o)
            for o in plan.slots
            if plan.layers[o[0]].main == kind and o[0] not in {layer % count for layer in alone}
        ]
        assert not lengths or max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("shared", "independent", "message"),
    [
        (True, None, "must be an integer, not a bool"),
        ("3", None, "must be an integer, not a str"),
        (0, None, "must be at least 1"),
        (3, True, "must be a list, not a bool"),
        (3, 0, "must be a list, not a int"),
        (3, "none", 'must be a list of layers or "all"'),
        (3, [0, "1"], "'1' is not a layer"),
        (3, [True], "True is not a layer"),
    ],
)
def test_refused_options(shared, independent, message):
    with pytest.raises(ConfigError) as error:
        parse_buffer_options(shared, independent)
    assert message in str(error.value)
    assert "Fix:" in str(error.value)


def test_all_in_any_case():
    assert parse_buffer_options(None, "ALL") == BufferOptions(None, "all")
    assert parse_buffer_options(3, [0, -1]) == BufferOptions(3, (0, -1))


@pytest.mark.parametrize("layer", [4, -5])
def test_an_independent_layer_that_is_not_there(layer):
    with pytest.raises(ConfigError, match="the model has 4 layers with a KV cache"):
        plan_buffers(equal_layers(4), BufferOptions(2, (layer,)))


def test_indexers_that_differ_never_share():
    layers = [CacheLayer(n, "mla", 1152, kind, 128) for n, kind in enumerate(["k", "k", "other", "k"])]
    with pytest.raises(ConfigError, match="add 2 to the list"):
        plan_buffers(layers, BufferOptions(1, (0,)))
    assert plan_buffers(layers, BufferOptions(1, (0, 2))).slots == ((0,), (2,), (1, 3))


def test_no_layers():
    with pytest.raises(ConfigError, match="no KV cache"):
        plan_buffers([], BufferOptions())
