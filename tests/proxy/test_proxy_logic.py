"""The proxy's pure parts: tables and properties."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvoffload.proxy import sse
from vllm_kvoffload.proxy.balance import COOL_DOWN, Demand, Health, Instance, Load, Pool, fits, mismatched
from vllm_kvoffload.proxy.calls import parse_call, prefix_hashes
from vllm_kvoffload.proxy.errors import HttpFailure, NoInstanceError, RequestRefused
from vllm_kvoffload.proxy.http_client import request_bytes
from vllm_kvoffload.proxy.jsontext import decode_json
from vllm_kvoffload.proxy.recompute import (
    CannotContinue,
    Identity,
    Transcript,
    continuation_event,
    continued_body,
    joined_answer,
)
from vllm_kvoffload.proxy.rendezvous import (
    Message,
    Notice,
    Outcome,
    PendingRendezvous,
    check_message,
    external_id,
)
from vllm_kvoffload.proxy.sanitize import ALWAYS, DROP, PREFILL_TABLE, prefill_body
from vllm_kvoffload.proxy.settings import Address, SettingsError, addresses, is_wildcard, proxy_settings
from vllm_kvoffload.proxy.usage import UsageFacts, add_usage, cached_tokens, rewrite_usage

# events

EOLS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.one_of(
    st.builds(lambda s: b"data: " + s.encode(), st.text("ab{}\"' é", max_size=8)),
    st.sampled_from([b": comment", b"event: x", b"data:", b"data: [DONE]", b"id: 1"]),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Events with any line ends; one kind per stream, as servers have it, or mixed."""
    mixed = draw(st.booleans())
    eol = draw(EOLS)
    made = b""
    for block in draw(st.lists(st.lists(LINES, min_size=1, max_size=3), max_size=6)):
        for line in block:
            made += line + (draw(EOLS) if mixed else eol)
        made += draw(EOLS) if mixed else eol
    return made


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(streams(), st.lists(st.integers(0, 400), max_size=20), st.binary(max_size=5))
@settings(max_examples=400)
def test_chunking_changes_neither_bytes_nor_events(stream: bytes, places: list[int], tail: bytes) -> None:
    data = stream + tail.replace(b"\n", b"x").replace(b"\r", b"x")
    buffer = sse.EventBuffer()
    pieces = [buffer.feed(piece) for piece in cut(data, places)]
    rest = buffer.rest()
    assert b"".join(pieces) + rest == data
    expected = list(sse.payloads(data))
    found = [payload for piece in [*pieces, rest] for payload in sse.payloads(piece)]
    assert found == expected
    assert b"".join(sse.split(data)) == data


@given(streams())
def test_payloads_are_what_the_standard_says(stream: bytes) -> None:
    lines, expected = stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"), []
    data: list[bytes] = []
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line:
            expected += [b"\n".join(data)] if data else []
            data = []
    assert list(sse.payloads(stream)) == expected


def test_whole_events_come_back_as_they_are() -> None:
    buffer = sse.EventBuffer()
    data = b"data: 1\n\ndata: 2\n\n"
    assert buffer.feed(data) is data
    assert buffer.feed(b"data: 3\n") == b""
    assert buffer.feed(b"\nda") == b"data: 3\n\n"
    assert list(sse.payloads(b"data: a\ndata:b\n\n: c\n\n")) == [b"a\nb"]


# sanitising

CLIENT_BODIES = st.fixed_dictionaries(
    {"prompt": st.text(max_size=5)},
    optional={key: st.one_of(st.none(), st.integers(0, 99), st.booleans()) for key in PREFILL_TABLE},
)


@given(CLIENT_BODIES)
def test_a_prefill_request_makes_one_token_at_once(body: dict[str, Any]) -> None:
    before = json.dumps(body)
    made = prefill_body(body, {"remote_port": 1})
    assert json.dumps(body) == before
    assert (made["stream"], made["max_tokens"], made["min_tokens"]) == (False, 1, 1)
    assert made["kv_transfer_params"] == {"remote_port": 1}
    for key, value in PREFILL_TABLE.items():
        if value is DROP and key != "kv_transfer_params":
            assert key not in made
        elif key in made and key != "kv_transfer_params":
            assert made[key] == value
    assert ("n" in made) == ("n" in body)


