"""Two prefill and two decode servers behind real proxies: the same answers as one engine without offload.

The reference is a prefill server asked directly: without a rendezvous it is an engine of its own. The second
decode server recomputes what it can't load, has few blocks, and reads wrong KV when a test says so.
"""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import import_path
from tests.connectors.meta_server import meta_server
from tests.connectors.pd_servers import (
    HOST,
    LEASE_S,
    Answer,
    Engine,
    Fleet,
    chat,
    check_same,
    completion,
    fleet,
    kill,
    metric,
    post,
    reset,
    wait_for,
    wait_free,
)
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.demo.text import load_text

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow

TOPOLOGIES = {"1P1D": ((0,), (0,)), "2P1D": ((0, 1), (0,)), "1P2D": ((0,), (0, 1)), "other": ((0,), (1,))}
POSTS = "kvoffload_proxy_metaserver_posts_total"
PULLED = "vllm:external_prefix_cache_hits_total"  # tokens
BLOCK = 64
SPOILED = """
from pathlib import Path
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Peer

shares = Peer.shares


def spoiled(self, *arguments):
    main, indexer = shares(self, *arguments)
    without = Path({flag!r}).read_text()
    return () if "main" in without else main, () if "indexer" in without else indexer


Peer.shares = spoiled
"""


@pytest.fixture(scope="module")
def flag(tmp_path_factory) -> Path:
    """A file that names the reads to be skipped by the second decode server."""
    path = tmp_path_factory.mktemp("patch") / "without"
    path.write_text("")
    (path.parent / "sitecustomize.py").write_text(SPOILED.format(flag=str(path)))
    return path


@pytest.fixture(scope="module")
def servers(flag, tmp_path_factory):
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("model") / "glm-tiny", MODELS["glm-tiny"])
    other = Engine(
        arguments=("--num-gpu-blocks-override", "40"),
        transfer={"kv_load_failure_policy": "recompute"},
        environment={"PYTHONPATH": import_path(flag.parent)},
    )
    with fleet(
        checkpoint,
        tmp_path_factory.mktemp("pd"),
        prefill=(Engine(), Engine()),
        decode=(Engine(), other),
        topologies=TOPOLOGIES,
    ) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(length)]


def essay(characters: int, start: int) -> str:
    """Text of the demo's essay; it has 2 to 3 characters per token here."""
    return load_text()[start : start + characters]


# ------------------------------------------------------------------------------------------ the same answers


@pytest.mark.parametrize("length", [1, 64, 65, 256, 257, 1500])
def test_prompt_lengths(servers, length):
    """Below and above top-k (64), whole blocks and not, one chunk and several (of 256)."""
    before = metric(servers.decode[0], PULLED)
    answer = servers.check(completion(prompt(length, seed=length)))
    assert answer.cached_tokens == 0
    assert metric(servers.decode[0], PULLED) - before == length


