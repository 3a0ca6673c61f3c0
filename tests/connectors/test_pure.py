"""Wire, ports, options and layouts."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvoffload.connectors.sfa_remote_d2h import wire
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import differences, digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout, layer_index
from vllm_kvoffload.connectors.sfa_remote_d2h.ports import (
    TPMismatchError,
    chunk_range,
    owner,
    tp_ratio,
)
from vllm_kvoffload.hostnames import HostError, canonical_host
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.remote_d2h import check_ports, control_port, external_id, parse_remote_d2h
from vllm_kvoffload.transfer import Region

LAYER = wire.LayerLayout(0, ((4096, 64, 64),), ())
MESSAGES = {
    wire.decode_to_decode: [
        wire.Hello("s", "e", 2, 1, "d", 9, (LAYER,), b"\x00meta", 15.0, True, "secret", {"dtype": "x"}),
        wire.Declined("s", "secret", "cmpl-x-0", b"0" * 16, "why", "digest"),
        wire.Publish("s", 7, "cmpl-x-0", b"0" * 16, 3, 0, (wire.Chunk(0, (5, 1 << 30), 2),), True),
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
    if data and data[0] != wire.VERSION:
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


def _raw(message, **changes):
    """A frame whose fields may have any value."""
    fields = [message.__struct_config__.tag, *(getattr(message, f) for f in message.__struct_fields__)]
    for name, value in changes.items():
        fields[1 + message.__struct_fields__.index(name)] = value
    return bytes([wire.VERSION]) + msgspec.msgpack.encode(fields)


HELLO, PUBLISH = MESSAGES[wire.decode_to_decode][0], MESSAGES[wire.decode_to_decode][2]
NEGATIVE_AND_LARGE = (-1, 1 << 31, 1 << 63, (1 << 64) - 1)
WRONG = [
    *((HELLO, {"lease_s": value}) for value in (float("nan"), float("inf"), -1.0, 0.0, 1e300)),
    *((HELLO, {"tp_size": value}) for value in (0, *NEGATIVE_AND_LARGE)),
    (HELLO, {"tp_rank": 2}),
    (HELLO, {"tp_rank": -1}),
    *((HELLO, {"num_blocks": value}) for value in (0, *NEGATIVE_AND_LARGE)),
    *((HELLO, {"layers": [(0, [(value, 64, 64)], [])]}) for value in (0, -1, 1 << 62, 1 << 63)),
    *((HELLO, {"layers": [(0, [(64, value, 64)], [])]}) for value in (-1, 1 << 61, (1 << 64) - 1)),
    *((HELLO, {"layers": [(0, [(64, 64, value)], [])]}) for value in (0, -1, (1 << 62) - 1, 1 << 63)),
    *((HELLO, {"layers": [(value, [], [])]}) for value in (-1, 1 << 40)),
    (HELLO, {"layers": [(0, [(64, 64, 64)] * 65, [])]}),
    *((HELLO, {key: "a\nERROR forged"}) for key in ("session", "engine_id", "digest", "secret")),
    *((HELLO, {key: "x" * 300}) for key in ("session", "engine_id", "digest", "secret")),
    *((HELLO, {key: ""}) for key in ("session", "engine_id", "digest")),
    (HELLO, {"facts": {"dtype": "a\u2028b"}}),
    (HELLO, {"facts": {f"f{n}": "" for n in range(65)}}),
    (HELLO, {"metadata": b"\xff" * (wire.MAX_METADATA + 1)}),
    (HELLO, {"metadata": b"x" * wire.MAX_FRAME_BYTES}),
    *((PUBLISH, {"first": value}) for value in NEGATIVE_AND_LARGE),
    *((PUBLISH, {"transfer": value}) for value in (-1, 1 << 53, 1 << 63)),
    *((PUBLISH, {"num_blocks": value}) for value in NEGATIVE_AND_LARGE),
    *((PUBLISH, {"chunks": [(0, [value], 1)]}) for value in NEGATIVE_AND_LARGE),
    *((PUBLISH, {"chunks": [(value, [1], 1)]}) for value in NEGATIVE_AND_LARGE),
    *((PUBLISH, {"chunks": [(0, [1], value)]}) for value in NEGATIVE_AND_LARGE),
    (PUBLISH, {"prompt": b"short"}),
    (PUBLISH, {"prompt": b"l" * 17}),
    (PUBLISH, {"request": "r\r\nx"}),
    (MESSAGES[wire.decode_to_decode][3], {"reason": "x" * 513}),
    (MESSAGES[wire.decode_to_decode][3], {"reason": "\x1b[2J"}),
    (MESSAGES[wire.decode_to_decode][5], {"transfers": [1 << 63]}),
    (MESSAGES[wire.decode_to_decode][5], {"transfers": [1] * 4097}),
]


@pytest.mark.parametrize(("message", "changes"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_out_of_range_is_no_message(message, changes):
    with pytest.raises(wire.WireError) as error:
        wire.decode_to_decode(_raw(message, **changes))
    assert str(error.value).isprintable()


@pytest.mark.parametrize("entry", [(-1, 1, 1), (1 << 63, 1, 1), (1, -1, 1), (1, 1 << 31, 1), (1, 1, 4097)])
def test_entries_out_of_range_are_no_message(entry):
    for message in (wire.Beat("d", "s", ()), wire.Progress("d", "s", ())):
        with pytest.raises(wire.WireError):
            wire.decode_to_prefill(_raw(message, entries=[entry]))


def test_a_frame_cannot_announce_more_than_it_has():
    for frame in (b"\x92\xa8beat_ack\xdd\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91" * 100_000):
        with pytest.raises(wire.WireError):
            wire.decode_to_decode(bytes([wire.VERSION]) + frame)


@given(st.text(max_size=700))
def test_any_text_fits_into_a_message(text):
    closed = wire.Closed("s", 1, wire.printable(text), False)
    assert wire.decode_to_decode(wire.encode(closed)) == closed
    name = wire.wire_name(text)
    assert wire.decode_to_decode(wire.encode(wire.Declined("s", "", name, b"p" * 16, ""))).request == name
    if 0 < len(text) <= 256 and text.isprintable():
        assert name == text


def test_long_names_are_told_apart():
    assert wire.wire_name("x" * 300) != wire.wire_name("x" * 301)
    assert wire.wire_name("\ud800")


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


@pytest.mark.parametrize("host", ["decode_1", "a.b-c.example.", "10.0.0.1", "::1", "fe80::1%eth0", "host"])
def test_hosts(host):
    assert canonical_host(host, scope=True) == host.removesuffix(".")


BAD_HOSTS = [
    "*", "", "decode_1:20150/x y", "a b", "a..b", "x" * 64, "☃", "a\0b", "0.0.0.0", "::", "224.0.0.1",
    "[1.2.3.4]", "x." * 200, "1.2.3", "127.1", "a/b", "a;b", "-a", "host\n", "a@b", "1.2.3.4%eth0",
    "fe80::1%", 7,
]  # fmt: skip


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_what_is_no_host(host):
    with pytest.raises(HostError):
        canonical_host(host, scope=True)
    with pytest.raises(HostError):
        canonical_host(host)


# ---------------------------------------------------------------- options

EXTRA = {"transfer_backend": "nixl", "use_layerwise": True}


def test_the_documented_options_are_accepted():
    config = parse_remote_d2h("kv_consumer", 20050, EXTRA, "cpu")
    assert (config.producer, config.kv_port, config.transfer_backend) == (False, 20050, "nixl")
    npu = parse_remote_d2h("kv_producer", 20050, {"transfer_backend": "memfabric"}, "npu")
    assert (npu.producer, npu.protocol) == (True, "sdma")
    chosen = {"transfer_backend": "memfabric", "memfabric_transfer_protocol": "device_rdma"}
    assert parse_remote_d2h("kv_producer", 20050, chosen, "npu").protocol == "device_rdma"


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
        ("kv_consumer", {**EXTRA, "metaserver_hosts": []}, "cpu", "must be a list"),
        ("kv_producer", {**EXTRA, "decode_hosts": ["*", "a"]}, "cpu", "'*' is neither a host name"),
        ("kv_producer", {**EXTRA, "decode_hosts": ["10.0.0.0/99"]}, "cpu", "nor a network"),
        (
            "kv_producer",
            {"transfer_backend": "memfabric", "memfabric_transfer_protocol": "rdma"},
            "npu",
            "memfabric_transfer_protocol='rdma': ",
        ),
        ("kv_producer", {**EXTRA, "memfabric_transfer_protocol": "sdma"}, "cpu", "MemFabric isn't used"),
        ("kv_producer", {**EXTRA, "control_key_file": 5}, "cpu", "must be the path of a file"),
        ("kv_producer", {**EXTRA, "control_key_file": "/no/such"}, "cpu", "can't be read: No such file"),
        ("kv_producer", {**EXTRA, "control_key_file": "/dev/null"}, "cpu", "is no file"),
    ],
)
def test_bad_options_name_key_and_fix(role, extra, device, message):
    with pytest.raises(ConfigError) as error:
        parse_remote_d2h(role, 20050, extra, device)
    assert message in str(error.value)


def test_external_ids():
    assert external_id("cmpl-abc-0-12345678") == "cmpl-abc-0"
    assert external_id("short") == "short"


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


def test_storages_of_one_address_and_other_lengths_are_all_known():
    """A region covered by either must not be lost, in any order."""
    whole = torch.arange(6 * 8, dtype=torch.uint8)
    part = torch.frombuffer(whole.numpy(), dtype=torch.uint8, count=3 * 8)
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    for first, second in ((whole, part), (part, whole)):
        made = Layout.of({"layers.0.a": first.view(3, -1), "layers.1.a": second.view(3, -1)}, 3)
        assert made.regions == (Region(whole.data_ptr(), 48),)
        assert {layer.main[0] for layer in made.layers} == {
            (whole.data_ptr(), 16, 16),
            (whole.data_ptr(), 8, 8),
        }


def test_overlapping_storages_are_one_region():
    whole = torch.arange(64, dtype=torch.uint8)
    halves = [torch.frombuffer(whole.numpy(), dtype=torch.uint8, offset=o, count=40) for o in (0, 24)]
    made = Layout.of({f"layers.{n}.a": half.view(2, -1) for n, half in enumerate(halves)}, 2)
    assert made.regions == (Region(whole.data_ptr(), 64),)


def test_layouts_differ_in_base_stride_or_length():
    same = Layout.of(made := caches(), 6)
    assert same == Layout.of(made, 6)
    wide = torch.zeros(6, 2, 4, 8)
    layouts = [
        Layout.of({"layers.0.a": tensor}, 6) for tensor in (wide[:, 0], wide[:, 1], wide, wide[:, 0, :2])
    ]
    assert all(a != b for n, a in enumerate(layouts) for b in layouts[:n])


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


def test_facts_name_what_differs():
    layout, other = Layout.of(caches(), 6), Layout.of(caches(width=4), 6)
    ours = layout.facts(Model, torch.float32, 4)
    theirs = other.facts(Model, torch.bfloat16, 8)
    assert differences(theirs, ours) == (
        "dtype (prefill torch.bfloat16, decode torch.float32), block_size (prefill 8, decode 4), "
        "block_bytes (prefill 0: 64, indexer 32; 1-2: 64, decode 0: 128, indexer 32; 1-2: 128)"
    )
    assert differences(ours, ours) == ""
    assert differences({}, {"dtype": "x"}) == "dtype (prefill unknown, decode x)"


def test_long_facts_fit_into_a_message_and_stay_different():
    def facts(n):
        scaling = {"type": "yarn\n", "factors": [*range(5000), n]}
        return Layout.of(caches(), 6).facts(type("M", (), {"rope_scaling": scaling}), torch.int8, 4)

    assert facts(1) != facts(2)
    hello = wire.Hello("s", "e", 1, 0, "d", 9, (), b"", 15.0, False, "", facts(1))
    assert wire.decode_to_decode(wire.encode(hello)) == hello


def test_the_digest_tells_different_caches_apart():
    def digest(block_size=4, dtype=torch.float32, model=Model, **options):
        return digest_of(Layout.of(caches(**options), 6).facts(model, dtype, block_size))

    facts = Layout.of(caches(), 6).facts(Model, torch.float32, 4)
    assert digest() == digest_of(dict(reversed(facts.items()))), "in any order"
    other = type("Other", (Model,), {"hidden_size": 512})
    different = [
        digest(block_size=8),
        digest(dtype=torch.bfloat16),
        digest(layers=2),
        digest(width=4),
        digest(model=other),
    ]
    assert len({digest(), *different}) == 6