def test_nothing_shapes_the_token_of_a_prefill_request() -> None:
    """Else a seed, a grammar or a stop word could hurt a prefill engine, for a token that is not read."""
    penalties = dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), 1)
    choices = dict.fromkeys(("top_p", "top_k", "min_p", "seed", "logit_bias", "use_beam_search"), 1)
    words = dict.fromkeys(
        ("allowed_token_ids", "bad_words", "stop_token_ids", "stop", "structured_outputs"), 1
    )
    made = prefill_body({"prompt": "a", "temperature": 0.7, **penalties, **choices, **words}, {})
    assert set(made) == {"prompt", *ALWAYS, "kv_transfer_params"}
    assert made["temperature"] == 0
    assert prefill_body({"prompt": "a"}, {})["temperature"] == 0  # else vLLM takes the model's own default


def test_what_shapes_the_prompt_stays() -> None:
    shaping = ("messages", "tools", "tool_choice", "response_format", "chat_template_kwargs", "cache_salt")
    body = {key: [key] for key in (*shaping, "truncate_prompt_tokens", "add_special_tokens")}
    made = prefill_body(body, {})
    assert {key: made[key] for key in body} == body
    assert set(made) == {*body, *ALWAYS, "kv_transfer_params"}


# calls


@given(
    st.one_of(
        st.lists(st.text(max_size=3), max_size=5),
        st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    ),
    st.integers(1, 4),
)
def test_sub_requests_of_a_list(prompts: list[Any], n: int) -> None:
    call = parse_call("completion", json.dumps({"prompt": prompts, "n": n, "seed": 3}).encode())
    count = max(1, len(prompts))
    assert [child.index for child in call.sub_requests] == list(range(count * n))
    assert sum(child.counts_prompt for child in call.sub_requests) == count
    for child in call.sub_requests:
        assert "n" not in child.body
        assert child.body["seed"] == 3 + child.index % n
        assert child.body["prompt"] == (prompts[child.index // n] if prompts else [])
        assert child.prefill.tokens >= 1
        assert child.decode.tokens > child.prefill.tokens


@pytest.mark.parametrize(
    ("fields", "seeds"),
    [
        ({"n": "2", "seed": 7}, [7, 8]),
        ({"n": 2.0, "seed": "7"}, ["7", 8]),
        ({"n": True, "seed": 7}, [7]),
        ({"n": 3, "seed": -1}, [-1, -1, -1]),
        ({"n": 2, "seed": None}, [None, None]),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(fields: dict[str, Any], seeds: list[Any]) -> None:
    call = parse_call("completion", json.dumps({"prompt": "a", **fields}).encode())
    assert [sub_request.body["seed"] for sub_request in call.sub_requests] == seeds


def test_weights_are_tokens() -> None:
    def tokens(**body: Any) -> int:
        kind = "chat" if "messages" in body else "completion"
        return parse_call(kind, json.dumps(body).encode()).sub_requests[0].prefill.tokens  # type: ignore[arg-type]

    assert tokens(prompt=list(range(1000))) == 1000
    assert tokens(prompt="word" * 1000) == 1000
    image = {"type": "image_url", "image_url": {"url": "data:" + "x" * 100000}}
    assert tokens(messages=[{"role": "user", "content": [image]}]) < 1000, "an image's bytes are no text"
    assert tokens(messages=[{"role": "user", "content": "word" * 1000}]) in range(1000, 1010)


@given(st.binary(max_size=5000), st.binary(max_size=100))
def test_prefix_hashes_agree_on_what_is_common(text: bytes, more: bytes) -> None:
    short, long = prefix_hashes(text, 64), prefix_hashes(text + more, 64)
    assert long[: len(short)] == short
    assert len(short) == len(text) // 64


# balancing


def pool(count: int = 3) -> Pool:
    return Pool("decode", [Address("h", port) for port in range(1, count + 1)])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=60))
def test_loads_come_back_to_zero(steps: list[tuple[int, int]]) -> None:
    engines = pool()
    loads: list[Load] = []
    for action, tokens in steps:
        if action and loads:
            loads[tokens % len(loads)].release()  # again and again some of them
        else:
            loads.append(engines.acquire(Demand(tokens), 0.0))
        assert all(i.load_tokens >= 0 and i.requests >= 0 for i in engines.instances.values())
    for load in loads:
        load.release()
    assert [(i.load_tokens, i.requests) for i in engines.instances.values()] == [(0, 0)] * 3


def test_least_load_and_turns() -> None:
    engines = pool()
    assert len({engines.acquire(Demand(10), 0.0).instance for _ in range(3)}) == 3, "equals take turns"
    heavy = engines.acquire(Demand(100), 0.0)
    for _ in range(6):
        assert engines.acquire(Demand(10), 0.0).instance is not heavy.instance


def test_prefix_affinity_until_the_load_says_otherwise() -> None:
    engines = pool()
    demand = Demand(1000, prefix_hashes(b"x" * 4096), 250)
    first = engines.acquire(demand, 0.0)
    first.release()
    again = engines.acquire(demand, 0.0)
    assert again.instance is first.instance
    engines.acquire(Demand(10), 0.0)
    others = {engines.acquire(demand, 0.0).instance for _ in range(2)}
    assert others != {first.instance}, "a busy engine loses a request that it would have cached"
    first.instance.restarted()
    assert first.instance.matched_tokens(demand) == 0


def test_what_is_known_of_a_pair_ends_with_the_process() -> None:
    """A restarted engine may have another model, layout and transfer engine."""

    def pair() -> tuple[Instance, Instance]:
        prefill = Instance("prefill", Address("p", 1))
        decode = Instance("decode", Address("d", 2))
        decode.learn_layout("a", 100.0)
        return prefill, decode

    prefill, decode = pair()
    prefill.learn_layout("b", 100.0)
    assert not fits(prefill, decode, 99.0)
    assert fits(prefill, decode, 100.0), "a layout is known for a while"
    prefill.restarted()
    assert fits(prefill, decode, 99.0)
    prefill.learn_layout("b", 100.0)
    prefill.proven.add(decode.address)
    assert fits(prefill, decode, 99.0), "what was received counts more than what others report"
    prefill.restarted()
    prefill.learn_layout("b", 100.0)
    assert not fits(prefill, decode, 99.0)

    prefill, decode = pair()
    prefill.proven.add(decode.address)
    mismatched(prefill, decode, "", 0.0)  # a refusal without a digest concerns this pair only
    assert not fits(prefill, decode, 1.0)
    assert prefill.layout(1.0) == ""
    prefill.restarted()
    assert fits(prefill, decode, 1.0)


def test_health() -> None:
    health = Health()
    health.failed(0.0)
    health.failed(0.0)
    assert health.available(0.0)
    health.failed(0.0)
    assert not health.available(COOL_DOWN - 0.1)
    assert health.available(COOL_DOWN)
    health.failed(COOL_DOWN)
    assert not health.available(3 * COOL_DOWN - 0.1), "twice as long"
    health.succeeded()
    assert health.available(COOL_DOWN)
    assert not health.down
    health.probed(ok=False)
    assert health.down, "it was never there"
    health.probed(ok=True)
    health.probed(ok=False)
    assert not health.down
    health.probed(ok=False)
    assert health.down
    health.probed(ok=True)
    assert not health.down
    unreachable = Health()
    unreachable.failed(5.0, unreachable=True)
    assert not unreachable.available(5.0)


def test_choice_without_healthy_engines() -> None:
    engines = pool(2)
    one, two = engines.instances.values()
    one.health.failed(0.0, unreachable=True)
    assert engines.acquire(Demand(1), 0.0).instance is two
    two.health.failed(0.0, unreachable=True)
    engines.acquire(Demand(1), 0.0)  # all cool down: one of them is better than none
    for instance in (one, two):
        instance.health.probed(ok=False)
        instance.health.probed(ok=False)
    with pytest.raises(NoInstanceError):
        engines.acquire(Demand(1), 0.0)
    two.health.probed(ok=True)
    two.draining = True
    with pytest.raises(NoInstanceError):
        engines.acquire(Demand(1), 100.0)


# rendezvous

MESSAGE = {
    "request_id": "cmpl-x-0",
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_engine_id": "e",
    "remote_host": "10.0.0.1",
    "remote_port": 1,
    "remote_tp_size": 1,
    "remote_cached_tokens": 0,
    "later_field": [1],
}


def test_meetings() -> None:
    rendezvous, seen, notices = PendingRendezvous(), [], []
    outcome: Outcome = Outcome(loop=asyncio.new_event_loop())

    def start(message: Message) -> Outcome:
        seen.append(message)
        return outcome

    assert rendezvous.post(MESSAGE) == ("unknown", None)
    rendezvous.expect("cmpl-x-0", start, notices.append)
    with pytest.raises(ValueError, match="expected already"):
        rendezvous.expect("cmpl-x-0", start, notices.append)
    with pytest.raises(RequestRefused):
        rendezvous.post({**MESSAGE, "remote_host": 1})
    assert rendezvous.post(MESSAGE) == ("started", outcome)
    assert rendezvous.post(MESSAGE) == ("repeated", outcome)
    assert seen == [MESSAGE]
    told = {"request_id": "cmpl-x-0", "failure": "mismatch", "error": "dtype", "prefill_layout": "AB"}
    assert rendezvous.failed(told) == Notice("mismatch", "dtype", "ab")
    assert rendezvous.failed({**told, "prefill_layout": "x" * 999}) == Notice("mismatch", "dtype")
    assert len(notices) == 2
    with pytest.raises(RequestRefused):
        rendezvous.failed({**told, "error": 1})
    rendezvous.forget("cmpl-x-0")
    assert rendezvous.failed(told) is None
    assert rendezvous.post(MESSAGE) == ("unknown", None)
    outcome.get_loop().close()
    assert len(rendezvous) == 0


@pytest.mark.parametrize(
    "change",
    [
        {key: None}
        for key in ("request_id", "remote_engine_id", "remote_host", "remote_port", "remote_cached_tokens")
    ]
    + [
        {"remote_port": True},
        {"remote_port": 70000},
        {"remote_cached_tokens": -1},
        {"remote_secret": 1},
        {"remote_layout": []},
        *({"remote_host": host} for host in ("*", "0.0.0.0", "::", "", "decode_1:20150/x y", "a..b", "☃")),
        {"do_remote_decode": False},
    ],
)
def test_bad_messages(change: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        check_message({**MESSAGE, **change})


def test_ids_are_those_of_vllm() -> None:
    assert external_id("completion", "u") == "cmpl-u-0"
    assert external_id("chat", "u") == "chatcmpl-u"


# usage


def test_usage() -> None:
    assert cached_tokens({"prompt_tokens_details": {"cached_tokens": 7}}) == 7
    assert cached_tokens({"prompt_tokens_details": None}) == 0
    assert cached_tokens(None) is None
    usage = {"prompt_tokens": 15, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 15}}
    rewrite_usage(usage, UsageFacts())
    assert usage["prompt_tokens_details"] == {"cached_tokens": 15}, "decode's own, without a prefill"
    rewrite_usage(usage, UsageFacts(True, 12, completed_before=5))
    assert usage["prompt_tokens"] == 10
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == 18
    assert usage["prompt_tokens_details"] == {"cached_tokens": 10}, "no more than there is"
    usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    total = add_usage([(usage, True), (usage, False)])
    assert total["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert total.get("prompt_tokens_details") == usage.get("prompt_tokens_details")
    assert (total["prompt_tokens"], total["completion_tokens"], total["total_tokens"]) == (10, 16, 26)


# going on


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("completion", {"prompt": "a"}, {"prompt": "a b", "max_tokens": 14}),
        ("completion", {"prompt": "a", "max_tokens": 1}, {"prompt": "a b", "max_tokens": 1}),
        ("completion", {"prompt": [1], "max_tokens": 5}, {"prompt": [1, 8, 9], "max_tokens": 3}),
        ("completion", {"prompt": "a", "max_tokens": None}, {"prompt": "a b", "max_tokens": None}),
        (
            "chat",
            {"messages": [{"role": "user", "content": "q"}], "max_completion_tokens": 9},
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": " b"}],
                "max_completion_tokens": 7,
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
        (
            "chat",
            {
                "messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
                "continue_final_message": True,
            },
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}],
                    }
                ],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
        ),
    ],
)
def test_continued_bodies(kind: Any, body: dict[str, Any], expected: dict[str, Any]) -> None:
    before = json.dumps(body)
    assert continued_body(kind, body, " b", 2, [8, 9]) == expected
    assert json.dumps(body) == before


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"tool_choice": "required"},
    ],
)
def test_what_can_not_go_on(body: dict[str, Any]) -> None:
    transcript = Transcript("completion")
    transcript.check_continues(body)
    transcript.add(b'data: {"choices": [{"text": "a"}]}\n\n')
    with pytest.raises(CannotContinue):
        transcript.check_continues(body)
    with pytest.raises(CannotContinue):
        continued_body("completion", {"prompt": [1]}, "a", 1, None)


