"""Wire, ports, options and layouts."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload.connectors.sfa_remote_d2h import wire
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout, layer_index
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import (
    TPMismatchError,
    chunk_range,
    owner,
    tp_ratio,
)
from vllm_kvoffload.connectors.sfa_remote_d2h.rendezvous import RendezvousError, check_url
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.remote_d2h import check_ports, control_port, external_id, parse_remote_d2h

LAYER = wire.LayerLayout(0, ((4096, 64, 64),), ())
MESSAGES = {
    wire.decode_to_decode: [
        wire.Hello("s", "e", 2, 1, "d", 9, (LAYER,), b"\x00meta", 15.0),
        wire.Publish("s", 7, "cmpl-x-0", b"0" * 16, 3, 0, (wire.Chunk(0, (5, 1 << 40), 2),), True),
        wire.Closed("s", 7, "why", True),
        wire.Finished("s", 7),
        wire.BeatAck("s", (1, 2)),
    ],
    wire.decode_to_prefill: [
        wire.HelloAck("d", "s"),
        wire.Refused("d", "s", "no"),
        wire.NeedHello("d", "s"),
        wire.Progress("d", "s", ((3, 1, 2),)),
        wire.Beat("d", "s", ((7, 1, 2),)),
        wire.Finish("d", "s", 7),
        wire.Cancel("d", "s", 7, "aborted"),
    ],
}


@pytest.mark.parametrize("decode", MESSAGES)
def test_every_message_survives_the_wire(decode):
    for message in MESSAGES[decode]:
        assert decode(wire.encode(message)) == message


def test_a_message_for_the_other_side_is_an_error():
    for decode, other in [
        (wire.decode_to_decode, wire.decode_to_prefill),
        (wire.decode_to_prefill, wire.decode_to_decode),
    ]:
        for message in MESSAGES[other]:
            with pytest.raises(wire.WireError):
                decode(wire.encode(message))


@given(st.binary(max_size=40))
def test_rubbish_is_an_error(data):
    with pytest.raises(wire.WireError):
        wire.decode_to_prefill(bytes([wire.VERSION]) + b"\xc1" + data)
    if data[:1] != bytes([wire.VERSION]):
        with pytest.raises(wire.WireError, match="version"):
            wire.decode_to_decode(data)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_truncated_message_is_an_error(cut):
    with pytest.raises(wire.WireError):
        wire.decode_to_decode(wire.encode(MESSAGES[wire.decode_to_decode][0])[:-cut])


def test_another_version_says_so():
    frame = bytes([wire.VERSION + 1]) + msgspec.msgpack.encode(["hello"])
    with pytest.raises(wire.WireError, match=f"version {wire.VERSION + 1}.*speaks {wire.VERSION}"):
        wire.decode_to_decode(frame)


def test_prompts_are_told_apart():
    assert wire.prompt_digest([1, 2]) != wire.prompt_digest([1, 2, 0])
    assert wire.prompt_digest([1, 256]) != wire.prompt_digest([257, 0])
    assert len(wire.prompt_digest(range(100))) == 16


# ---------------------------------------------------------------- ports


def test_ports_of_all_ranks_differ():
    ports = [control_port(20050, dp, 4, tp) for dp in range(3) for tp in range(4)]
    assert ports == list(range(20050, 20062))


@pytest.mark.parametrize(("base", "dp", "tp"), [(0, 1, 1), (65535, 1, 2), (65530, 4, 2), (-5, 1, 1)])
def test_impossible_ports_are_refused(base, dp, tp):
    with pytest.raises(ConfigError, match="kv_port"):
        check_ports(base, dp, tp)
    check_ports(65535 - 7, 4, 2)


@pytest.mark.parametrize("ratio", [(1, 1), (2, 1), (4, 2), (8, 1)])
def test_ratio(ratio):
    assert tp_ratio(*ratio) == ratio[0] // ratio[1]


@pytest.mark.parametrize("sizes", [(1, 2), (3, 2), (2, 0), (6, 4)])
def test_impossible_ratios_are_refused(sizes):
    with pytest.raises(TPMismatchError, match="multiple"):
        tp_ratio(*sizes)


@given(st.integers(1, 8), st.integers(0, 200))
def test_every_block_has_one_owner_and_shares_are_even(ranks, count):
    owners = [owner(block, ranks) for block in range(count)]
    shares = [owners.count(rank) for rank in range(ranks)]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 4


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 40), st.sampled_from([1, 16, 64])
)
def test_chunks_cover_what_decode_lacks_exactly_once(steps, cached_blocks, block_size):
    total = sum(steps)
    cached = min(cached_blocks * block_size, (total - 1) // block_size * block_size)
    published, computed, blocks = 0, 0, []
    for number, step in enumerate(steps):
        computed += step
        begin, end = chunk_range(cached, published, computed, block_size, number == len(steps) - 1)
        blocks += range(begin, end)
        published = end
    assert blocks == list(range(cached // block_size, -(-total // block_size)))


# ---------------------------------------------------------------- options

EXTRA = {"transfer_backend": "nixl", "use_layerwise": True}


def test_the_documented_options_are_accepted():
    config = parse_remote_d2h("kv_consumer", 20050, EXTRA, "cpu")
    assert (config.producer, config.kv_port, config.transfer_backend) == (False, 20050, "nixl")
    assert parse_remote_d2h("kv_producer", 20050, {"transfer_backend": "memfabric"}, "npu").producer


@pytest.mark.parametrize(
    ("role", "extra", "device", "message"),
    [
        ("kv_consumer", {}, "cpu", 'transfer_backend=None: required on both sides. Fix: set it to "nixl"'),
        ("kv_consumer", {}, "npu", 'Fix: set it to "memfabric"'),
        ("kv_consumer", {"transfer_backend": "mooncake"}, "cpu", "must be one of memfabric, nixl"),
        ("kv_consumer", {"transfer_backend": "memfabric"}, "cpu", "does not work on cpu"),
        ("kv_both", EXTRA, "cpu", "kv_role='kv_both'"),
        (None, EXTRA, "cpu", "kv_role=None"),
        (
            "kv_consumer",
            {**EXTRA, "use_layerwise": "false"},
            "cpu",
            "use_layerwise='false': must be true or false",
        ),
        ("kv_consumer", {**EXTRA, "use_layrwise": True}, "cpu", "did you mean 'use_layerwise'"),
        ("kv_consumer", {**EXTRA, "lease_s": 0}, "cpu", "lease_s=0: must be seconds"),
        ("kv_consumer", {**EXTRA, "request_s": True}, "cpu", "request_s=True"),
        ("kv_consumer", {**EXTRA, "metaserver_hosts": "proxy"}, "cpu", "must be a list"),
    ],
)
def test_bad_options_name_key_and_fix(role, extra, device, message):
    with pytest.raises(ConfigError) as error:
        parse_remote_d2h(role, 20050, extra, device)
    assert message in str(error.value)


def test_external_ids():
    assert external_id("cmpl-abc-0-12345678") == "cmpl-abc-0"
    assert external_id("short") == "short"


def test_metaserver_addresses():
    assert check_url("http://10.0.0.1:9000/v1/metaserver", ()) == "http://10.0.0.1:9000/v1/metaserver"
    assert check_url("http://[::1]:9000/v1/metaserver", ("::1",))
    for url, hosts in [
        ("file:///etc/passwd", ()),
        (None, ()),
        ("http://", ()),
        ("http://evil/x", ("proxy",)),
    ]:
        with pytest.raises(RendezvousError):
            check_url(url, hosts)


# ---------------------------------------------------------------- layouts


def caches(num_blocks=6, layers=3, width=8):
    backing = torch.arange(layers * num_blocks * 4 * width, dtype=torch.float32).view(
        layers, num_blocks, 4, width
    )
    made = {f"model.layers.{n}.self_attn.attn": backing[n] for n in range(layers)}
    made["model.layers.0.self_attn.indexer.k_cache"] = torch.zeros(num_blocks, 1, 4, 2)
    return made


def test_layout_of_caches():
    made = caches()
    layout = Layout.of(made, 6)
    assert [layer.index for layer in layout.layers] == [0, 1, 2]
    main = made["model.layers.1.self_attn.attn"]
    assert layout.layers[1].main == ((main.data_ptr(), 128, 128),)
    assert layout.layers[0].indexer[0][1:] == (32, 32)
    assert not layout.layers[1].indexer
    assert sorted(region.nbytes for region in layout.regions) == [6 * 32, 3 * 6 * 128]


def test_kernel_blocks_are_taken_together():
    layout = Layout.of({"model.layers.0.attn": torch.zeros(12, 4, 8)}, 6)
    assert layout.layers[0].main[0][1:] == (256, 256)


def test_caches_that_cannot_be_pulled_are_refused():
    with pytest.raises(ValueError, match="can't be pulled"):
        Layout.of({"model.layers.0.attn": torch.zeros(6, 8, 4).transpose(1, 2)}, 6)
    with pytest.raises(ValueError, match="can't be pulled"):
        Layout.of({"model.layers.0.attn": torch.zeros(7, 4, 8)}, 6)
    with pytest.raises(ValueError, match="layer number"):
        layer_index("model.embed")


class Model:
    model_type = "glm_moe_dsa"
    hidden_size = 256


def test_the_digest_tells_different_caches_apart():
    def digest(block_size=4, dtype=torch.float32, model=Model, **options):
        return Layout.of(caches(**options), 6).digest(model, dtype, block_size)

    assert digest() == digest()
    other = type("Other", (Model,), {"hidden_size": 512})
    different = [
        digest(block_size=8),
        digest(dtype=torch.bfloat16),
        digest(layers=2),
        digest(width=4),
        digest(model=other),
    ]
    assert len({digest(), *different}) == 6
