"""Every fault in every phase, over real processes. The table at the end of the run lists the outcomes.

What must hold is in `Scene`: no request hangs or has wrong tokens, those that the fault must not touch have
the right ones, and afterwards nothing is held and the engines serve on.
"""

from __future__ import annotations

import signal
import time
import urllib.request

import pytest

from tests.faults.fault_cluster import (
    BLOCKS,
    LEASE_S,
    MAX_MODEL_LEN,
    MAX_SEQS,
    PREFILL_MODEL_LEN,
    REQUEST_S,
    metrics,
)
from tests.faults.fault_relay import ACTIONS
from tests.faults.fault_report import PHASES
from tests.faults.fault_scene import (
    BEFORE,
    DEADLINE_S,
    FINISHING,
    LONG_S,
    PULLING,
    SHORT_S,
    STREAMING,
    WAITING,
    Scene,
    after,
    end_all,
    together,
    wait_for,
)
from vllm_kvoffload.demo.server import HOST

pytestmark = pytest.mark.slow
ENGINES = ("prefill", "decode")
FULL = pytest.mark.faults_full


# ------------------------------------------------------------------------------------------------- processes

RIGHT_AFTER_STOP = {
    "prefill": (STREAMING,),
    "decode": (STREAMING,),
    "proxy": PHASES,
}
"""Phases of requests that a stop longer than the lease must not hurt."""


@pytest.mark.parametrize(
    "name", ["prefill", *(pytest.param(name, marks=FULL) for name in ("decode", "proxy"))]
)
@pytest.mark.parametrize("seconds", [pytest.param(SHORT_S, marks=FULL), LONG_S], ids=["short", "long"])
def test_stopped(cluster, name, seconds):
    length = "shorter" if seconds == SHORT_S else "longer"
    right = PHASES if seconds == SHORT_S else RIGHT_AFTER_STOP[name]
    with Scene(cluster, f"{name} stopped, {length} than the lease", right) as scene:
        scene.all_phases(lambda: cluster.signal(name, signal.SIGSTOP), *ENGINES)
        time.sleep(seconds)
        cluster.signal(name, signal.SIGCONT)


RIGHT_AFTER_DEATH = {"prefill": (STREAMING,), "decode": (), "proxy": ()}


@pytest.mark.parametrize("name", ["prefill", "decode", pytest.param("proxy", marks=FULL)])
def test_killed(cluster, name):
    with Scene(cluster, f"{name} killed", RIGHT_AFTER_DEATH[name]) as scene:
        others = (engine for engine in ENGINES if engine != name)
        scene.all_phases(lambda: cluster.signal(name, signal.SIGKILL), *others)
        cluster.reap(name)
        cluster.start(name)


@FULL
@pytest.mark.parametrize("name", ["prefill", "decode", "proxy"])
def test_restarted(cluster, name):
    """In order: SIGTERM."""
    right = PHASES[1:] if name == "proxy" else RIGHT_AFTER_DEATH[name]  # which drains
    with Scene(cluster, f"{name} restarted", right) as scene:
        others = (engine for engine in ENGINES if engine != name)
        scene.all_phases(lambda: cluster.terminate(name), *others)
        cluster.reap(name, 20)
        cluster.start(name)


# -------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("kind", "phase", "times"),
    [("Publish", PULLING, 3), ("Finish", FINISHING, 2), ("Finished", FINISHING, 2)],
    ids=["Publish", "Finish", "Finished"],
)
def test_messages_of_a_request(cluster, kind, phase, times):
    """Each message that brings a request on, more than once: it is late, and right."""
    scenes = [Scene(cluster, f"{kind} {action}", (phase,), again=False) for action in ACTIONS]
    for scene, action in zip(scenes, ACTIONS, strict=True):
        client = scene.add(phase, cluster.client(900 if phase == PULLING else 300))
        more = {"prompt": client.digest, "times": times, "delay_s": LEASE_S / 3}
        scene.disturb(action, kind, **more)
        client.start()
    scenes[0].bystanders(*ENGINES)
    end_all(scenes)