def test_a_continuation_counts_text_offsets_from_the_beginning() -> None:
    def logprobs(*offsets: int) -> dict[str, Any]:
        return {"tokens": ["t"] * len(offsets), "text_offset": list(offsets)}

    event: dict[str, Any] = {"choices": [{"text": "c", "logprobs": logprobs(0, 1)}]}
    made = continuation_event(event, Identity(), UsageFacts(), offset=5)
    assert made is not None
    assert made["choices"][0]["logprobs"] == logprobs(5, 6)
    first, second = ({"choices": [{"text": text, "logprobs": logprobs(0, 1)}]} for text in ("abc", "de"))
    joined = joined_answer("completion", first, second)["choices"][0]
    assert (joined["text"], joined["logprobs"]) == ("abcde", logprobs(0, 1, 3, 4))


def test_transcript_digests_long_answers() -> None:
    transcript = Transcript("completion")
    for index in range(5000):
        transcript.add(sse.event({"choices": [{"text": f"{index},", "token_ids": [index]}]}))
    assert transcript.text == "".join(f"{i}," for i in range(5000))
    assert transcript.token_ids == list(range(5000))
    assert transcript.pieces == 5000


ANY_JSON = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(1e300), st.sampled_from(["", "a", "é\n"])
)
PARTS = st.dictionaries(
    st.sampled_from(["content", "tool_calls", "reasoning", "role"]), ANY_JSON | st.lists(ANY_JSON, max_size=2)
)
CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "text": ANY_JSON,
        "delta": PARTS | ANY_JSON,
        "message": PARTS,
        "token_ids": st.lists(st.integers(0, 9), max_size=3) | ANY_JSON,
    },
)
EVENTS = st.one_of(
    st.fixed_dictionaries({"choices": st.lists(CHOICES | ANY_JSON, max_size=3) | ANY_JSON}).map(sse.event),
    st.sampled_from(
        [b": comment\n\n", b"data: [DONE]\n\n", b"data: {\n\n", b"data: 1,2\n\n", b"event: x\ndata: {}\n\n"]
    ),
)


