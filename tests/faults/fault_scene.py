"""One fault: brings requests into their phases, injects the fault, and checks the required outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.faults.fault_client import Client
from tests.faults.fault_cluster import DEADLINE_S, LEASE_S, PREFILL_MODEL_LEN, Cluster
from tests.faults.fault_hop import Plan
from tests.faults.fault_relay import Rule, Watch
from tests.faults.fault_report import PHASES, REPORT, Cell, Report
from vllm_kvoffload.connectors.sfa_remote_d2h import wire

AGAIN_TOKENS = 6
BEFORE, WAITING, PULLING, FINISHING, STREAMING = PHASES


class Scene:
    """Requests of one fault. Use as a context: its end judges them and waits until nothing is left.

    After the block every request must end in time, none with wrong tokens; `right` names phases in which
    nothing but the right tokens will do. Then the prompts of all of them are asked again and must be right,
    since blocks whose KV never came must not be taken for a cached prefix; then the cluster must be quiet.
    """

    def __init__(
        self,
        cluster: Cluster,
        fault: str,
        right: tuple[str, ...] = (),
        again: bool = True,
        report: Report = REPORT,
    ) -> None:
        self.cluster, self.fault = cluster, fault
        self._right, self._again = set(right), again
        self._row = report.row(fault)
        self._clients: list[tuple[Client, str]] = []
        self._others: list[Client] = []
        self._rules: list[tuple[Rule, int]] = []
        self._held: list[Plan] = []
        self._parked: list[Rule] = []

    # ---------------------------------------------------------------------------------------- the requests

    def add(self, phase: str, client: Client) -> Client:
        """A request that the fault may hit in this phase."""
        self._clients.append((client, phase))
        return client

    def other(self, client: Client) -> Client:
        """A request that the fault must not change."""
        self._others.append(client)
        return client.start()

    def bystanders(self, *names: str) -> None:
        """Requests that these engines answer alone."""
        for name in names:
            self.other(self.cluster.client(200, 150, to=name)).wait_tokens(1)

    def waits(self, client: Client | None = None) -> Plan:
        """A request whose rendezvous prefill doesn't hear of before `release`, or before its plan goes on."""
        plan = self.cluster.hop.plan(hold=True)
        self._held.append(plan)
        client = client or self.add(WAITING, self.cluster.client(300))
        client.start()
        assert plan.arrived.wait(30), "decode did not post"
        return plan

    def finishes(self) -> Client:
        """A request that is read, and not confirmed before `release`."""
        client = self.add(FINISHING, self.cluster.client(400))
        rule = self.cluster.relay.rule("dropped", "Finish", prompt=client.digest, times=None)
        self._parked.append(rule)
        client.start()
        wait_for(lambda: rule.hits > 0, "decode did not finish")
        return client

    def streams(self, tokens: int = 250) -> Client:
        """A request that is being decoded."""
        client = self.add(STREAMING, self.cluster.client(150, tokens)).start()
        client.wait_tokens(2)
        return client

    def when_published(self, client: Client, act: Callable[[], None]) -> Watch:
        """Calls `act` when some of the client's KV, and not all, can be read."""

        def fits(message: Any) -> bool:
            return (
                isinstance(message, wire.Publish)
                and message.prompt == client.digest
                and not message.complete
                and any(chunk.layers for chunk in message.chunks)
            )

        return self.cluster.relay.watch(fits, act)

    def before(self) -> Client:
        """A request that comes now, with the fault in place."""
        return self.add(BEFORE, self.cluster.client(250)).start()

    def all_phases(self, act: Callable[[], None], *others: str) -> None:
        """One request in each phase when `act` is called; then they go on. others: as for `bystanders`."""
        pulls = self.add(PULLING, self.cluster.client(1800))
        watch = self.when_published(pulls, act)
        held = self.waits(pulls)
        self.waits()
        self.finishes()
        streams = self.streams()
        self.bystanders(*others)
        held.go.set()
        assert watch.done.wait(60), "prefill did not publish"
        assert not streams.complete, "it was to be in flight"
        self._others = [client for client in self._others if not client.complete]
        self.before()
        self.release()

    def release(self) -> None:
        """Lets go of the requests that were held in their phases."""
        for plan in self._held:
            plan.go.set()
        for rule in self._parked:
            self.cluster.relay.remove(rule)

    def disturb(self, action: str, *kinds: str, at_least: int = 1, **more: Any) -> Rule:
        """A rule of the relay that must have hit so often in the end."""
        rule = self.cluster.relay.rule(action, *kinds, **more)
        self._rules.append((rule, at_least))
        return rule

    def await_hits(self, deadline_s: float = DEADLINE_S) -> None:
        """Waits until all rules have matched often enough; missing matches are reported at the end."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end and any(rule.hits < least for rule, least in self._rules):
            time.sleep(0.05)

    # ------------------------------------------------------------------------------------------ the end

    def __enter__(self) -> Scene:
        self.cluster.heal()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        cluster = self.cluster
        everybody = [client for client, _ in self._clients] + self._others
        cluster.go_on()
        self.release()
        cluster.hop.release_all()
        if kind is not None:
            cluster.relay.clear()
            for client in everybody:
                client.abort()
            return
        end = time.monotonic() + DEADLINE_S
        for client in everybody:
            client.join(end - time.monotonic())
        for rule, at_least in self._rules:
            assert rule.hits >= at_least, f"{rule} was to hit {at_least} messages: this fault did not happen"
        cluster.relay.clear()
        cluster.wait_ready()
        self._judge(everybody)
        if self._again:
            self._ask_again()
        self._row.seconds = cluster.wait_quiet()
        self._row.passed = True

    def _judge(self, everybody: list[Client]) -> None:
        references = self.cluster.references(everybody)
        bad = []
        for client, phase in self._clients:
            outcome = client.verdict(references[client])
            self._row.cells.setdefault(phase, Cell()).outcomes.append(outcome)
            if outcome not in ("right", *(() if phase in self._right else ("error", "gone"))):
                bad.append(f"{phase}: {_told(client, outcome, references[client])}")
        for client in self._others:
            outcome = client.verdict(references[client])
            self._row.others += 1
            if outcome != "right":
                bad.append(f"another request: {_told(client, outcome, references[client])}")
        assert not bad, f"{self.fault}: " + "; ".join(bad)

    def _ask_again(self) -> None:
        """The same prompts, in full health: nothing of a failed transfer may be left in a prefix cache."""
        again = [
            Client(self.cluster.ports["proxy"], client.prompt, AGAIN_TOKENS, stream=bool(n % 2)).start()
            for n, (client, _) in enumerate(self._clients)
            if client.status != 400 and len(client.prompt) + AGAIN_TOKENS <= PREFILL_MODEL_LEN
        ]
        for client in again:
            client.join(DEADLINE_S)
        references = self.cluster.references(again)
        verdicts = {client: client.verdict(references[client]) for client in again}
        bad = [_told(client, verdict, references[client]) for client, verdict in verdicts.items()
               if verdict != "right"]  # fmt: skip
        assert not bad, f"{self.fault}, asked again: " + "; ".join(bad)


def _told(client: Client, outcome: str, reference: list[str]) -> str:
    where = next((n for n, (a, b) in enumerate(zip(client.tokens, reference, strict=False)) if a != b), "-")
    return (
        f"{len(client.prompt)} tokens, {outcome} after {client.seconds:.1f} s, {len(client.tokens)} of "
        f"{client.max_tokens} tokens, first wrong one {where}, error {client.error!r}"
    )


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Raises AssertionError when the condition is not met in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def together(count: int, make: Callable[[int], Client]) -> list[Client]:
    """Clients that start at once."""
    made = [make(n) for n in range(count)]
    for client in made:
        client.start()
    return made


def end_all(scenes: list[Scene]) -> None:
    """Ends scenes whose requests ran beside each other."""
    for scene in scenes:
        for client, _ in scene._clients:
            client.join(DEADLINE_S)
    for scene in scenes:
        with scene:
            pass


def beside(scene: Scene, act: Callable[[], Any], *others: str) -> None:
    """One request in each phase when `act` begins, which may take its time."""
    thread = threading.Thread(target=act)
    scene.all_phases(thread.start, *(others or ("prefill", "decode")))
    thread.join()


def after(seconds: float, act: Callable[[], None]) -> None:
    """Calls `act` later, in a thread."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


SHORT_S, LONG_S = 0.35 * LEASE_S, 1.7 * LEASE_S


def warm_up(cluster: Cluster) -> None:
    """First contact over a bad connection; then requests that make processes start their lazy threads."""
    with Scene(cluster, "first contact: Hello dropped, its answer truncated", (WAITING,)) as scene:
        scene.disturb("dropped", "Hello")
        scene.disturb("truncated", "HelloAck")
        scene.add(WAITING, cluster.client(300)).start()
    for number in range(2):
        clients = together(10, lambda n: cluster.client(100 + 90 * n, stream=bool(n % 2)))
        clients += together(4, lambda n: cluster.client(100, to=("prefill", "decode")[n % 2]))
        for client in clients[number :: 3 - number]:
            after(0.2, client.abort)
        for client in clients:
            assert client.join(DEADLINE_S)
    cluster.settle()
