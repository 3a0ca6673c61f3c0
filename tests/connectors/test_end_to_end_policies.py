"""A prefill server, a decode server and a proxy of their own: tensor parallelism, and drafts."""

from __future__ import annotations

import json
import os

import pytest

from tests.connectors.pd_servers import Engine, chat, completion, fleet, metric
from tests.connectors.test_end_to_end import essay, prompt
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow

STARVED_LEASE_S = 30.0
"""Workers that share cores may not answer for seconds."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("model") / "glm-tiny", MODELS["glm-tiny"])


def cores(count: int) -> pytest.MarkDecorator:
    have = len(os.sched_getaffinity(0))
    return pytest.mark.skipif(have < count, reason=f"its workers starve on fewer than {count} cores")


@pytest.mark.parametrize(
    "tp_sizes", [pytest.param((2, 2), marks=cores(4)), pytest.param((4, 2), marks=cores(6))], ids=str
)
def test_tensor_parallel(checkpoint, tmp_path, tp_sizes):
    prefill, decode = ((Engine(tp_size=size),) for size in tp_sizes)
    with fleet(checkpoint, tmp_path, prefill=prefill, decode=decode, lease_s=STARVED_LEASE_S) as servers:
        check_prefixes(servers)
        servers.check(chat(essay(600, 0), stream=True))


def check_prefixes(servers, max_tokens=12):
    shared = prompt(300, seed=1)
    for tokens in (prompt(40, seed=2), shared, prompt(700, seed=3), shared + prompt(90, seed=4)):
        servers.check(completion(tokens, max_tokens))


def test_drafts_and_two_prefill_ranks(tmp_path):
    """Draft layers have KV, too. Requests with drafts give the same tokens, and decode accepts drafts."""
    model = build_checkpoint(tmp_path / "model", MODELS["glm-tiny-mtp"])
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    prefill = (Engine(tp_size=2),)
    arguments = ["--speculative-config", drafts]
    with fleet(model, tmp_path, prefill=prefill, lease_s=STARVED_LEASE_S, arguments=arguments) as servers:
        check_prefixes(servers, 40)
        accepted = [
            metric(server, "vllm:spec_decode_num_accepted_tokens_total")
            for server in (servers.prefill[0], servers.decode[0])
        ]
        assert accepted[0] > 10
        assert abs(accepted[0] - accepted[1]) <= 3