@given(st.lists(EVENTS, max_size=6), st.sampled_from(["completion", "chat"]))
def test_events_of_the_usual_form_and_others_make_one_transcript(events: list[bytes], kind: Any) -> None:
    """Events parsed as one batch, and each by itself in a form that is never parsed as a batch."""
    batch, single = Transcript(kind), Transcript(kind)
    for event in events:
        batch.add(event)
        single.add(b": comment\n\n" + event)
    for name in ("text", "token_ids", "pieces", "plain"):
        assert getattr(batch, name) == getattr(single, name), name


# settings


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "0:0:0:0:0:0:0:0", "", "*"])
def test_wildcards_are_not_advertised(host: str) -> None:
    assert is_wildcard(host)
    engine = (Address("127.0.0.1", 1),)
    with pytest.raises(SettingsError, match="--advertise-host"):
        proxy_settings(host=host, port=9, prefillers=engine, decoders=())
    with pytest.raises(SettingsError, match="--advertise-host"):
        proxy_settings(host="127.0.0.1", port=9, prefillers=engine, decoders=(), advertise_host=host)
    made = proxy_settings(host=host, port=9, prefillers=engine, decoders=(), advertise_host="fd00::7")
    assert made.metaserver == f"http://[fd00::7]:9/v1/metaserver/{made.metaserver_token}"
    assert made.metaserver_token not in repr(made), "it must not reach a log"
    with pytest.raises(SettingsError, match="can't be called"):
        addresses([host], [1], "decoder")


