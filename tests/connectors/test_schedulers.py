"""The scheduler's halves, with stand-ins for vLLM's requests and scheduler output."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import ReceiveReport
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure
from vllm_kvoffload.connectors.sfa_remote_d2h.scheduler import DecodeScheduler, PrefillScheduler
from vllm_kvoffload.connectors.sfa_remote_d2h.wire import prompt_digest
from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import CacheLayer, plan_buffers
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.hosts import HostList
from vllm_kvoffload.settings.offload import EngineFacts, SparseOffloadConfig
from vllm_kvoffload.settings.remote_d2h import parse_remote_d2h
from vllm_kvoffload.settings.store import parse_ascend_store

BLOCK = 4
REMOTE = {
    "do_remote_prefill": False, "do_remote_decode": True, "remote_engine_id": "d", "remote_host": "10.0.0.2",
    "remote_port": 20050, "remote_tp_size": 1, "remote_pcp_size": 1, "remote_dcp_size": 1,
    "remote_cached_tokens": 0,
}  # fmt: skip


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict | None = None
    num_computed_tokens: int = 0

    @property
    def num_prompt_tokens(self):
        return len(self.prompt_token_ids)


def request(name="cmpl-a-0", length=10, params=None):
    return Request(f"{name}-12345678", list(range(length)), params)


@dataclass
class Output:
    """vLLM's SchedulerOutput, as far as it is read."""

    new: list[tuple[str, list[int], int]] = field(default_factory=list)
    cached: list[tuple[str, list[int], int]] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def scheduled_new_reqs(self):
        return [SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c) for r, b, c in self.new]

    @property
    def scheduled_cached_reqs(self):
        return SimpleNamespace(
            req_ids=[r for r, _, _ in self.cached],
            new_block_ids=[(b,) if b else None for _, b, _ in self.cached],
            num_computed_tokens=[c for _, _, c in self.cached],
        )


class Blocks:
    def __init__(self, ids):
        self.ids = ids

    def get_block_ids(self):
        return (self.ids,)


@pytest.fixture
def decode():
    config = parse_remote_d2h(
        "kv_consumer", 20050, {"transfer_backend": "nixl", "metaserver_hosts": ["proxy"]}, "cpu"
    )
    made = DecodeScheduler(config, BLOCK, {"remote_host": "10.0.0.2"})
    made.posted, made.told = [], []
    made._rendezvous.post = lambda *args: made.posted.append(args)
    made._rendezvous.notify = lambda *args: made.told.append(args) or True
    yield made
    made.close()


METASERVER = "http://proxy:9000/v1/metaserver/token"
FAILED = f"{METASERVER}/failed"


def remote_prefill(url=METASERVER, **more):
    return {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url, **more}


def test_decode_asks_for_all_but_what_it_has(decode):
    asked = request(params=remote_prefill())
    assert decode.matched_tokens(asked, 4) == (6, True)
    decode.allocated(asked, Blocks([7, 8, 9, 10]), 6)
    (receive,) = decode.metadata().receives
    assert (receive.blocks, receive.first, receive.request) == ((7, 8, 9), 1, "cmpl-a-0")
    assert receive.prompt == prompt_digest(range(10))
    ((req_id, url, body),) = decode.posted
    assert (req_id, url) == (asked.request_id, METASERVER)
    assert body == {
        "request_id": "cmpl-a-0", "do_remote_prefill": False, "do_remote_decode": True,
        "remote_host": "10.0.0.2", "remote_secret": decode.secret, "remote_cached_tokens": 4,
    }  # fmt: skip
    made = decode.metadata()
    assert not made.receives
    assert (made.secret, len(made.secret)) == (decode.secret, 32)


def test_the_rendezvous_names_the_layout_once_it_is_known(decode):
    decode.use_layout("abc")
    decode.allocated(request(params=remote_prefill()), Blocks([7, 8, 9]), 10)
    assert decode.posted[0][2]["remote_layout"] == "abc"


def test_children_that_share_their_parameters_are_all_received(decode):
    """An engine in the caller's process gives all children of a request one dict."""
    params = remote_prefill()
    for name in ("cmpl-a-0", "cmpl-a-1"):
        asked = request(name, params=params)
        assert decode.matched_tokens(asked, 0) == (10, True)
        decode.allocated(asked, Blocks([7, 8, 9]), 10)
    assert len(decode.posted) == 2
    assert params == remote_prefill()


