"""Two real servers: the same tokens as one engine without offload, and faults that hit one request at most.

The reference is the prefill server itself, which computes a request alone when nobody asks for its KV.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from pd_servers import LEASE_S, READY_S, Answer, Pair, completion, kill, metric, pair, post

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("model") / "glm-tiny", MODELS["glm-tiny"])


@pytest.fixture(scope="module")
def servers(checkpoint, tmp_path_factory):
    with pair(checkpoint, tmp_path_factory.mktemp("pd")) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(length)]


def check_same(answer: Answer, reference: Answer) -> None:
    assert (answer.status, reference.status) == (200, 200)
    assert answer.tokens == reference.tokens
    assert max(abs(a - b) for a, b in zip(answer.logprobs, reference.logprobs, strict=True)) < TOLERANCE


def wait_free(port: int, deadline_s: float) -> float:
    """Seconds until a server holds no KV block."""
    begin = time.monotonic()
    while metric(port, "vllm:kv_cache_usage_perc") or metric(port, "vllm:num_requests_running"):
        assert time.monotonic() - begin < deadline_s, "KV blocks are still held"
        time.sleep(0.2)
    return time.monotonic() - begin


def start_request(servers: Pair, tokens: list[int]) -> http.client.HTTPConnection:
    """A request whose client may go away."""
    parent = uuid.uuid4().hex
    body = completion(tokens, 200)
    servers.meta.bodies[parent] = body
    params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": servers._url}
    connection = http.client.HTTPConnection("127.0.0.1", servers.decode_port, timeout=60)
    headers = {"Content-Type": "application/json", "X-Request-Id": parent}
    connection.request("POST", "/v1/completions", json.dumps({**body, "kv_transfer_params": params}), headers)
    return connection


def wait_for_messages(servers: Pair, count: int) -> None:
    end = time.monotonic() + 30
    while len(servers.meta.messages) < count:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("length", [10, 64, 65, 200, 256, 700, 1500])
def test_same_tokens_as_one_engine(servers, length):
    """Below and above top-k (64), whole blocks and not, one chunk and several (of 256)."""
    tokens = prompt(length, seed=length)
    check_same(servers.ask(tokens), servers.reference(tokens))
    message = servers.meta.messages[-1]
    assert set(message) == {
        "request_id", "do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_host",
        "remote_port", "remote_tp_size", "remote_pcp_size", "remote_dcp_size", "remote_cached_tokens",
    }  # fmt: skip
    assert message["remote_cached_tokens"] == 0


def test_cached_blocks_are_not_pulled_again(servers):
    shared = prompt(320, seed=1)
    for tail, cached in [(prompt(100, seed=2), 0), (prompt(180, seed=3), 320)]:
        tokens = shared + tail
        check_same(servers.ask(tokens), servers.reference(tokens))
        assert servers.meta.messages[-1]["remote_cached_tokens"] == cached


def test_a_prefix_hit_on_prefill(servers):
    """Prefill has blocks in its cache that decode lacks: they are published all the same."""
    shared = prompt(400, seed=4)
    servers.reference([*shared, 7, 8, 9])
    tokens = shared + prompt(50, seed=5)
    check_same(servers.ask(tokens), servers.reference(tokens))


def test_several_at_once(servers):
    prompts = [prompt(length, seed=100 + length) for length in (30, 300, 500, 90, 620, 257)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(servers.ask, prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        check_same(answer, servers.reference(tokens))
    for port in (servers.prefill_port, servers.decode_port):
        wait_free(port, 20)


def test_a_client_that_goes_away_frees_both_sides(servers):
    before = len(servers.meta.messages)
    connections = [start_request(servers, prompt(1200, seed=200 + n)) for n in range(3)]
    wait_for_messages(servers, before + 1)
    for connection in connections:
        connection.close()
    for port in (servers.decode_port, servers.prefill_port):
        assert wait_free(port, 30) < 30
    tokens = prompt(333, seed=6)
    check_same(servers.ask(tokens), servers.reference(tokens))


def test_a_metaserver_that_refuses_fails_the_request_only(servers):
    parent = uuid.uuid4().hex  # which the metaserver does not know
    params = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": servers._url}
    body = {**completion(prompt(100, seed=7), 4), "kv_transfer_params": params}
    begin = time.monotonic()
    answer = post(servers.decode_port, "/v1/completions", body, {"X-Request-Id": parent})
    assert answer.status == 500
    assert time.monotonic() - begin < 20
    wait_free(servers.decode_port, 10)


def test_a_request_without_transfer_is_computed_by_decode_itself(servers):
    tokens = prompt(300, seed=8)
    alone = post(servers.decode_port, "/v1/completions", completion(tokens, 12), {})
    check_same(alone, servers.reference(tokens))


def test_decode_restarts(servers):
    """Prefill gets its blocks back when the lease ends, and works with decode's next session."""
    before = len(servers.meta.messages)
    connection = start_request(servers, prompt(1500, seed=9))
    wait_for_messages(servers, before + 1)
    time.sleep(0.1)
    kill(servers.decode)
    servers.decode.stop(1)
    connection.close()
    assert wait_free(servers.prefill_port, 60) < LEASE_S + 20
    servers.start_decode().wait_ready(READY_S)
    tokens = prompt(450, seed=10)
    check_same(servers.ask(tokens), servers.reference(tokens))


def test_prefill_dies_while_decode_pulls(servers):
    """The request fails, nothing wrong is said; decode serves on with the next prefill."""
    got: list[Answer] = []
    before = len(servers.meta.messages)
    asking = threading.Thread(target=lambda: got.append(servers.ask(prompt(1900, seed=11))))
    asking.start()
    wait_for_messages(servers, before + 1)
    time.sleep(0.1)
    kill(servers.prefill)
    servers.prefill.stop(1)
    asking.join(60)
    assert got
    assert got[0].status == 500
    wait_free(servers.decode_port, 20)
    servers.start_prefill().wait_ready(READY_S)
    tokens = prompt(450, seed=12)
    check_same(servers.ask(tokens), servers.reference(tokens))
