"""Strangers at the control port, bad addresses in requests, and resets: requests beside them are right."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import fault_strangers as strangers
from tests.faults.fault_client import Client
from tests.faults.fault_cluster import BLOCK_TOKENS, LEASE_S, REQUEST_S, metrics
from tests.faults.fault_report import PHASES
from tests.faults.fault_scene import (
    BEFORE,
    DEADLINE_S,
    PULLING,
    STREAMING,
    WAITING,
    Scene,
    beside,
    together,
    wait_for,
)
from vllm_kvoffload.demo.processes import session_and_descendants
from vllm_kvoffload.demo.server import HOST, free_port

pytestmark = pytest.mark.slow
FULL = pytest.mark.faults_full
ENGINES = ("prefill", "decode")
BOUND_BYTES = 48 << 20
"""Decode's worker may need so much more at a time, which is less than one of the huge frames has."""


# ------------------------------------------------------------------------------------- the control port


@contextmanager
def memory_bounded(cluster, name):
    """No process of the server takes BOUND_BYTES more than at the start, at any time."""

    def rss():
        return {
            process.pid: int(Path(f"/proc/{process.pid}/statm").read_text(encoding="utf-8").split()[1]) * 4096
            for process in session_and_descendants(cluster.servers[name].pid)
        }

    before, most, stop = rss(), {}, threading.Event()

    def look():
        while not stop.wait(0.02):
            for pid, value in rss().items():
                most[pid] = max(most.get(pid, 0), value)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    grown = {pid: value - before[pid] for pid, value in most.items() if pid in before}
    assert max(grown.values()) < BOUND_BYTES, f"{name} grew by {grown} bytes"


@pytest.mark.parametrize("secret", [False, pytest.param(True, marks=FULL)], ids=["stranger", "secret"])
def test_frames_at_the_control_port(cluster, secret):
    """Garbage, corrupt and false introductions, one of them from a peer that has seen a rendezvous."""
    who = "one who knows the secret" if secret else "a stranger"
    with Scene(cluster, f"control port: frames of {who}", PHASES) as scene:
        asked = scene.add(WAITING, cluster.client(300)).start()
        assert asked.join(DEADLINE_S)
        known = cluster.hop.secret if secret else ""
        # A holder of the secret may introduce itself as any prefill server: it is trusted with that.
        true = None if secret else strangers.learn_hello(cluster.ports["prefill"])
        assert secret == (true is None)

        def act():
            for seed in range(3):
                strangers.frames(cluster.kv_port, random.Random(seed), known, true)
                strangers.raw_garbage(cluster.kv_port, random.Random(seed))

        beside(scene, act)


def test_many_and_huge_at_the_control_port(cluster):
    """A flood of frames, huge ones, and connections that say nothing."""
    with Scene(cluster, "control port: flood, huge frames, 300 connections", PHASES) as scene:
        scene.bystanders("prefill", "decode")
        streams = scene.streams()
        idlers = strangers.Idlers([cluster.kv_port], 300)
        with memory_bounded(cluster, "decode"):
            strangers.huge(cluster.kv_port, random.Random(1))
            strangers.flood(cluster.kv_port, random.Random(2))
            for client in together(3, lambda n: cluster.client((300, 900, 1700)[n])):
                scene.add(PULLING, client)
                assert client.join(DEADLINE_S)
        assert not streams.error
        idlers.close()


# -------------------------------------------------------------------------------------------- addresses


def test_bad_hosts(cluster):
    """In rendezvous, and in requests straight to prefill, many at a time. The former end soon;
    whatever becomes of them, those beside them are right."""
    with Scene(cluster, "bad remote_host, in rendezvous and straight to prefill", (PULLING,)) as scene:
        scene.bystanders("prefill", "decode")
        sent, asked = [], []
        for host in strangers.BAD_HOSTS:
            plan = cluster.hop.plan(changes={"remote_host": host})
            sent.append(scene.add(WAITING, cluster.client(100)).start())
            assert plan.arrived.wait(30), "decode did not post"
        for params in strangers.for_prefill(free_port()):
            if params.get("remote_host") != HOST:
                asked.append(cluster.client(100, to="prefill", kv_transfer_params=params))
                scene.add(BEFORE, asked[-1]).start()
        for client in together(3, lambda n: cluster.client(300 + 300 * n)):
            scene.add(PULLING, client)
        for client in sent:  # a name that may be one is asked of another prefill, or of this one again
            assert client.join(REQUEST_S / 2), "it ends at once, or by the lease"
        for client in asked:
            assert client.join(DEADLINE_S)


@FULL
def test_prefill_asked_with_bad_parameters(cluster):
    """The other fields of such a request."""
    with Scene(cluster, "bad kv_transfer_params straight to prefill", (PULLING,)) as scene:
        scene.bystanders("prefill", "decode")
        asked = strangers.for_prefill(free_port())
        bad = [
            scene.add(BEFORE, cluster.client(100, to="prefill", kv_transfer_params=params)).start()
            for params in asked
            if params.get("remote_host") == HOST
        ]
        for client in together(3, lambda n: cluster.client(300 + 300 * n)):
            scene.add(PULLING, client)
        for client in bad:
            assert client.join(DEADLINE_S)


def test_decode_asked_with_bad_parameters(cluster):
    """Straight to decode: each ends with an error, by its own deadlines; no engine dies of it."""
    with Scene(cluster, "bad kv_transfer_params straight to decode", (PULLING, STREAMING)) as scene:
        scene.bystanders("prefill", "decode")
        scene.streams()
        bad = [
            Client(cluster.ports["decode"], cluster.prompt(100), 4, kv_transfer_params=params).start()
            for params in strangers.for_decode()
        ]
        for client in together(3, lambda n: cluster.client(300 + 300 * n)):
            scene.add(PULLING, client)
        for client in bad:
            assert client.join(DEADLINE_S)
            if client.complete:  # without a transfer decode computes the prompt itself
                scene.other(client)


# ------------------------------------------------------------------------------------------------ reset


def test_reset(cluster):
    """vLLM's own call empties both caches, also right after a hand-off. Under load it may say no, and hurts
    no request."""
    with Scene(cluster, "reset of both engines, at rest and while requests run", PHASES) as scene:
        first = scene.add(BEFORE, cluster.client(4 * BLOCK_TOKENS + 1)).start()
        assert first.join(DEADLINE_S)
        begin = time.monotonic()
        for name in ENGINES:
            wait_for(lambda name=name: cluster.reset(name), f"{name} refuses", LEASE_S)
        assert time.monotonic() - begin < LEASE_S
        hits = {name: _hits(cluster, name) for name in ENGINES}
        again = Client(cluster.ports["proxy"], first.prompt, first.max_tokens)
        assert scene.add(BEFORE, again).start().join(DEADLINE_S)
        assert {name: _hits(cluster, name) for name in ENGINES} == hits, "something was still cached"
        beside(scene, lambda: [cluster.reset(name) for name in ENGINES * 5])


def _hits(cluster, name):
    return metrics(cluster.ports[name])["vllm:prefix_cache_hits_total"]
