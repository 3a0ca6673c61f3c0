"""Whatever a request carries, through every hook: no error, a defined outcome, neighbours unharmed."""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from vllm_kvoffload.connectors.multi import KVOffloadMultiConnector
from vllm_kvoffload.connectors.sfa_remote_d2h import connector as module
from vllm_kvoffload.connectors.sfa_remote_d2h.connector import SfaRemoteD2HConnector
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import LayoutMetadata, ReceiveReport
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure

BLOCK, TOKENS = 4, 10
METASERVER = "http://127.0.0.1:9000/v1/metaserver/token"
RECEIVE = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": METASERVER,
           "failures": f"{METASERVER}/failed"}  # fmt: skip
HAND_OVER = {
    "do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "d", "remote_host": "127.0.0.1",
    "remote_port": 20050, "remote_tp_size": 1, "remote_pcp_size": 1, "remote_dcp_size": 1,
    "remote_cached_tokens": 0, "remote_secret": "ab12", "remote_layout": "cd34",
}  # fmt: skip


def deep(levels: int = 3000) -> object:
    made: object = 1
    for number in range(levels):
        made = [made] if number % 2 else {"a": made}
    return made


HOSTILE = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**5000, float("nan"), float("inf"), 1e308, "", " ",
    "x", "false", "\0", "a\r\nb", "\udcff", "\u2603", "x" * 3_000_000, [], [[]], {}, {"a": 1}, deep(), b"x",
    "http://[::1", "http://]", "http://localhost:0/", "http://localhost:99999999/", "http://localhost:x/",
    "http://a..b/", f"http://{'a' * 64}/", "http://\u2603/", "http://u:p@localhost/", "http://localhost\0/",
    "http://localhost/\r\nHost: x", "http://169.254.169.254/", "file:///etc/passwd", "decode_1:20150/x y",
    "*", "a..b", "127.1", "[::1", "fe80::1%eth0", "0.0.0.0", object(),
]  # fmt: skip

KEYS = [*RECEIVE, *HAND_OVER, "do_virtual", "batch_kv_transfer_params"]
TABLE = [
    *HOSTILE,
    *({**base, key: value} for base in (RECEIVE, HAND_OVER) for key in KEYS for value in HOSTILE),
    *({"batch_kv_transfer_params": {name: value}} for name in ("cmpl-a-0", "x") for value in HOSTILE),
    *({key: True} for key in KEYS),
]

hostile = st.integers(0, len(HOSTILE) - 1).map(lambda index: HOSTILE[index])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | hostile,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(), inner),
    max_leaves=8,
)
params_values = json_values | st.builds(
    lambda base, more: {**base, **more},
    st.sampled_from([RECEIVE, HAND_OVER]),
    st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
)


def make(producer: bool, monkeypatch: pytest.MonkeyPatch) -> SfaRemoteD2HConnector:
    """The scheduler's half, by its own constructor; posts are collected."""
    monkeypatch.setattr(module, "get_ip", lambda: "127.0.0.1")
    role = "kv_producer" if producer else "kv_consumer"
    transfer = SimpleNamespace(
        kv_connector="SfaRemoteD2HConnector",
        kv_role=role,
        kv_port=20050,
        engine_id="e",
        kv_connector_extra_config={"transfer_backend": "nixl"},
    )
    config = SimpleNamespace(
        additional_config={},
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, data_parallel_size=1, data_parallel_index=0, master_addr="127.0.0.1"
        ),
        cache_config=SimpleNamespace(block_size=BLOCK),
    )
    caches = SimpleNamespace(kv_cache_groups=[None], num_blocks=8)
    made = SfaRemoteD2HConnector(config, KVConnectorRole.SCHEDULER, caches)
    made.set_xfer_handshake_metadata({0: LayoutMetadata("ef56")})
    made.posts, made.notices = [], []
    if not producer:
        rendezvous = made.connector_scheduler._rendezvous
        rendezvous.post = lambda *post: made.posts.append(post)
        rendezvous.notify = lambda *notice: made.notices.append(notice) or True
    return made


