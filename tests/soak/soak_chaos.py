"""Faults during a soak: one at a time, drawn by a seed, each with its times in the journal."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults import fault_strangers as strangers
from tests.soak.soak_fleet import LEASE_S, OTHER_BLOCK_SIZE, OTHER_DTYPE, REQUEST_S, Fleet, ask
from tests.soak.soak_journal import Journal
from vllm_kvoffload.demo.server import ServerError

SHORT_S, LONG_S = 0.3 * LEASE_S, 2.0 * LEASE_S
IDLE_EACH = 150
IDLE_S = 20.0
NIXL_PORTS = 1
MISMATCH_S = 30.0
HEALTH_S = 60.0
"""A server that doesn't answer /health for so long is dead, whatever its process does."""


@dataclass
class Excuse:
    """A period in which requests may fail: those that began or were running then. ended: 0.0 while it
    lasts."""

    what: str
    begun: float
    ended: float = 0.0

    def covers(self, begun: float, ended: float) -> bool:
        """Whether a request from `begun` to `ended` met it."""
        return begun <= (self.ended or float("inf")) and ended >= self.begun


class Chaos:
    """Acts on a fleet, from the main thread.

    `excuses`: when requests may fail. `faults`: violations, one line each.
    """

    def __init__(self, fleet: Fleet, journal: Journal, rng: random.Random) -> None:
        self._fleet, self._journal, self._rng = fleet, journal, rng
        self.excuses: list[Excuse] = []
        self.faults: list[str] = []
        self.counts: dict[str, int] = {}
        self.may_end: set[str] = set(fleet.names)
        """Servers that may still be killed: the others are to live, for their memory to be judged."""

    def act(self, kind: str) -> None:
        """One thing of this kind, until the deployment serves again."""
        begun = time.monotonic()
        self._journal.say(f"{kind}: begins")
        self.counts[kind] = self.counts.get(kind, 0) + 1
        try:
            KINDS[kind](self)
        except (AssertionError, ServerError, OSError) as error:
            self.fault(f"{kind}: {error!r}")
        self.revive()
        self._journal.say(f"{kind}: over after {time.monotonic() - begun:.1f} s")

    def possible(self, kind: str) -> bool:
        """Whether there is still something that this kind may hit."""
        role = ENDS.get(kind)
        return role is None or any(name.startswith(role) for name in self.may_end)

    def fault(self, text: str) -> None:
        self._journal.say(f"FAULT  {text}")
        self.faults.append(text)

    def wait(self, seconds: float) -> None:
        """Load without faults, watching for processes that die."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(1.0, max(0.0, end - time.monotonic())))
            self.revive()

    def revive(self) -> None:
        """Restarts servers that ended by themselves or no longer answer. Counts as a fault."""
        for name in self._fleet.died():
            life = self._fleet.lives[name]
            self.fault(f"{life.label} ended on its own: {cause(life.server.tail(100_000))}")
            self._restart(name)
        for name in self._fleet.names:
            end = time.monotonic() + HEALTH_S
            while not self._fleet.healthy(name):
                if name in self._fleet.died():
                    self.revive()
                    return
                if time.monotonic() > end:
                    label = self._fleet.lives[name].label
                    self.fault(f"{label} is there, and not healthy for {HEALTH_S:.0f} s")
                    self._restart(name)
                    break
                time.sleep(0.5)

    def _restart(self, name: str) -> None:
        excuse = self._excuse(f"{name} starts again", since=time.monotonic() - HEALTH_S)
        self._fleet.kill(name)
        self._fleet.start(name)
        self._ready(name)
        excuse.ended = time.monotonic()

    def _excuse(self, what: str, since: float | None = None) -> Excuse:
        self.excuses.append(Excuse(what, time.monotonic() if since is None else since))
        return self.excuses[-1]

    def _ready(self, *names: str) -> None:
        """They answer, and the proxy's probes, one a second, have seen it."""
        self._fleet.wait_ready(names)
        time.sleep(3.0)

    # ------------------------------------------------------------------------------------------ processes

    def killed(self, kind: str, number: int) -> None:
        """SIGKILL or SIGTERM, and a start some seconds later."""
        names = [n for n in self._fleet.names if n.startswith(ENDS[kind]) and n in self.may_end]
        name = self._rng.choice(names)
        excuse = self._excuse(f"{name} killed")
        self._journal.say(f"{name}: {signal.Signals(number).name}")
        (self._fleet.kill if number == signal.SIGKILL else self._fleet.terminate)(name)
        time.sleep(self._rng.uniform(0, 6))
        self._fleet.start(name)
        self._ready(name)
        excuse.ended = time.monotonic()

    def frozen(self, seconds: float) -> None:
        """SIGSTOP and SIGCONT. Less than a lease is no excuse."""
        name = self._rng.choice(self._fleet.names)
        self._journal.say(f"{name} stands still for {seconds:.1f} s")
        excuse = self._excuse(f"{name} frozen") if seconds > LEASE_S else None
        self._fleet.signal(name, signal.SIGSTOP)
        time.sleep(seconds)
        self._fleet.signal(name, signal.SIGCONT)
        self._ready(name)
        if excuse is not None:
            time.sleep(LEASE_S)  # its missed messages are noticed within a lease
            excuse.ended = time.monotonic()

    def mismatched(self) -> None:
        """A prefill server of another layout joins for a while."""
        more = self._rng.choice((OTHER_BLOCK_SIZE, OTHER_DTYPE))
        self._journal.say(f"a prefill server with {' '.join(more)}")
        self._fleet.start("stray", more)
        try:
            self._fleet.wait_ready(["stray"])
            excuse = self._excuse("a prefill server that does not fit")
            status, body = self._fleet.admin("add", "stray")
            assert status == 200, f"the proxy did not add it: {status} {body[:200]!r}"
            self.wait(MISMATCH_S)
            self._fleet.admin("drain", "stray")
            time.sleep(REQUEST_S / 3)
            status, _ = self._fleet.admin("remove", "stray")
            assert status == 200, f"the proxy did not remove it: {status}"
            excuse.ended = time.monotonic()
        finally:
            self._fleet.terminate("stray", 5)
            self._fleet.forget("stray")

    # ------------------------------------------------------------------------------------------ strangers

    def control(self) -> None:
        """All that a stranger may send to decode's control port."""
        secret = strangers.learn_secret(self._fleet.ports["decode"]) if self._rng.random() < 0.5 else ""
        # A holder of the secret may introduce itself as any prefill server: it is trusted with that.
        true = None if secret else strangers.learn_hello(self._fleet.ports[self._fleet.prefills[0]])
        self._journal.say(
            f"strangers with {'the secret' if secret else 'a true Hello' if true else 'nothing'}"
        )
        for name, send in strangers.CONTROL.items():
            if send is strangers.frames:
                strangers.frames(self._fleet.kv_port, self._rng, secret, true)
            else:
                send(self._fleet.kv_port, self._rng)
            self._alive(f"after {name} at the control port")

    def nixl(self) -> None:
        """Bytes at NIXL's port, which is the last that an engine's worker opens beside the control port.

        The others are those of torch's process groups, which keep every connection of a stranger open.
        """
        known = {*self._fleet.ports.values(), self._fleet.kv_port}
        for name in self._fleet.names[:-1]:
            ports = strangers.listening(self._fleet.lives[name].server.pid)
            for port in [port for port in ports if port not in known][-NIXL_PORTS:]:
                strangers.raw_garbage(port, self._rng)
            self._alive(f"after bytes at NIXL's ports of {name}")

    def http(self) -> None:
        """Hostile HTTP at every HTTP port."""
        for name in self._fleet.names:
            strangers.http_garbage(self._fleet.ports[name], self._rng)
            statuses = strangers.http_bodies(self._fleet.ports[name], self._rng)
            if -1 in statuses:
                self.fault(f"{name}: a hostile request without an answer for 60 s: {statuses}")
            self._alive(f"after hostile HTTP at {name}")

    def parameters(self) -> None:
        """Hostile kv_transfer_params straight to the engines."""
        prefill = self._rng.choice(self._fleet.prefills)
        ports = self._fleet.ports[prefill], self._fleet.ports["decode"]
        statuses = strangers.parameters(*ports, self._rng, count=24)
        self._journal.say(f"statuses: {statuses}")
        if -1 in statuses:
            self.fault(f"{statuses[-1]} requests with hostile kv_transfer_params had no answer for 60 s")
        self._alive("after hostile kv_transfer_params")

    def idle(self) -> None:
        """Hundreds of connections that say nothing, at every port."""
        ports = [*(self._fleet.ports[name] for name in self._fleet.names), self._fleet.kv_port]
        idlers = strangers.Idlers(ports, IDLE_EACH)
        try:
            self.wait(IDLE_S)
        finally:
            idlers.close()

    def _alive(self, when: str) -> None:
        died = self._fleet.died()
        if died:
            self.fault(f"{', '.join(died)} dead {when}")
            self.revive()

    # ---------------------------------------------------------------------------------------------- reset

    def reset(self) -> None:
        """vLLM's own endpoint, at all engines, while requests run: it may fail, and must not hurt."""
        for name in self._fleet.names[:-1]:
            status, body = ask(
                self._fleet.ports[name], "POST", "/reset_prefix_cache?reset_external=true", timeout_s=60
            )
            self._journal.say(f"{name}: reset answers {status} {body[:100].decode(errors='replace')}")
            assert status in (200, 500, 503), f"{name}: reset answers {status}"


