"""Two real servers: the recompute policy, tensor parallelism, drafts, and a control that must fail."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from pd_servers import metric, pair
from test_end_to_end import check_same, prompt, wait_free

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("model") / "glm-tiny", MODELS["glm-tiny"])


def test_recompute(checkpoint, tmp_path):
    """The metaserver refuses, so decode computes the prompt itself, from what it has cached."""
    with pair(checkpoint, tmp_path, kv_load_failure_policy="recompute") as servers:
        shared = prompt(256, seed=1)
        check_same(servers.ask(shared + [9] * 10), servers.reference(shared + [9] * 10))
        servers.meta.dispatch = lambda _message: 404
        for tokens in (prompt(300, seed=2), shared + prompt(200, seed=3)):
            check_same(servers.ask(tokens), servers.reference(tokens))


def test_the_control_without_indexer_kv_differs(checkpoint, tmp_path, monkeypatch):
    """Decode reads everything but the indexer's KV: above top-k the tokens must change."""
    folder = tmp_path / "patch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "from vllm_kvoffload.connectors.sfa_remote_d2h import consumer\n"
        "shares = consumer.Consumer._shares\n"
        "consumer.Consumer._shares = lambda self, peer, pairs: (shares(self, peer, pairs)[0], ())\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    with pair(checkpoint, tmp_path) as servers:
        tokens = prompt(700, seed=4)
        answer, reference = servers.ask(tokens), servers.reference(tokens)
        assert (answer.status, reference.status) == (200, 200)
        assert answer.tokens != reference.tokens


FOUR_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 4, reason="four workers starve on fewer cores")


@pytest.mark.parametrize("tp_sizes", [(2, 1), pytest.param((2, 2), marks=FOUR_CORES)], ids=str)
def test_tensor_parallel(checkpoint, tmp_path, tp_sizes):
    # Workers that share cores may not answer for seconds.
    with pair(checkpoint, tmp_path, tp_sizes=tp_sizes, lease_s=30.0) as servers:
        for length in (40, 300, 700):
            tokens = prompt(length, seed=length)
            check_same(servers.ask(tokens), servers.reference(tokens))


def test_mtp(tmp_path):
    """Draft layers have KV, too. Requests with drafts give the same tokens, and decode accepts drafts."""
    model = build_checkpoint(tmp_path / "model", MODELS["glm-tiny-mtp"])
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 1})
    with pair(model, tmp_path, lease_s=30.0, arguments=["--speculative-config", drafts]) as servers:
        for length in (40, 300, 700):
            tokens = prompt(length, seed=length)
            check_same(servers.ask(tokens, 40), servers.reference(tokens, 40))
        accepted = [
            metric(port, "vllm:spec_decode_num_accepted_tokens_total")
            for port in (servers.prefill_port, servers.decode_port)
        ]
        assert accepted[0] > 10
        assert abs(accepted[0] - accepted[1]) <= 3


def test_preempted_on_decode(checkpoint, tmp_path):
    """Blocks run out on decode while requests grow: what is preempted is computed there.

    Any three of the four are too many once they are grown, however far apart prefill hands them over.
    """
    with pair(checkpoint, tmp_path, lease_s=30.0, arguments=["--num-gpu-blocks-override", "40"]) as servers:
        prompts = [prompt(560, seed=300 + n) for n in range(4)]
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda tokens: servers.ask(tokens, 300), prompts))
        assert metric(servers.decode_port, "vllm:num_preemptions_total") >= 1
        for tokens, answer in zip(prompts, answers, strict=True):
            check_same(answer, servers.reference(tokens, 300))
        for port in (servers.prefill_port, servers.decode_port):
            wait_free(port, 20)
