"""Prefill's blocks of a request that is cancelled, or whose decode crashed, come back within the lease.

The lease is short here; with the default of 15 s the same bound is below 20 s.
"""

from __future__ import annotations

import signal

import pytest

from tests.faults.fault_cluster import LEASE_S
from tests.faults.fault_scene import Scene

pytestmark = pytest.mark.slow
SLACK_S = 2.0
"""For prefill's clock, its next step, and the look at /metrics."""


def test_cancelled(cluster):
    """At once, since decode says so."""
    with Scene(cluster, "reclaimed: client goes away") as scene:
        client = scene.finishes()
        cluster.wait_held("prefill")
        client.abort()
        assert cluster.wait_released("prefill", LEASE_S) < SLACK_S


def test_cancelled_and_prefill_is_not_told(cluster):
    with Scene(cluster, "reclaimed: client goes away, Cancel dropped") as scene:
        client = scene.finishes()
        scene.disturb("dropped", "Cancel", prompt=client.digest, times=None)
        cluster.wait_held("prefill")
        client.abort()
        seconds = cluster.wait_released("prefill", LEASE_S + SLACK_S)
        assert seconds > LEASE_S / 3, "the control: until then the blocks were held by the lease"


@pytest.mark.faults_full
def test_crashed(cluster):
    with Scene(cluster, "reclaimed: decode killed") as scene:
        scene.finishes()
        cluster.wait_held("prefill")
        cluster.signal("decode", signal.SIGKILL)
        cluster.wait_released("prefill", LEASE_S + SLACK_S)
        cluster.reap("decode")
        cluster.start("decode")