def test_decode_asks_once_only(decode):
    """After a preemption, or a failed load, the request is computed on decode."""
    asked = request(params=remote_prefill())
    decode.allocated(asked, Blocks([7, 8, 9]), 10)
    decode.metadata()
    assert decode.matched_tokens(asked, 0) == (0, False)
    decode.allocated(asked, Blocks([1, 2, 3]), 0)
    assert not decode.metadata().receives
    assert len(decode.posted) == 1


def test_decode_leaves_other_requests_alone(decode):
    for params in (None, {}, {"do_remote_prefill": False}):
        assert decode.matched_tokens(request(params=params), 0) == (0, False)
        decode.allocated(request(params=params), Blocks([1, 2, 3]), 0)
    assert not decode.metadata().receives


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (
            remote_prefill("http://169.254.169.254/latest"),
            "169.254.169.254 is not in kv_connector_extra_config",
        ),
        (remote_prefill("http://[::1"), "is no http address"),
        (remote_prefill(None), "without a metaserver"),
        ({"do_remote_prefill": True}, "without a metaserver"),
        ({"do_remote_prefill": 1}, "do_remote_prefill=1: it must be true or false"),
        ("do_remote_prefill", "not an object"),
    ],
)
def test_what_cannot_be_received_is_refused_at_once(decode, params, reason):
    """As a request whose KV did not come: its blocks are never attended to."""
    asked = request(params=params)
    assert decode.matched_tokens(asked, 4) == (6, True)
    decode.allocated(asked, Blocks([7, 8, 9]), 6)
    made = decode.metadata()
    assert not decode.posted
    ((req_id, error),) = made.answered
    assert (req_id, reason in error) == (asked.request_id, True), error
    (receive,) = made.receives
    assert (receive.req_id, receive.wanted) == (asked.request_id, (8, 9))
    assert decode.matched_tokens(asked, 0) == (0, False)


def test_a_request_that_prefill_finds_by_itself_is_not_announced(decode):
    asked = request(params={"do_remote_prefill": True, "do_virtual": True})
    decode.allocated(asked, Blocks([7, 8, 9]), 10)
    made = decode.metadata()
    assert (len(made.receives), made.answered, decode.posted) == (1, [], [])


def test_a_prompt_of_embeddings_is_refused(decode, prefill):
    asked = request(params=remote_prefill())
    asked.prompt_embeds = object()
    decode.allocated(asked, Blocks([7, 8, 9]), 10)
    ((_, error),) = decode.metadata().answered
    assert "token ids alone" in error
    served = request(params=dict(REMOTE))
    served.prompt_embeds = object()
    prefill.allocated(served)
    made = run(prefill, served.request_id, [5, 6, 7], 0, 10, new=True)
    assert not made.steps
    (declined,) = made.declined
    assert (declined.request, declined.target.port) == ("cmpl-a-0", 20050)


MISMATCH = Failure("prefill has another dtype", "mismatch", "abcd")


@pytest.mark.parametrize("ended", [False, True], ids=["before", "after"])
def test_the_proxy_is_told_why_a_request_failed(decode, ended):
    """Once, although each rank says so; with the policy `fail` the engine is done with it before."""
    asked = request(params=remote_prefill(failures=FAILED))
    decode.allocated(asked, Blocks([7, 8, 9]), 10)
    assert not decode.reset()
    if ended:
        decode.finished(asked.request_id)
    for _ in range(2):
        decode.failed({asked.request_id: MISMATCH, "unknown": MISMATCH})
    ((url, body),) = decode.told
    assert url == FAILED
    assert body == {
        "request_id": "cmpl-a-0", "error": "prefill has another dtype", "failure": "mismatch",
        "prefill_layout": "abcd",
    }  # fmt: skip
    decode.received([asked.request_id])
    assert decode.reset()


def test_what_nobody_wants_to_hear_is_not_told(decode):
    aborted, silent, foreign = (request(f"cmpl-{n}-0") for n in range(3))
    aborted.kv_transfer_params = remote_prefill(failures=FAILED)
    silent.kv_transfer_params = remote_prefill()
    foreign.kv_transfer_params = remote_prefill(failures="http://169.254.169.254/failed")
    for asked in (aborted, silent, foreign):
        decode.allocated(asked, Blocks([7, 8, 9]), 10)
    decode.failed({aborted.request_id: Failure("aborted", "aborted"), silent.request_id: MISMATCH})
    decode.failed({foreign.request_id: MISMATCH})
    assert not decode.told


