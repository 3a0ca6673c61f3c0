"""Faults of the real MemCache, which prefill of a joint deployment has as its store here.

It runs without an NPU over stand-ins: real metadata, leases and eviction, the bytes are moved by memcpy.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests import hostsim
from tests.faults.fault_scene import FINISHING, PULLING, STREAMING, Scene, together, wait_for
from tests.faults.fault_store import joint_cluster
from tests.hostsim.cluster import MetaCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.faults_full,
    pytest.mark.skipif(bool(hostsim.missing()), reason=hostsim.missing()),
    pytest.mark.timeout(900),  # another process of the tests may have the machine's one cluster
]
UNTOUCHED = (FINISHING, STREAMING)
"""Phases in which prefill has computed everything."""
ROOMY, TINY = "32MB", "4MB"
"""The tiny pool has room for some 30 blocks: for one long prompt."""
CALL_S = 5.0
"""How long the store waits for an answer of the MetaService."""


def restart(meta):
    meta.kill()
    meta.wait_until_free()
    meta.start()


@pytest.fixture(scope="module")
def memcache(request, cluster, tmp_path_factory):
    """A MetaService, and prefill with so much of its memory."""
    folders = [tmp_path_factory.mktemp(name) for name in ("meta", "store")]
    with MetaCluster(folders[0], dram_size=request.param) as meta:
        options = {"environment": meta.environ, "backend": "memcache"}
        with joint_cluster(cluster, folders[1], "recompute", **options) as store:
            restart(meta)  # files that the library and we open for a restart stay open from now on
            assert cluster.client(600, to="prefill").start().join(60)
            cluster.settle()
            yield meta, store
        cluster.heal()  # prefill is a client of this MetaService: it goes first


roomy = pytest.mark.parametrize("memcache", [ROOMY], indirect=True)
tiny = pytest.mark.parametrize("memcache", [TINY], indirect=True)


@roomy
def test_the_service_is_killed_and_comes_back(memcache):
    meta, store = memcache
    before = store.lost()
    with Scene(store.cluster, "MetaService killed, and back", UNTOUCHED) as scene:
        scene.all_phases(meta.kill, "decode")
        wait_for(lambda: store.lost() > before, "no request lost anything")
        restart(meta)


@roomy
def test_the_service_is_stopped(memcache):
    meta, store = memcache
    before = store.lost()
    with Scene(store.cluster, "MetaService stopped, and going on", UNTOUCHED) as scene:
        scene.all_phases(lambda: meta.signal(signal.SIGSTOP), "decode")
        wait_for(lambda: store.lost() > before, "no request lost anything")
        time.sleep(CALL_S)
        meta.signal(signal.SIGCONT)


@tiny
def test_a_pool_that_is_too_small(memcache):
    """Running requests exceed the store: they are recomputed until there is room, or are given up."""
    _, store = memcache
    before = store.lost()
    with Scene(store.cluster, "a tiny pool", again=False) as scene:
        scene.bystanders("decode")
        for client in together(3, lambda n: store.cluster.client(1500 + 70 * n)):
            scene.add(PULLING, client)
    assert store.lost() > before, "the control: it was too small"
    with Scene(store.cluster, "a tiny pool, one at a time", (PULLING,)) as scene:
        assert scene.add(PULLING, store.cluster.client(900)).start().join(60)