SHAPES = {
    "text": completion(essay(700, 0)),
    "top-logprobs": completion(essay(400, 1000), logprobs=5),
    "echo": {**completion(essay(300, 2000)), "logprobs": None, "echo": True},
    "stop": completion(essay(600, 3000), 40, stop=["e", "a"], include_stop_str_in_output=True),
    "sampled": completion(essay(600, 4000), temperature=1.0, seed=3),
    "truncated": completion(essay(900, 5000), truncate_prompt_tokens=150),
    "texts": completion([essay(500, 6000), essay(80, 7000), essay(900, 8000)]),
    "token-ids": completion([prompt(300, seed=20), prompt(30, seed=21)]),
    "two-sampled": completion(essay(500, 9000), n=2, temperature=1.0, seed=5),
    "texts-two-sampled": completion([essay(300, 9500), essay(90, 9900)], n=2, temperature=1.0, seed=6),
    "chat": chat(essay(800, 10000)),
    "chat-short": chat("Why?", max_completion_tokens=7),
    "chat-two-sampled": chat(essay(500, 11000), n=2, temperature=1.0, seed=7),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kinds_of_requests(servers, shape, stream):
    """Returns the whole answer with usage. Streamed: sent after the other, so with its KV in the caches."""
    body = {**SHAPES[shape], "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = servers.check(body)
    assert answer.body["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("make", [completion, chat])
def test_two_greedy_choices_are_equal(servers, make, stream):
    """An engine refuses them, the proxy asks twice."""
    body = {**make(essay(600, 12000)), "stream": stream}
    assert servers.reference({**body, "n": 2}).status == 400
    answer, reference = servers.ask({**body, "n": 2}), servers.reference(body)
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1]
    for choice in answer.body["choices"]:
        check_same(Answer(200, {**reference.body, "choices": [{**choice, "index": 0}]}), reference)


WRONG = {
    "too long": {"prompt": prompt(2100, seed=22)},
    "temperature": {"temperature": -1},
    "max_tokens": {"max_tokens": 0},
    "logprobs": {"logprobs": 99},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_engine_refuses_is_refused_alike(servers, wrong, stream):
    """With a status, also where an engine would begin a stream and say it there."""
    body = {**completion(prompt(100, seed=23)), **WRONG[wrong]}
    answer, reference = servers.ask({**body, "stream": stream}), servers.reference(body)
    assert answer.status == reference.status == 400
    assert answer.body["error"]["message"] == reference.body["error"]["message"]


# ---------------------------------------------------------------------------------------------------- caches


def test_cached_blocks_are_not_pulled_again(servers):
    shared = prompt(320, seed=1)
    for tail, cached in [(prompt(100, seed=2), 0), (prompt(180, seed=3), 320)]:
        before = metric(servers.decode[0], PULLED)
        answer = servers.check(completion(shared + tail))
        assert metric(servers.decode[0], PULLED) - before == len(shared + tail) - cached
        assert answer.cached_tokens == cached, "prefill has them too"


def test_a_prefix_hit_on_prefill_alone(servers):
    """Prefill has blocks in its cache that decode lacks: they are published all the same."""
    shared = prompt(400, seed=4)
    post(servers.prefill[0].port, completion([*shared, 7, 8, 9]))
    before = metric(servers.decode[0], PULLED)
    answer = servers.check(completion(shared + prompt(50, seed=5)))
    assert answer.cached_tokens == 400 // BLOCK * BLOCK
    assert metric(servers.decode[0], PULLED) - before == 450


def test_a_prefix_hit_on_decode_alone(servers):
    """Decode has blocks that this prefill lacks; it reports prefill's cache, not its own."""
    shared = prompt(300, seed=6)
    post(servers.decode[0].port, completion([*shared, 7, 8, 9]))
    before = metric(servers.decode[0], PULLED)
    answer = servers.check(completion(shared + prompt(100, seed=7)))
    assert answer.cached_tokens == 0
    assert metric(servers.decode[0], PULLED) - before == 400 - 300 // BLOCK * BLOCK


# ------------------------------------------------------------------------------------------------ topologies


@pytest.mark.parametrize("topology", ["1P1D", "2P1D", "1P2D"])
def test_several_at_once(servers, topology):
    """Streamed and whole, completions and chats side by side; every engine of the topology takes part."""
    seed = 100 * len(topology) + list(TOPOLOGIES).index(topology)
    bodies = [completion(prompt(length, seed + length)) for length in (30, 300, 500, 90, 620)]
    bodies.append(chat(essay(700, 13000 + seed)))
    for body in bodies[::2]:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    prefill, decode = TOPOLOGIES[topology]
    engines = [*(servers.prefill[n] for n in prefill), *(servers.decode[n] for n in decode)]
    before = [metric(engine, "vllm:request_success_total") for engine in engines]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: servers.ask(body, topology), bodies))
    assert all(metric(e, "vllm:request_success_total") > n for e, n in zip(engines, before, strict=True))
    for body, answer in zip(bodies, answers, strict=True):
        check_same(answer, servers.reference(body))
    for engine in engines:
        wait_free(engine, 20)


# --------------------------------------------------------------------------- faults must show, or be repaired


@pytest.mark.parametrize("without", ["main", "indexer", "main indexer"])
def test_the_control_without_some_kv_differs(servers, flag, without):
    """Attention then reads stale or unwritten rows: above top-k the answer changes."""
    body = completion(prompt(700, seed=31))
    flag.write_text(without)
    try:
        answer = servers.ask({**body, "cache_salt": without}, "other")
    finally:
        flag.write_text("")
    reference = servers.reference(body)
    assert answer.status == 200
    assert answer.tokens != reference.tokens
    check_same(servers.ask(body, "other"), reference)


def test_recompute(servers):
    """No prefill takes place, so decode computes the prompt itself, from its cached prefix."""
    shared = prompt(256, seed=32)
    servers.check(completion(shared + [9] * 10), "other")
    for tokens in (prompt(300, seed=33), shared + prompt(200, seed=34)):
        check_same(servers.orphan(completion(tokens), 1), servers.reference(completion(tokens)))


def test_preempted_on_decode(servers):
    """Blocks run out on decode while requests grow: what is preempted is computed there.

    Any three of the four are too many once they are grown, however far apart prefill hands them over.
    """
    bodies = [completion(prompt(560, seed=300 + n), 300) for n in range(4)]
    before = metric(servers.decode[1], "vllm:num_preemptions_total")
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda body: servers.ask(body, "other"), bodies))
    assert metric(servers.decode[1], "vllm:num_preemptions_total") > before
    for body, answer in zip(bodies, answers, strict=True):
        check_same(answer, servers.reference(body))
    wait_free(servers.decode[1], 20)