def joined(part: SfaRemoteD2HConnector) -> KVOffloadMultiConnector:
    made = KVOffloadMultiConnector.__new__(KVOffloadMultiConnector)
    made._connectors, made._all_support_hma = [part], True
    made._requests_to_connector, made._extra_async_saves = {}, {}
    return made


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        yield {producer: make(producer, patch) for producer in (False, True)}


def request(params: object, req_id: str = "cmpl-a-0-12345678", **more) -> Request:
    made = Request(req_id, list(range(TOKENS)), SamplingParams(max_tokens=4), None, **more)
    made.kv_transfer_params = params  # past the checks that vLLM's front end has for some of it
    return made


class Blocks:
    def get_block_ids(self):
        return ([5, 6, 7],)


def step(*requests: Request) -> SimpleNamespace:
    new = [
        SimpleNamespace(req_id=r.request_id, block_ids=([5, 6, 7],), num_computed_tokens=0) for r in requests
    ]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens={r.request_id: TOKENS for r in requests},
        scheduled_spec_decode_tokens={},
        preempted_req_ids=None,
    )


def run(part: SfaRemoteD2HConnector, *requests: Request, through_multi: bool = False):
    """Calls all hooks in vLLM's order, twice where vLLM may. Returns metadata and the kept requests."""
    part.posts.clear()
    part.notices.clear()
    outer = joined(part) if through_multi else part
    for asked in requests:
        outer.on_new_request(asked)
        for _ in range(2):
            count, _ = outer.get_num_new_matched_tokens(asked, 0)
        outer.update_state_after_alloc(asked, Blocks(), count)
        outer.update_state_after_alloc(asked, Blocks(), 0)
    made = outer.build_connector_meta(step(*requests))
    made = made.metadata[0] if through_multi else made
    pickle.loads(pickle.dumps(made))  # on its way to the workers
    names = {asked.request_id for asked in requests}
    report = ReceiveReport({name: Failure("as a rank says", "prefill") for name in names})
    if not through_multi:
        part.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    kept = [asked.request_id for asked in requests if outer.request_finished_all_groups(asked, ([5],))[0]]
    outer.update_connector_output(KVConnectorOutput(finished_sending=names, finished_recving=names))
    assert outer.reset_cache()
    outer.build_connector_meta(step())
    for _, _, body in part.posts:
        json.dumps(body).encode()
    for url, body in part.notices:
        assert url.startswith("http://127.0.0.1")
        json.dumps(body).encode()
    return made, kept


def check_decode(part: SfaRemoteD2HConnector, asked: Request, **options) -> None:
    """Computed here, or received, or refused with a reason; its neighbour is received."""
    other = request(RECEIVE, "cmpl-b-0-12345678")
    made, _ = run(part, asked, other, **options)
    receives = {receive.req_id: receive for receive in made.receives}
    refused = dict(made.answered)
    posts = {post[0]: post for post in part.posts}
    assert len(made.receives) == len(receives)
    assert len(part.posts) == len(posts)
    assert other.request_id in posts
    assert receives[other.request_id].blocks == (5, 6, 7)
    assert other.request_id not in refused
    assert posts[other.request_id][2]["remote_layout"] == "ef56"
    assert not (set(refused) & set(posts))
    assert set(refused) <= set(receives)
    for reason in refused.values():
        assert 0 < len(reason) < 500
        assert reason.isascii()
        assert reason.isprintable()
    if asked.request_id in receives:
        assert receives[asked.request_id].wanted == (5, 6, 7)
        virtual = isinstance(asked.kv_transfer_params, dict) and dict.get(
            asked.kv_transfer_params, "do_virtual"
        )
        assert asked.request_id in {**posts, **refused} or virtual
    if asked.request_id in posts:
        assert posts[asked.request_id][1].startswith(("http://127.0.0.1", "http://localhost", "http://[::1]"))


