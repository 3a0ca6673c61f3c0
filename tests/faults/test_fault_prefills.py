"""Prefill servers that are silent, or don't fit: another one gets the request, or it ends with an error."""

from __future__ import annotations

import re
import signal

import pytest

from tests.faults.fault_cluster import LEASE_S, REQUEST_S, Kind
from tests.faults.fault_scene import DEADLINE_S, STREAMING, WAITING, Scene, together, wait_for

pytestmark = pytest.mark.slow
FULL = pytest.mark.faults_full
SOON_S = REQUEST_S / 2
"""Some leases, and less than a request may wait for its KV."""
OTHERS = {
    "block size": ("--block-size", "128"),
    "dtype": ("--dtype", "bfloat16"),
}


def _freeze_before_the_first_message(scene, count):
    """Prefill stands still when it is asked for these requests. Returns them, once they have ended."""
    cluster = scene.cluster
    clients = [scene.add(WAITING, cluster.client(300 + n)) for n in range(count)]
    plans = [scene.waits(client) for client in clients]
    scene.streams()
    scene.bystanders("decode")
    cluster.signal("prefill", signal.SIGSTOP)
    for plan in plans:
        plan.go.set()
    for client in clients:
        assert client.join(SOON_S), f"nothing after {SOON_S:g} s"
    cluster.signal("prefill", signal.SIGCONT)
    return clients


def test_frozen_before_the_first_message(cluster):
    with Scene(cluster, "prefill frozen before its first message, alone", (STREAMING,)) as scene:
        for client in _freeze_before_the_first_message(scene, 2):
            assert client.verdict([]) == "error"


@FULL
def test_frozen_beside_another(cluster):
    with (
        cluster.second_prefill(),
        Scene(cluster, "prefill frozen before its first message, of two", (WAITING, STREAMING)) as scene,
    ):
        _freeze_before_the_first_message(scene, 4)


@FULL
@pytest.mark.parametrize("what", OTHERS)
def test_mismatched(cluster, what):
    """Beside one that fits: decode refuses it, and the other gets the requests. Alone: an error at once that
    names the field, or says that no engine fits."""
    before = cluster.failures("mismatch")
    with cluster.second_prefill(Kind(flags=OTHERS[what])):
        with Scene(
            cluster, f"prefill with another {what}, beside one that fits", (WAITING, STREAMING)
        ) as scene:
            scene.streams()
            scene.bystanders("prefill", "decode")
            for _ in range(2):  # the second time it is known
                met = [
                    scene.add(WAITING, client) for client in together(4, lambda n: cluster.client(300 + n))
                ]
                for client in met:
                    assert client.join(DEADLINE_S)
            wait_for(lambda: cluster.failures("mismatch") > before, "the control: decode met it", 15)
        with Scene(cluster, f"prefill with another {what}, alone", again=False) as scene:
            cluster.admin("remove", "prefill")
            try:
                for _ in range(2):
                    client = scene.add(WAITING, cluster.client(300)).start()
                    assert client.join(LEASE_S), "an error comes at once"
                    assert client.verdict([]) == "error"
                    named = rf"{what.replace(' ', '[ _]')}|no \w+ engine fits"
                    assert re.search(named, client.error), client.error
            finally:
                cluster.admin("add", "prefill")
