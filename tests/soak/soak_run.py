"""One soak from start to end: the oracle, the load, the chaos, calm phases between them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fault_cluster import Census
from tests.soak.soak_chaos import Chaos
from tests.soak.soak_fleet import READY_S, Fleet
from tests.soak.soak_journal import Journal
from tests.soak.soak_load import Load, Oracle, Record, prompts
from tests.soak.soak_watch import Growth, Watch, growth, more_than
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

PROBES = 12
"""Prompts asked in each calm phase: all must be right."""
COUNTS_MAY_GROW = 4
"""Threads, and files, by which a process may exceed its first calm phase: pools that fill up lazily."""
ENDS_UNTIL = 0.25
"""After this share of the soak only the last prefill server and the strays are ended: the others are to live
through the rest, so that their memory can be judged."""


@dataclass(frozen=True)
class Plan:
    """minutes: of load, without the start. kinds: of chaos. calm_s: from one calm phase to the next.
    warm_up_s: of a process, before its memory is judged."""

    minutes: float
    seed: int
    users: int
    prefills: int
    kinds: tuple[str, ...]
    sampled: bool
    calm_s: float
    warm_up_s: float
    folder: Path


@dataclass
class Outcome:
    """Results of a soak. faults: violations, one line each. requests: running for too long."""

    records: list[Record] = field(default_factory=list)
    unexcused: list[Record] = field(default_factory=list)
    outlived: int = 0
    faults: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)
    chaos: Mapping[str, int] = field(default_factory=dict)
    calm_phases: int = 0
    minutes: float = 0.0
    loaded_share: float = 0.0

    @property
    def wrong(self) -> list[Record]:
        return [record for record in self.records if record.verdict == "WRONG"]

    @property
    def problems(self) -> list[str]:
        """Why the soak failed, one line each."""
        found = [f"{len(self.wrong)} answers with wrong tokens"] if self.wrong else []
        if self.outlived:
            found.append(f"{self.outlived} requests outlived every deadline")
        if self.unexcused:
            found.append(f"{len(self.unexcused)} requests failed though nothing explains it")
        found += [f"not flat: {g.life} {g.process}" for g in self.growths if not g.flat]
        return found + self.leaks + self.faults


class Soak:
    """Runs a plan. The fleet is ended in any case."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._begun = plan, time.monotonic()
        plan.folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(plan.folder / "journal.txt", self._begun)
        self._fleet = Fleet(self._checkpoint(), plan.folder, plan.prefills)
        self._oracle = Oracle(prompts(plan.seed))
        self._watch = Watch(self._fleet, plan.folder, self._begun)
        self._rng = random.Random(plan.seed)
        self._chaos = Chaos(self._fleet, self._journal, random.Random(f"{plan.seed}/chaos"))
        self._census: dict[str, dict[str, int]] = {}
        self._outcome = Outcome()
        self._bag: list[str] = []
        self._loaded_s = 0.0

    def run(self) -> Outcome:
        try:
            self._learn()
            self._fleet.start_all()
            self._watch.start()
            problems = self._oracle.check(self._fleet.ports["proxy"], range(len(self._oracle.prompts)), 24)
            self._outcome.faults += [f"undisturbed: {problem}" for problem in problems]
            self._journal.say(f"the deployment serves; checked undisturbed: {len(problems)} of "
                              f"{len(self._oracle.prompts)} prompts not right")  # fmt: skip
            self._soak()
        finally:
            self._watch.stop()
            self._outcome.faults += self._fleet.stop()
            self._journal.close()
        return self._outcome

    def _checkpoint(self) -> Path:
        return build_checkpoint(self._plan.folder / "model", MODELS["glm-tiny"])

    def _learn(self) -> None:
        plain = self._fleet.plain()
        try:
            plain.wait_ready(READY_S)
            self._oracle.learn(plain.port)
        finally:
            plain.stop(20)
        self._journal.say(f"the oracle knows {len(self._oracle.answers)} prompts")

    def _soak(self) -> None:
        plan, outcome = self._plan, self._outcome
        load = Load(self._fleet.ports["proxy"], self._oracle, plan.seed, plan.users, plan.sampled)
        begin = time.monotonic()
        end = begin + 60 * plan.minutes
        try:
            self._calm(load)
            while time.monotonic() < end:
                self._stormy(load, begin, min(end, time.monotonic() + plan.calm_s))
                self._calm(load)
        finally:
            load.stop()
        outcome.minutes = (time.monotonic() - begin) / 60
        outcome.loaded_share = self._loaded_s / (time.monotonic() - begin)
        self._judge(load)

    def _stormy(self, load: Load, begin: float, until: float) -> None:
        """Load, with chaos in most of its time."""
        load.resume()
        resumed = time.monotonic()
        while time.monotonic() < until:
            if time.monotonic() > begin + ENDS_UNTIL * 60 * self._plan.minutes:
                self._chaos.may_end = {self._fleet.prefills[-1]} if len(self._fleet.prefills) > 1 else set()
            self._chaos.wait(min(self._rng.uniform(3, 15), max(0.0, until - time.monotonic())))
            if self._plan.kinds and time.monotonic() < until and (kind := self._draw()):
                self._chaos.act(kind)
        self._loaded_s += time.monotonic() - resumed

    def _draw(self) -> str | None:
        """Each kind once before any comes again. None where the drawn one has nothing to hit any more."""
        if not self._bag:
            self._bag = self._rng.sample(self._plan.kinds, len(self._plan.kinds))
        kind = self._bag.pop()
        return kind if self._chaos.possible(kind) else None

    def _calm(self, load: Load) -> None:
        """Nothing under way, nothing held, counts as before; then prompts, all of them right."""
        if not load.pause():
            self._outcome.outlived += len(load.under_way)
            self._chaos.fault(f"{len(load.under_way)} requests are still under way")
        held = self._watch.wait_quiet()
        if held:
            self._leak(f"held in a calm phase: {held}")
            self._chaos.revive()
        numbers = self._rng.sample(range(len(self._oracle.prompts)), PROBES)
        for problem in self._oracle.check(self._fleet.ports["proxy"], numbers, 16):
            self._chaos.fault(f"in a calm phase: {problem}")
        held = self._watch.wait_quiet()
        self._count_threads_and_files()
        self._outcome.calm_phases += 1
        self._journal.say(f"calm: {held or 'nothing is held'}; {len(load.records)} requests so far")

    def _count_threads_and_files(self) -> None:
        for life in self._fleet.lives.values():
            threads, files = Census(life.server.pid).counts
            now = {f"{life.label} threads": threads, f"{life.label} files": files}
            base = self._census.setdefault(life.label, now)
            for problem in more_than(base, now, COUNTS_MAY_GROW):
                self._leak(problem)

    def _leak(self, text: str) -> None:
        self._journal.say(f"LEAK  {text}")
        self._outcome.leaks.append(text)

    def _judge(self, load: Load) -> None:
        outcome = self._outcome
        outcome.records = list(load.records)
        outcome.outlived += sum(record.verdict == "HANGS" for record in outcome.records)
        failed = [record for record in outcome.records if record.verdict == "error"]
        outcome.unexcused = [
            record
            for record in failed
            if not any(excuse.covers(record.begun, record.ended) for excuse in self._chaos.excuses)
        ]
        outcome.growths = growth(self._watch.samples, self._plan.warm_up_s)
        outcome.faults += self._chaos.faults
        outcome.chaos = self._chaos.counts
        for record in [*outcome.wrong, *outcome.unexcused][:50]:
            self._journal.say(f"{record}, begun at {record.begun - self._begun:.1f} s")
