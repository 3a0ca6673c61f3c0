"""Faults of the store, and of the joint deployment: layers that share memory, a store, and remote decode.

Requests that lose KV are computed again, or end with an error; the store's objects are let go of. Prefill's
answers need the store, so that decode is who answers for those that the faults must not touch.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.faults.fault_client import Client
from tests.faults.fault_cluster import LEASE_S, metrics
from tests.faults.fault_relay import ACTIONS
from tests.faults.fault_report import PHASES
from tests.faults.fault_scene import (
    BEFORE,
    DEADLINE_S,
    FINISHING,
    LONG_S,
    PULLING,
    STREAMING,
    Scene,
    beside,
    end_all,
    wait_for,
)
from tests.faults.fault_store import evict_before_use, joint_cluster

pytestmark = pytest.mark.slow
FULL = pytest.mark.faults_full
UNTOUCHED = (FINISHING, STREAMING)
"""Phases in which prefill has computed everything."""
FOR_A_WHILE_S = 2.0
ANY_POLICY = pytest.mark.parametrize("store", ["recompute"], indirect=True)
"""If the store loses nothing, the recovery policy makes no difference."""


@pytest.fixture(scope="module", params=["recompute", pytest.param("fail", marks=FULL)])
def store(request, cluster, tmp_path_factory):
    """Prefill with its own store, and the policy for a lost request: recomputation, or an error."""
    with joint_cluster(cluster, tmp_path_factory.mktemp("store"), request.param) as faults:
        yield faults


@pytest.fixture(autouse=True)
def _no_fault_stays(request):
    yield
    if "store" in request.fixturenames:
        request.getfixturevalue("store").end_all()


@pytest.mark.parametrize(
    ("what", "name", "times", "options"),
    [
        ("a load fails half-way", "load_fails", 2, {}),
        pytest.param("a save fails half-way", "save_fails", 2, {}, marks=FULL),
        pytest.param("evicted while prefill computes", "evicted", 1, {}, marks=FULL),
        pytest.param("copies are slow", "slow", 12, {"seconds": 0.4}, marks=FULL),
    ],
)
def test_one_request_loses_something(store, what, name, times, options):
    """A copy of a layer's rows is tried again request by request: the second failure is that of one request.
    Those that share its steps lose nothing."""
    fault, before = store.fault(name, times, **options), store.lost()
    right = PHASES if store.policy == "recompute" or name == "slow" else UNTOUCHED
    with Scene(store.cluster, f"store: {what} ({store.policy})", right) as scene:
        scene.all_phases(fault.begin, "decode")
        wait_for(lambda: fault.hits == times, f"the store met only {fault.hits} faults")
    # Rows not saved in a request's first step are missing in its second, and count twice.
    assert store.lost() - before in ((0,) if name == "slow" else (1, 2))


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("full", "full"),
        pytest.param("down, and back", "down", marks=FULL),
        pytest.param("all loads fail", "load_fails", marks=FULL),
        pytest.param("all saves fail", "save_fails", marks=FULL),
    ],
)
def test_for_a_while(store, what, name):
    """Longer than decode waits for a request that is computed again and again."""
    fault, before = store.fault(name), store.lost()
    with Scene(store.cluster, f"store: {what} ({store.policy})", UNTOUCHED) as scene:
        scene.all_phases(fault.begin, "decode")
        wait_for(lambda: store.lost() > before, "no request lost anything")
        time.sleep(FOR_A_WHILE_S)
        fault.end()


@FULL
@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_copy_that_hangs(store, direction):
    """Beyond its deadline: its requests are lost, and those of later steps until it is over."""
    fault, before = store.fault(f"{direction}_hangs", 1), store.lost()
    with Scene(store.cluster, f"store: a {direction} hangs ({store.policy})", UNTOUCHED) as scene:
        scene.all_phases(fault.begin, "decode")
        wait_for(lambda: fault.hits == 1 and store.lost() > before, "no request lost anything")
        for to in ("proxy", "prefill"):
            scene.add(BEFORE, store.cluster.client(200, to=to)).start()
        time.sleep(FOR_A_WHILE_S)
        fault.end()


def test_evicted_between_lookup_and_use(store):
    before = store.lost()
    with Scene(store.cluster, f"store: evicted between lookup and use ({store.policy})") as scene:
        asked = evict_before_use(scene, store)
        assert store.lost() - before == len(asked)
        assert {client.complete for client in asked} == {store.policy == "recompute"}


@ANY_POLICY
def test_progress(store):
    """Prefill uses a layer's memory again once decode says that it has read it, which comes late here."""
    scenes = [Scene(store.cluster, f"Progress {action}", (PULLING,), again=False) for action in ACTIONS]
    for scene, action in zip(scenes, ACTIONS, strict=True):
        client = scene.add(PULLING, store.cluster.client(600))
        scene.disturb(action, "Progress", prompt=client.digest, times=3, at_least=3, delay_s=LEASE_S / 3)
        client.start()
    scenes[0].bystanders("decode")
    scenes[0].other(store.cluster.client(300, 30, to="prefill"))
    end_all(scenes)


