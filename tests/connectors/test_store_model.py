"""Random programs on a prefill engine without a model: nothing wrong is seen, published or left behind."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler

from tests.connectors import store_model
from tests.connectors.store_model import BLOCK, Engine, Faults
from vllm_kvoffload.connectors.ascend_store.lost_steps import LostStepScheduler
from vllm_kvoffload.connectors.ascend_store.scheduler import StoreScheduler
from vllm_kvoffload.connectors.ascend_store.worker import StoreWorker
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint
from vllm_kvoffload.layerwise import pipeline

SEEDS = 42
ALL = {"independent": "all"}
SHARED = {"shared": 1, "independent": ()}
CASES = [
    ALL,
    {**ALL, "drafts": 2, "ranks": 2},
    SHARED,
    {**SHARED, "drafts": 2},
    {"shared": 2, "independent": (0,), "drafts": 2, "ranks": 2},
]
HANGS = {"deadline_s": 0.05}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("model") / "tiny", MODELS["glm-tiny"])


@pytest.fixture
def engine(checkpoint):
    made = []

    def make(**options):
        made.append(Engine(checkpoint, 0, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Program:
    """A client's random deeds, and the store's."""

    def __init__(self, checkpoint, seed: int, **options) -> None:
        self.dice = dice = random.Random(seed)
        self.hangs = "deadline_s" in options
        blocks = 18 if self.hangs else dice.choice([18, 24, 40])
        self.engine = Engine(
            checkpoint, seed, policy=dice.choice(["recompute", "fail"]), num_blocks=blocks,
            objects=blocks + 12 + dice.choice([0, 30]), budget=dice.choice([12, 24, 40]),
            threshold=dice.choice([0, 0, 8]), **options,
        )  # fmt: skip
        self.roots = [self.tokens(40) for _ in range(2)]

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(50) for _ in range(count)]

    def run(self, steps: int = 40) -> list[str]:
        engine = self.engine
        try:
            for _ in range(steps):
                self.deeds()
                engine.step([name for name in engine.live if self.dice.random() < 0.03])
                if engine.wrong:
                    return engine.wrong
            engine.drain()
            return engine.wrong
        finally:
            engine.close()

    def deeds(self) -> None:
        dice, engine = self.dice, self.engine
        if dice.random() < 0.35 and len(engine.live) < 8:
            root = dice.choice(self.roots)[: dice.choice([0, 4, 8, 12, 17, 24, 30, 36])]
            prompt = [*root, *self.tokens(dice.randrange(0 if root else 1, 14))]
            engine.add(f"r{len(engine.clients)}", prompt, dice.randrange(1, 14))
        if engine.live and dice.random() < 0.06:
            engine.abort(dice.choice(engine.live))
        faults = Faults()
        engine.set_faults(faults)
        faults.gone = dice.choice([0.1, 0.5]) * (dice.random() < 0.25)
        faults.load = dice.choice([0.1, 0.5]) * (dice.random() < 0.2)
        faults.save = dice.choice([0.1, 0.5]) * (dice.random() < 0.15)
        faults.publish = 0.3 * (dice.random() < 0.1)
        faults.down = dice.random() < 0.05
        faults.hang = dice.choice([0.05, 0.3]) * (self.hangs and dice.random() < 0.25)


def wrong(checkpoint, seeds, cases) -> dict[int, list[str]]:
    """Violations by seed."""
    found = {seed: Program(checkpoint, seed, **cases[seed % len(cases)]).run() for seed in seeds}
    return {seed: list_ for seed, list_ in found.items() if list_}


@pytest.mark.slow
def test_random_programs(checkpoint):
    assert wrong(checkpoint, range(SEEDS), CASES) == {}


def test_random_programs_with_copies_that_hang(checkpoint, monkeypatch):
    monkeypatch.setattr(pipeline, "SETTLE_S", 0.01)
    assert wrong(checkpoint, range(100, 106), [{**HANGS, **SHARED}, {**HANGS, **ALL}]) == {}


def _vllms_scheduler(monkeypatch):
    monkeypatch.setattr(LostStepScheduler, "_handle_invalid_blocks", Scheduler._handle_invalid_blocks)


def _neighbours_are_believed(monkeypatch):
    monkeypatch.setattr(StoreWorker, "_spread", lambda *_: None)


def _losses_are_published(monkeypatch):
    finish = StoreWorker._finish
    monkeypatch.setattr(
        StoreWorker, "_finish", lambda self, writes, ok: finish(self, writes, [True] * len(ok))
    )


def _snapshots_are_taken_for_one_another(monkeypatch):
    def by_tokens(self, step, number):
        end = min((number + 1) * BLOCK, step.end)
        return self._keys.partial(f"{step.req_id}-{step.computed}", number, end)

    monkeypatch.setattr(StoreWorker, "_partial", by_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "case"),
    [
        (_vllms_scheduler, ALL),
        (_vllms_scheduler, {**HANGS, **SHARED}),
        (_neighbours_are_believed, ALL),
        (_losses_are_published, ALL),
        (_snapshots_are_taken_for_one_another, {**SHARED, "drafts": 2}),
    ],
)
def test_control_what_is_planted_is_found(checkpoint, monkeypatch, plant, case):
    plant(monkeypatch)
    monkeypatch.setattr(pipeline, "SETTLE_S", 0.01)
    assert any(Program(checkpoint, seed, **case).run() for seed in range(100))


COMMON = list(range(8))


def _store_first(engine) -> None:
    """The common prefix is in the store, and not in vLLM's cache."""
    engine.add("first", [*COMMON, 9], 1)
    engine.drain()
    assert engine.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("fault", [{"gone": 1.0}, {"load": 1.0}], ids=str)
