"""Prefill with shared layer buffers, a store and remote decode at once: the same answers as without any.

The reference is a plain prefill server, which computes a request alone when nobody asks for its KV.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from pd_servers import LEASE_S, Engine, check_same, completion, fleet, metric, wait_free

from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

pytest.importorskip("nixl_cu12")
pytestmark = pytest.mark.slow

JOINT = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {
        "connectors": [
            # In the wrong order on purpose: who waits for whom doesn't depend on it.
            {
                "kv_connector": "AscendStoreConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "backend": "local",
                    "use_layerwise": True,
                    "layerwise_num_shared_buffers": 1,
                    "layerwise_independent_layers": [0],
                    "local_dram_size_GB": 0.25,
                },
            },
            {
                "kv_connector": "SfaRemoteD2HConnector",
                "kv_role": "kv_producer",
                "kv_port": 20050,
                "kv_connector_extra_config": {"transfer_backend": "nixl", "lease_s": LEASE_S},
            },
        ]
    },
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint")
    checkpoint = build_checkpoint(folder / "glm-tiny", MODELS["glm-tiny"])
    prefill = (Engine(transfer=JOINT), Engine())
    with fleet(checkpoint, folder, prefill=prefill, arguments=("--enforce-eager",)) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 2000) for _ in range(length)]


def hits(servers) -> float:
    return metric(servers.prefill[0], "vllm:external_prefix_cache_hits_total")


def test_layers_share_memory(servers):
    log = servers.prefill[0].log.read_text()
    assert "merged 6 descriptors into 4 descriptors using 2 buffer assignments." in log
    assert "used again when the store has them and decode has read them" in log


@pytest.mark.parametrize("length", [10, 64, 65, 256, 700, 1500])
def test_same_answers_cold_and_warm(servers, length):
    """Below and above top-k, one chunk and several (of 256); then again, with a prefix out of the store."""
    body = completion(prompt(length, seed=length))
    servers.check(body)
    before = hits(servers)
    shared = completion([*prompt(length, seed=length), *prompt(30, seed=1)])
    servers.check(shared)
    assert hits(servers) - before == length // 64 * 64


def test_several_at_once(servers):
    bodies = [completion(prompt(length, seed=100 + length)) for length in (30, 300, 500, 90, 620, 257)]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(servers.ask, bodies))
    for body, answer in zip(bodies, answers, strict=True):
        check_same(answer, servers.reference(body))
    for server in (servers.prefill[0], servers.decode[0]):
        wait_free(server, 20)