def test_a_refusal_is_told(decode):
    asked = request(params=remote_prefill("ftp://proxy/", failures=FAILED))
    decode.allocated(asked, Blocks([7, 8, 9]), 10)
    decode.failed({asked.request_id: Failure("again, by the workers", "rendezvous")})
    ((_, body),) = decode.told
    assert (body["failure"], "no http address" in body["error"]) == ("rendezvous", True)


def test_ranks_report_together():
    """A rank that names the mismatch takes precedence over one that was only told to stop."""
    gave_up = Failure("prefill gave up", "prefill")
    reports = [ReceiveReport({"a": gave_up, "b": gave_up}), ReceiveReport({"a": MISMATCH, "c": gave_up})]
    for one, other in (reports, reports[::-1]):
        assert one.aggregate(other).failures == {"a": MISMATCH, "b": gave_up, "c": gave_up}


@pytest.fixture
def prefill():
    return PrefillScheduler(BLOCK, 2, HostList.parse("decode_hosts", ["10.0.0.0/24"]))


def run(scheduler, req_id, blocks, computed, tokens, *, new=False, **more):
    entry = [(req_id, blocks, computed)]
    output = Output(entry if new else [], [] if new else entry, {req_id: tokens}, **more)
    return scheduler.metadata(output)


def test_prefill_publishes_chunk_by_chunk(prefill):
    served = request(params=dict(REMOTE))
    prefill.allocated(served)
    req_id = served.request_id
    (first,) = run(prefill, req_id, [5, 6], 0, 7, new=True).steps
    assert (first.opens, first.start, first.blocks, first.final, first.num_blocks) == (
        True,
        0,
        (5,),
        False,
        3,
    )
    assert (first.target.host, first.target.port, first.request) == ("10.0.0.2", 20050, "cmpl-a-0")
    (last,) = run(prefill, req_id, [7], 7, 3).steps
    assert (last.opens, last.start, last.blocks, last.final) == (False, 1, (6, 7), True)
    assert prefill.finished(req_id)
    assert prefill.metadata(Output()).held == [req_id]
    assert not prefill.metadata(Output()).held


def test_prefill_hits_of_its_own_cache_are_published_too(prefill):
    served = request(params={**REMOTE, "remote_cached_tokens": 4})
    prefill.allocated(served)
    (step,) = run(prefill, served.request_id, [5, 6, 7], 8, 2, new=True).steps
    assert (step.start, step.blocks, step.final) == (1, (6, 7), True)


def test_an_abort_before_the_end_gives_the_blocks_back_at_once(prefill):
    served = request(params=dict(REMOTE))
    prefill.allocated(served)
    run(prefill, served.request_id, [5, 6], 0, 7, new=True)
    assert not prefill.finished(served.request_id)
    assert prefill.metadata(Output()).dropped == [(served.request_id, False)]


@pytest.mark.parametrize("same_step", [False, True])
def test_a_preemption_begins_again(prefill, same_step):
    served = request(params=dict(REMOTE))
    prefill.allocated(served)
    req_id = served.request_id
    run(prefill, req_id, [5, 6], 0, 7, new=True)
    if not same_step:
        assert prefill.metadata(Output(preempted_req_ids={req_id})).dropped == [(req_id, True)]
    prefill.allocated(served)
    made = run(prefill, req_id, [1, 2], 0, 7, preempted_req_ids={req_id} if same_step else None)
    assert made.dropped == ([(req_id, True)] if same_step else [])
    (step,) = made.steps
    assert (step.opens, step.start, step.blocks) == (True, 0, (1,))


@pytest.mark.parametrize("preempted", [False, True])
def test_a_loss_begins_again(prefill, preempted):
    """The transfer ends before anybody else is given the blocks."""
    served = request(params=dict(REMOTE))
    prefill.allocated(served)
    req_id = served.request_id
    run(prefill, req_id, [5, 6, 7], 0, 10, new=True)
    prefill.blocks_invalid({6})
    if preempted:
        assert prefill.metadata(Output(preempted_req_ids={req_id})).dropped == [(req_id, True)]
        prefill.allocated(served)
        made = run(prefill, req_id, [1, 2, 3], 0, 10)
    else:
        made = run(prefill, req_id, [], 4, 6)
        assert made.dropped == [(req_id, True)]
    (step,) = made.steps
    assert (step.opens, step.start, step.final) == (True, 0, True)
    assert step.blocks == ((1, 2, 3) if preempted else (5, 6, 7))