@FULL
@ANY_POLICY
def test_no_progress_at_all(store):
    """Prefill doesn't wait for ever: the transfer is given up, and others go on."""
    with Scene(store.cluster, f"every Progress lost ({store.policy})") as scene:
        client = scene.add(PULLING, store.cluster.client(900))
        scene.disturb("dropped", "Progress", prompt=client.digest, times=None, at_least=3)
        client.start()
        scene.other(store.cluster.client(400))
        assert client.join(DEADLINE_S)
        assert client.verdict([]) == "error"


@FULL
@ANY_POLICY
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_stopped(store, name):
    what = f"joint: {name} stopped, longer than the lease ({store.policy})"
    with Scene(store.cluster, what, (STREAMING,)) as scene:
        scene.all_phases(lambda: store.cluster.signal(name, signal.SIGSTOP), "decode")
        time.sleep(LONG_S)
        store.cluster.signal(name, signal.SIGCONT)


@FULL
@ANY_POLICY
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_killed(store, name):
    cluster = store.cluster
    right = (STREAMING,) if name == "prefill" else ()
    with Scene(cluster, f"joint: {name} killed ({store.policy})", right) as scene:
        scene.all_phases(lambda: cluster.signal(name, signal.SIGKILL), *{"decode"} - {name})
        cluster.reap(name)
        cluster.start(name)


@FULL
@ANY_POLICY
def test_clients_that_go_away(store):
    cluster = store.cluster
    with Scene(cluster, f"joint: client goes away ({store.policy})") as scene:
        scene.bystanders("prefill", "decode")
        finishes = scene.finishes()
        streams = scene.streams(400)
        kept = scene.other(cluster.client(700, 40))
        pulls = scene.add(PULLING, cluster.client(1800))
        watch = scene.when_published(pulls, pulls.abort)
        pulls.start()
        assert watch.done.wait(60)
        for client in (finishes, streams):
            client.abort()
        assert kept.join(DEADLINE_S)


@ANY_POLICY
def test_reset(store):
    """vLLM's own call empties the store, too; while requests run it may say no, and hurts none of them."""
    cluster = store.cluster
    with Scene(cluster, f"joint: reset ({store.policy})", PHASES) as scene:
        first = scene.add(BEFORE, cluster.client(700)).start()
        assert first.join(DEADLINE_S)
        wait_for(lambda: cluster.reset("prefill"), "prefill refuses", LEASE_S)
        before = store.hit_tokens()
        again = Client(cluster.ports["prefill"], first.prompt, first.max_tokens)
        assert scene.add(BEFORE, again).start().join(DEADLINE_S)
        assert store.hit_tokens() == before, "the store still has the prefix"
        beside(scene, lambda: [cluster.reset("prefill") for _ in range(8)], "decode")


@FULL
@ANY_POLICY
def test_preempted(store):
    """Prefill runs out of blocks: preempted requests resume with their KV in the store."""
    cluster = store.cluster

    def preemptions():
        return metrics(cluster.ports["prefill"])["vllm:num_preemptions_total"]

    before = preemptions()
    with Scene(cluster, f"joint: preempted on prefill ({store.policy})", PHASES, again=False) as scene:
        for n in range(6):
            scene.other(cluster.client(600 + 7 * n, 100, to="prefill"))
        for _ in range(5):
            scene.add(PULLING, cluster.client(1200)).start()
        wait_for(lambda: preemptions() > before, "nothing was preempted")