@pytest.mark.parametrize(
    ("hosts", "ports", "message"),
    [
        (["a"], [1, 2], "as many"),
        (["a", "a"], [1, 1], "twice"),
        (["1.2.3"], [1], "no host"),
        (["1.2.3.999"], [1], "no host"),
        (["http://a"], [1], "no host"),
        (["a b"], [1], "no host"),
        (["a\0b"], [1], "no host"),
        (["☃"], [1], "no host"),
        (["a..b"], [1], "no host"),
        (["-a"], [1], "no host"),
        (["x" * 64], [1], "no host"),
        ([".".join(["x" * 60] * 5)], [1], "no host"),
        (["a"], [0], "no port"),
    ],
)
def test_bad_addresses(hosts: list[str], ports: list[int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        addresses(hosts, ports, "prefiller")


def test_good_addresses() -> None:
    found = addresses(["::1", "[fd00::1]", "node-1", "10.0.0.1", "a_b.c."], [1, 2, 3, 4, 5], "decoder")
    assert [str(a) for a in found] == ["[::1]:1", "[fd00::1]:2", "node-1:3", "10.0.0.1:4", "a_b.c.:5"]
    with pytest.raises(SettingsError, match="own address"):
        proxy_settings(host="node-1", port=3, prefillers=found, decoders=())
    with pytest.raises(SettingsError, match="as prefiller and as decoder"):
        proxy_settings(host="h", port=9, prefillers=found, decoders=found)


# failures


@given(st.binary(max_size=60))
def test_a_failure_is_one_event_whatever_the_engine_sent(body: bytes) -> None:
    event = HttpFailure(500, body).event()
    (payload,) = sse.payloads(event)
    parsed = sse.parse(payload)
    assert parsed is not None
    assert "error" in parsed
    assert event.count(b"\n") == 2


def test_no_header_is_smuggled() -> None:
    with pytest.raises(ValueError, match="line end"):
        request_bytes("POST", "/", "h:1", [("x", "a\r\nb: c")], b"")


def test_control_events_are_lost_without_the_buffer() -> None:
    data = b'data: {"a": 1}\n\ndata: 2\n\n'
    pieces = [data[:9], data[9:]]
    assert [payload for piece in pieces for payload in sse.payloads(piece)] != list(sse.payloads(data))


def test_numbers_that_take_long_are_refused_and_digits_in_text_are_not() -> None:
    """15,000 numbers of 4,000 digits took seconds to read, and longer to write for each engine."""
    digits, filler = b"7" * 4000, b'"x": "' + b"y" * 70_000 + b'"'
    for number in (digits, b"-" + digits, b"0." + digits, b"1e" + digits, digits[:100]):
        for text in (b'{%b, "a": [%b]}' % (filler, number), b'{"a": %b, %b}' % (number, filler)):
            with pytest.raises(msgspec.DecodeError, match="digits"):
                decode_json(text)
    for text in (digits, b'\\" ' + digits, b"\\\\", b", " + digits + b" ,", b"[" + digits):
        assert decode_json(b'{%b, "a": "%b", "b": 12}' % (filler, text))["b"] == 12