def check_prefill(part: SfaRemoteD2HConnector, asked: Request, **options) -> None:
    """Handed over to a decode engine of this machine, or not; its neighbour is handed over."""
    other = request(HAND_OVER, "cmpl-b-0-12345678")
    made, kept = run(part, asked, other, **options)
    steps = {one.req_id: one for one in made.steps}
    assert len(steps) == len(made.steps)
    assert (steps[other.request_id].blocks, steps[other.request_id].final) == ((5, 6, 7), True)
    assert set(kept) == set(steps)
    for found in [*steps.values(), *made.declined]:
        target = found.target
        assert target.host in ("127.0.0.1", "localhost", "::1")
        assert all(type(number) is int for number in (target.port, target.tp_size))
        assert 1 <= target.port <= 65535
        assert len(found.request) <= 256


@pytest.mark.parametrize("through_multi", [False, True], ids=["alone", "multi"])
@pytest.mark.parametrize("producer", [False, True], ids=["decode", "prefill"])
def test_the_table(parts, producer, through_multi):
    check = check_prefill if producer else check_decode
    for params in TABLE:
        check(parts[producer], request(params), through_multi=through_multi)


@given(params_values)
def test_anything_on_decode(parts, params):
    check_decode(parts[False], request(params))


@given(params_values)
def test_anything_on_prefill(parts, params):
    check_prefill(parts[True], request(params))


IDS = [
    "", "a", "-12345678", "123456789", "a-12345678", "a\r\nb-12345678", "\0-12345678", "\udcff-12345678",
    "a\u2028-12345678", *(f"{'a' * length}-12345678" for length in (256, 257, 100_000)),
]  # fmt: skip


@pytest.mark.parametrize("producer", [False, True], ids=["decode", "prefill"])
def test_odd_request_ids(parts, producer):
    for req_id in IDS:
        asked = request(HAND_OVER if producer else RECEIVE, req_id)
        (check_prefill if producer else check_decode)(parts[producer], asked)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("producer", [False, True], ids=["decode", "prefill"])
def test_prompts_of_embeddings(parts, producer, mixed):
    """They have no token ids by which the other side could tell whose KV it gets."""
    embeddings = torch.zeros(TOKENS, 4)
    tokens = list(range(TOKENS)) if mixed else None
    asked = Request("cmpl-a-0-12345678", tokens, SamplingParams(max_tokens=4), None, prompt_embeds=embeddings)
    asked.kv_transfer_params = dict(HAND_OVER if producer else RECEIVE)
    (check_prefill if producer else check_decode)(parts[producer], asked)
    made, kept = run(parts[producer], asked)
    reasons = [one.reason for one in made.declined] if producer else [reason for _, reason in made.answered]
    assert ["token ids alone" in reason for reason in reasons] == [True]
    assert not kept


class Trap(dict):
    """Parameters whose every use raises, unlike any JSON value: stands for unforeseen errors."""

    def get(self, *_):
        raise RecursionError("trap")

    def __bool__(self):
        return True


class NoTokens(list):
    def __iter__(self):
        raise MemoryError("trap")


@pytest.mark.parametrize("producer", [False, True], ids=["decode", "prefill"])
def test_what_nobody_thought_of_ends_one_request(parts, producer):
    """The guard."""
    broken = request(dict(HAND_OVER if producer else RECEIVE), "cmpl-u-0-12345678")
    broken.prompt_token_ids = NoTokens(range(TOKENS))
    for asked in (broken, request(Trap(), "cmpl-t-0-12345678")):
        (check_prefill if producer else check_decode)(parts[producer], asked)
        made, kept = run(parts[producer], asked)
        assert not kept
        if not producer:
            ((req_id, reason),) = made.answered
            assert (req_id, "failed with" in reason) == (asked.request_id, True)