def closed_transfers(port: int, end: str) -> float:
    """How many transfers a prefill server has closed for a reason."""
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    series = "vllm:kvoffload_transfers_closed_total{"
    found = [line for line in lines if line.startswith(series) and f'end="{end}"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.mark.parametrize("kind", ["Beat", pytest.param("BeatAck", marks=FULL)])
def test_heartbeats(cluster, kind):
    """Some go wrong while a request waits for the answer to its `Finish`: nothing happens. All are lost: the
    lease ends, or decode gives up, and what was read counts for nothing."""
    with Scene(cluster, f"some {kind} lost, late, twice, cut off", (FINISHING,)) as scene:
        for action in ACTIONS:
            client = scene.finishes()
            more = {"prompt": client.digest, "times": 2, "delay_s": LEASE_S / 4}
            scene.disturb(action, kind, **more)
        scene.bystanders(*ENGINES)
        scene.await_hits()  # one after the other, where one message is about all of the requests
    with Scene(cluster, f"every {kind} lost") as scene:
        lost = scene.finishes()
        scene.disturb("dropped", kind, prompt=lost.digest, times=None, at_least=3)
        scene.other(cluster.client(500, 60))
        expired = closed_transfers(cluster.ports["prefill"], "expired")
        time.sleep(1.5 * LEASE_S)
        if kind == "Beat":  # the proxy may have dispatched the request again, which holds blocks anew
            assert closed_transfers(cluster.ports["prefill"], "expired") > expired, "the lease has ended"


@FULL
@pytest.mark.parametrize("action", [*ACTIONS, "all of it"])
def test_a_bad_line(cluster, action):
    """Any message may be hit, for as long as it takes."""
    what = f"a fifth of all messages {action}" if action in ACTIONS else "a line with all of these faults"
    with Scene(cluster, what) as scene:
        for one in ACTIONS if action == "all of it" else [action]:
            chance = 0.2 if action in ACTIONS else 0.07
            scene.disturb(one, times=None, chance=chance, delay_s=LEASE_S / 3)
        for client in together(5, lambda n: cluster.client((40, 200, 500, 900, 1700)[n], stream=bool(n % 2))):
            scene.add(PULLING, client)
        scene.bystanders(*ENGINES)


# --------------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=FULL)], ids=["stream", "whole"])
def test_clients_that_go_away(cluster, stream):
    with Scene(cluster, f"client goes away ({'stream' if stream else 'whole answer'})") as scene:
        scene.bystanders(*ENGINES)
        waits = scene.add(WAITING, cluster.client(300, stream=stream))
        scene.waits(waits)
        finishes = scene.finishes()
        streams = scene.add(STREAMING, cluster.client(150, 400, stream=stream)).start()
        if stream:
            streams.wait_tokens(2)
        else:
            time.sleep(1.5)
        kept = scene.other(cluster.client(700, 40))
        before = scene.add(BEFORE, cluster.client(250, stream=stream)).start()
        after(0.05, before.abort)
        pulls = scene.add(PULLING, cluster.client(1800, stream=stream))
        watch = scene.when_published(pulls, pulls.abort)
        pulls.start()
        assert watch.done.wait(60)
        for client in (waits, finishes, streams):
            client.abort()
        assert kept.join(DEADLINE_S)


@FULL
@pytest.mark.parametrize("action", ACTIONS)
def test_clients_that_go_away_while_prefill_is_told_badly(cluster, action):
    with Scene(cluster, f"client goes away, Cancel {action}") as scene:
        finishes = scene.finishes()
        scene.disturb(action, "Cancel", prompt=finishes.digest, delay_s=LEASE_S / 3)
        cluster.wait_held("prefill")
        finishes.abort()
        assert cluster.wait_released("prefill", LEASE_S + 2) < LEASE_S + 2


# --------------------------------------------------------------------------------------------------- refusals


def test_refused_by_an_engine(cluster):
    with Scene(cluster, "too long, or bad parameters, on decode") as scene:
        scene.bystanders(*ENGINES)
        kept = scene.other(cluster.client(600, 30))
        bad = [
            cluster.client(MAX_MODEL_LEN + 10),
            cluster.client(MAX_MODEL_LEN - 2, 8),
            cluster.client(100, temperature=-1),
            cluster.client(100, logit_bias={"99999999": 1}),
            cluster.client(100, kv_transfer_params={"do_remote_prefill": True}),
        ]
        for client in bad:
            scene.add(BEFORE, client).start()
        for client in (*bad, kept):
            assert client.join(DEADLINE_S)
        assert [client.status for client in bad] == [400] * len(bad)
    with Scene(cluster, "refused by prefill alone") as scene:
        client = scene.add(WAITING, cluster.client(PREFILL_MODEL_LEN + 50)).start()
        kept = scene.other(cluster.client(600, 30))
        assert client.join(REQUEST_S / 2), "an error of prefill ends the request at once"
        assert client.status == 400


def test_metaserver_errors(cluster):
    scenes = {
        "answers 404": {"status": 404},
        "answers 500": {"status": 500},
        "closes the connection": {"status": 0},
        "loses its answer": {"lose_answer": True},
    }
    made = []
    for what, plan in scenes.items():
        right = (WAITING,) if "lose_answer" in plan else ()
        made.append(Scene(cluster, f"metaserver {what}", right))
        done = cluster.hop.plan(**plan)
        made[-1].add(WAITING, cluster.client(300)).start()
        assert done.arrived.wait(30)
    made[0].bystanders(*ENGINES)
    end_all(made)


@FULL
def test_metaserver_that_never_answers(cluster):
    with Scene(cluster, "metaserver never answers") as scene:
        client = scene.add(WAITING, cluster.client(300))
        scene.waits(client)
        scene.other(cluster.client(600, 30))
        assert client.join(DEADLINE_S)
        assert client.verdict([]) == "error"


@FULL
def test_rendezvous_that_lead_nowhere(cluster):
    """Prefill is directed to a wrong address: its result is unused, and decode does not wait for long."""
    made = []
    for what, change in {"a dead port": {"remote_port": 9}, "a wrong TP": {"remote_tp_size": 3}}.items():
        made.append(Scene(cluster, f"rendezvous with {what}"))
        plan = cluster.hop.plan(changes=change)
        made[-1].add(WAITING, cluster.client(300)).start()
        assert plan.arrived.wait(30)
    end_all(made)


# ------------------------------------------------------------------------------------------------------ pools


def preemptions(cluster, name):
    return metrics(cluster.ports[name])["vllm:num_preemptions_total"]


@FULL
def test_pools_that_are_full(cluster):
    with Scene(cluster, "decode's blocks all taken", PHASES, again=False) as scene:
        for client in together(MAX_SEQS, lambda _n: cluster.client(BLOCKS * 64 // 5)):
            scene.add(BEFORE, client)
    with Scene(cluster, "decode's rows all taken", PHASES, again=False) as scene:
        for client in together(2 * MAX_SEQS, lambda n: cluster.client(40 + n, 30)):
            scene.add(BEFORE, client)
    with Scene(cluster, "decode's blocks taken, clients go away", again=False) as scene:
        clients = together(MAX_SEQS, lambda _n: cluster.client(BLOCKS * 64 // 5))
        for kept, gone in zip(clients[::2], clients[1::2], strict=True):
            scene.other(kept)
            scene.add(BEFORE, gone)
            after(0.3, gone.abort)


@FULL
def test_preempted(cluster):
    """Requests that grow until blocks run out: on decode, and then on prefill, whose transfers begin anew."""
    before = preemptions(cluster, "decode")
    with Scene(cluster, "preempted on decode", PHASES, again=False) as scene:
        for client in together(MAX_SEQS, lambda _n: cluster.client(560, 150)):
            scene.add(STREAMING, client)
        wait_for(lambda: preemptions(cluster, "decode") > before, "nothing was preempted")
    before = preemptions(cluster, "prefill")
    with Scene(cluster, "preempted on prefill", PHASES, again=False) as scene:
        for n in range(6):
            scene.other(cluster.client(600 + 7 * n, 100, to="prefill"))
        for client in together(5, lambda _n: cluster.client(1200)):
            scene.add(PULLING, client)
        wait_for(lambda: preemptions(cluster, "prefill") > before, "nothing was preempted")