def test_a_neighbour_that_hits_blocks_which_are_not_loaded(engine, policy, fault):
    """vLLM gives it another's blocks in the very step that was to load them."""
    made = engine(policy=policy, **ALL)
    _store_first(made)
    made.add("a", [*COMMON, 20, 21], 3)
    made.add("b", [*COMMON, *range(30, 40)], 3)
    made.set_faults(Faults(**fault))
    output = made.step()
    assert len(output.scheduled_new_reqs) == 2
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [8, 8]
    made.drain()
    assert made.wrong == []
    ends = {made.clients[name].finish for name in "ab"}
    assert ends == ({"length"} if policy == "recompute" else {"error"})


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("in_flight", [True, False])
def test_blocks_of_a_client_that_went_away_when_they_were_lost(engine, policy, in_flight):
    """Their blocks are no other request's prefix afterwards."""
    made = engine(policy=policy, **ALL)
    _store_first(made)
    made.add("a", [*COMMON, *range(20, 30)], 3)
    made.set_faults(Faults(load=1.0))
    made.step(["a"] if in_flight else [])
    if "a" in made.live:
        made.abort("a")
    made.set_faults(Faults(gone=1.0))
    made.add("b", [*COMMON, *range(20, 33)], 3)
    made.drain()
    assert made.wrong == []
    assert made.clients["b"].finish == "length"


def test_what_could_not_be_stored_costs_nobody_whose_kv_is_on_the_device(engine):
    made = engine(policy="fail", budget=12, **ALL)
    made.set_faults(Faults(save=1.0))
    for name in "ab":
        made.add(name, list(range(40)), 3)
    for _ in range(20):
        made.step()
    assert made.wrong == []
    assert {made.clients[name].finish for name in "ab"} == {"length"}


RANKS = {"shared": 2, "independent": (0,), "drafts": 2, "ranks": 2}


def _hits(engine) -> int:
    return engine.scheduler.connector._scheduler.stats.hit_tokens


@pytest.mark.parametrize("running", ["", "goes on", "is preempted"])
@pytest.mark.parametrize("case", [ALL, {**ALL, "drafts": 2, "ranks": 2}, SHARED, RANKS], ids=str)
def test_after_a_reset_nothing_stored_before_is_found(engine, monkeypatch, case, running):
    """Nor are blocks stored later by a request that began before: their KV may stem from both weights."""
    made = engine(**case)
    _store_first(made)
    long = [*COMMON, *range(20, 44)]
    if running:
        made.add("long", long, 6)
        made.step()
        assert _hits(made) == 8
    else:  # otherwise the expectation of the running one would change, too
        plain = store_model.row
        monkeypatch.setattr(store_model, "row", lambda layer, value: plain(layer, value) ^ 0x5A5A)
        made.contents.clear()
    found = made.scheduler.reset_prefix_cache(running == "is preempted", reset_connector=True)
    assert found is (running != "goes on")  # vLLM's own part: blocks that are in use stay
    before = _hits(made)
    made.add("again", [*COMMON, 9, 10, 11, 12], 3)
    made.drain()
    if running != "is preempted":  # it begins anew, and stores anew
        assert _hits(made) == before
    before = _hits(made)
    assert made.scheduler.reset_prefix_cache()
    made.add("long again", [*long, 45], 3)
    made.step()
    assert _hits(made) - before == (32 if running == "is preempted" else len(COMMON))
    made.drain()
    assert made.wrong == []
    assert {client.finish for client in made.clients.values()} == {"length"}


@pytest.mark.parametrize("where", ["metadata", "loads", "saves"])
@pytest.mark.parametrize("case", [ALL, SHARED, RANKS], ids=str)
def test_a_request_that_the_connector_can_do_nothing_with(engine, monkeypatch, case, where):
    """It is not stored, and ends with an error where its KV is nowhere else. Its neighbours see nothing."""
    kinds = {"metadata": (StoreScheduler, "_step"), "loads": (StoreWorker, "_plan_loads")}
    kind, name = kinds.get(where, (StoreWorker, "_plan_saves"))
    plain = getattr(kind, name)

    def planted(self, of, *arguments):
        name = of.request.request_id if where == "metadata" else of.step.req_id
        if name == "bad":
            raise TypeError("planted")
        return plain(self, of, *arguments)

    monkeypatch.setattr(kind, name, planted)
    made = engine(policy="fail", budget=40, **case)
    _store_first(made)
    made.add("bad", [*COMMON, *range(20, 33)], 4)
    made.add("good", [*range(1, 12)], 4)
    made.drain()
    assert made.wrong == []
    assert made.clients["good"].finish == "length"
    fits = case is ALL and where == "saves"
    assert made.clients["bad"].finish == ("length" if fits else "error")
