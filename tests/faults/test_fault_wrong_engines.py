"""The controls: engines with a fault of their own, which the matrix must see."""

from __future__ import annotations

import pytest

from tests.faults.fault_cluster import LEASE_S, Kind
from tests.faults.fault_report import Report
from tests.faults.fault_scene import WAITING, Scene

pytestmark = pytest.mark.faults_full

ATTENDS_TO_WHAT_NEVER_CAME = """
from vllm_kvoffload.connectors.sfa_remote_d2h.consumer import Consumer
end = Consumer._end
def lie(self, pending):
    pending.reason = ""
    end(self, pending)
Consumer._end = lie
"""

KNOWS_NO_LEASE = """
from vllm_kvoffload.connectors.sfa_remote_d2h.producer import Producer
tick = Producer.tick
def endless(self, now):
    for transfer in self._transfers.values():
        transfer.lease_end = now + 1000
    tick(self, now)
Producer.tick = endless
"""


@pytest.fixture(scope="module")
def wrong(cluster):
    kinds = {"prefill": Kind(KNOWS_NO_LEASE), "decode": Kind(ATTENDS_TO_WHAT_NEVER_CAME)}
    with cluster.of_kind(**kinds):
        yield cluster


def test_wrong_tokens_are_seen(wrong):
    scene = Scene(wrong, "decode attends to what never came", report=Report())
    plan = wrong.hop.plan(status=404)
    client = scene.add(WAITING, wrong.client(300)).start()
    assert plan.arrived.wait(30)
    with pytest.raises(AssertionError, match="waiting: 300 tokens, WRONG"), scene:
        client.join(30)


def test_held_blocks_are_seen(wrong):
    scene = Scene(wrong, "prefill knows no lease", report=Report())
    client = scene.finishes()
    scene.disturb("dropped", "Cancel", prompt=client.digest, times=None)
    wrong.wait_held("prefill")
    client.abort()
    with pytest.raises(AssertionError, match="prefill holds blocks"):
        wrong.wait_released("prefill", 2 * LEASE_S)