def cause(log: str) -> str:
    """The first line of a log that says why an engine ended, or its end."""
    for line in log.splitlines():
        if re.search(r"^\((EngineCore|Worker)[^)]*\) ERROR .*(Error|Exception): ", line) or FATAL in line:
            return line
    return log[-1500:]


FATAL = "Fatal Python error"
ENDS = {"kill-prefill": "prefill", "kill-decode": "decode", "kill-proxy": "proxy", "restart": ""}
"""Kinds that end a server, and how its name begins."""
KINDS: dict[str, Callable[[Chaos], None]] = {
    "kill-prefill": lambda chaos: chaos.killed("kill-prefill", signal.SIGKILL),
    "kill-decode": lambda chaos: chaos.killed("kill-decode", signal.SIGKILL),
    "kill-proxy": lambda chaos: chaos.killed("kill-proxy", signal.SIGKILL),
    "restart": lambda chaos: chaos.killed("restart", signal.SIGTERM),
    "freeze-short": lambda chaos: chaos.frozen(SHORT_S),
    "freeze-long": lambda chaos: chaos.frozen(LONG_S),
    "mismatch": Chaos.mismatched,
    "control": Chaos.control,
    "nixl": Chaos.nixl,
    "http": Chaos.http,
    "parameters": Chaos.parameters,
    "idle": Chaos.idle,
    "reset": Chaos.reset,
}