def test_several_prompts_in_one_call(prefill):
    batch = {"cmpl-a-0": dict(REMOTE), "cmpl-a-1": {**REMOTE, "remote_cached_tokens": 8}}
    params = {**REMOTE, "batch_kv_transfer_params": batch}
    served = request("cmpl-a-1", params=params)
    prefill.allocated(served)
    (step,) = run(prefill, served.request_id, [5, 6, 7], 0, 10, new=True).steps
    assert (step.start, step.blocks) == (2, (7,))
    stranger = request("cmpl-a-7", params=params)
    prefill.allocated(stranger)
    assert not run(prefill, stranger.request_id, [1, 2, 3], 0, 10, new=True).steps


TOLD = {"remote_cached_tokens", "remote_dcp_size", "remote_tp_size"}
"""Faults with a known decode engine, so that it is notified."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_host": None}, {"remote_port": "20050"}, {"remote_port": 0}, {"remote_tp_size": 3},
        {"remote_tp_size": 4}, {"remote_dcp_size": 2}, {"remote_cached_tokens": None},
        {"remote_cached_tokens": -4}, {"remote_cached_tokens": 11}, {"remote_port": True},
        {"remote_host": "*"}, {"remote_host": "10.0.1.2"}, {"remote_host": "decode_1:20150/x y"},
        {"remote_host": "10.0.0.2:1"}, {"remote_port": 65536}, {"remote_secret": "x"},
        {"remote_secret": "a" * 65}, {"do_remote_decode": "false"}, {"batch_kv_transfer_params": []},
    ],
)  # fmt: skip
def test_a_senseless_rendezvous_does_not_reach_the_worker(prefill, wrong):
    served = request(params={**REMOTE, **wrong})
    for _ in range(2):  # the second time after a preemption
        prefill.allocated(served)
    made = run(prefill, served.request_id, [5, 6, 7], 0, 10, new=True)
    assert not made.steps
    told = ["cmpl-a-0"] if TOLD & set(wrong) else []
    assert [declined.request for declined in made.declined] == told
    assert not prefill.finished(served.request_id)


def test_the_secret_goes_to_the_worker_and_into_no_log(prefill):
    served = request(params={**REMOTE, "remote_secret": "ab12"})
    prefill.allocated(served)
    (step,) = run(prefill, served.request_id, [5, 6, 7], 0, 10, new=True).steps
    assert step.target.secret == "ab12"
    assert "ab12" not in repr(step)


def test_a_reset_waits_for_what_decode_may_read(prefill):
    """KV that was computed before it, of requests that run or are kept; a preempted one begins anew."""
    running, served = request("cmpl-b-0", params=dict(REMOTE)), request(params=dict(REMOTE))
    assert prefill.reset()
    prefill.allocated(served)
    run(prefill, served.request_id, [5, 6, 7], 0, 10, new=True)
    assert prefill.finished(served.request_id)
    assert not prefill.reset()
    prefill.sent({served.request_id})
    assert prefill.reset()
    prefill.allocated(running)
    run(prefill, running.request_id, [1, 2], 0, 7, new=True)
    running.num_computed_tokens = 7
    assert not prefill.reset()
    running.num_computed_tokens = 0
    assert prefill.reset()
    made = prefill.metadata(Output())
    assert made.dropped == [(running.request_id, True)]


def test_drafts_are_not_computed_tokens(prefill):
    served = request(length=8, params=dict(REMOTE))
    prefill.allocated(served)
    req_id = served.request_id
    (step,) = run(
        prefill, req_id, [5, 6], 0, 8, new=True, scheduled_spec_decode_tokens={req_id: [1, 1]}
    ).steps
    assert not step.final


def test_what_runs_finds_room_in_a_store_of_the_engines_own():
    """Blocks that are asked for, too."""
    extra = {"backend": "local", "use_layerwise": True, "layerwise_num_shared_buffers": 1,
             "local_dram_size_GB": 64 * 4096 / 2**30}  # fmt: skip
    layers = [CacheLayer(number, "main", 256) for number in range(4)]
    options = parse_ascend_store("kv_producer", extra)
    facts = EngineFacts(index_topk=1, block_size=BLOCK, max_num_seqs=8)

    def blocks(override=None, max_model_len=40):
        settings = EngineSettings(
            "cpu", {}, (), SparseOffloadConfig(), None, options, facts, None, max_model_len, override
        )
        vars(settings)["buffers"] = plan_buffers(layers, options.buffers)  # of no model
        return settings.shared_buffer_blocks(1 << 30)

    assert blocks() == blocks(48) == 48
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override=49: .* hold 48 blocks"):
        blocks(49)
    with pytest.raises(ConfigError, match="local_dram_size_GB"):
        blocks(max_model_len=200)