def test_a_request_without_transfer_is_computed_by_decode_itself(servers):
    body = completion(prompt(300, seed=8))
    check_same(post(servers.decode[0].port, body), servers.reference(body))


# --------------------------------------------------------------------------------------------------- failures


def test_a_request_that_nobody_prefills_fails_alone(servers):
    begin = time.monotonic()
    assert servers.orphan(completion(prompt(100, seed=9), 4)).status == 500
    assert time.monotonic() - begin < 20
    wait_free(servers.decode[0], 10)


HOSTILE = {
    "no metaserver": {"do_remote_prefill": True},
    "no address": {"do_remote_prefill": True, "metaserver": "http://[::1"},
    "another host": {"do_remote_prefill": True, "metaserver": "http://169.254.169.254/"},
    "a list": {"do_remote_prefill": True, "metaserver": ["http://127.0.0.1/"]},
    "no flag": {"do_remote_prefill": "yes", "metaserver": "http://127.0.0.1/"},
}


def test_hostile_parameters_cost_one_request_each(servers):
    """On decode an error at once, on prefill an answer; both engines go on, and nothing is held."""
    decode, prefill = servers.decode[0], servers.prefill[0]
    body = completion(prompt(100, seed=40), 4)
    for params in HOSTILE.values():
        begin = time.monotonic()
        assert post(decode.port, {**body, "kv_transfer_params": params}).status == 500
        assert time.monotonic() - begin < LEASE_S
    for host in ("*", "169.254.169.254", "decode_1:20150/x y", "a..b", 5):
        params = {"do_remote_decode": True, "remote_host": host, "remote_port": 20050, "remote_tp_size": 1}
        params["remote_cached_tokens"] = 0
        assert post(prefill.port, {**body, "kv_transfer_params": params}).status == 200
    for engine in (decode, prefill):
        wait_free(engine, 10)
    servers.check(completion(prompt(120, seed=41)))


def test_the_proxy_hears_why_a_request_failed(servers):
    with meta_server() as told:
        told.status = 404
        params = {"do_remote_prefill": True, "metaserver": told.url, "failures": f"{told.url}/failed"}
        body = {**completion(prompt(100, seed=42), 4), "kv_transfer_params": params}
        assert post(servers.decode[0].port, body, {"X-Request-Id": "abc"}).status == 500
        wait_for(lambda: len(told.bodies) == 2, 10, "no notice")
        rendezvous, notice = told.bodies
    assert rendezvous["request_id"] == notice["request_id"] == "cmpl-abc-0"
    assert len(rendezvous["remote_secret"]) == 32
    assert len(rendezvous["remote_layout"]) == 64
    assert (notice["failure"], notice["error"]) == ("rendezvous", "the metaserver answered 404")


def test_a_reset_succeeds_within_a_lease(servers):
    """On an idle engine, and not while decode may read KV computed before."""
    body = completion(prompt(300, seed=43), 4)
    servers.check(body)
    for engine in (servers.prefill[0], servers.decode[0]):
        wait_for(lambda: reset(engine), LEASE_S, "no reset")  # noqa: B023
    assert servers.ask(body).cached_tokens == 0
    with socket.socket() as unserved:
        unserved.bind((HOST, 0))
        params = {"do_remote_decode": True, "remote_host": HOST, "remote_port": unserved.getsockname()[1]}
        params |= {"remote_tp_size": 1, "remote_cached_tokens": 0}
        post(servers.prefill[0].port, {**body, "max_tokens": 1, "kv_transfer_params": params})
        assert not reset(servers.prefill[0])
        wait_for(lambda: reset(servers.prefill[0]), LEASE_S + 3, "no reset")


def wait_for_rendezvous(servers: Fleet, count: float) -> None:
    wait_for(lambda: metric(servers.proxies["1P1D"], POSTS) >= count, 30, "decode did not post")


def test_prefill_dies_while_decode_pulls(servers):
    """The request fails, nothing wrong is said; decode serves on with another prefill."""
    before = metric(servers.proxies["1P1D"], POSTS)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(servers.ask, completion(prompt(1900, seed=13)))
        wait_for_rendezvous(servers, before + 1)
        kill(servers.prefill[0])
        servers.prefill[0].stop(1)
        assert asked.result(60).status >= 500
    wait_free(servers.decode[0], 20)
    servers.check(completion(prompt(450, seed=14)), "2P1D")
