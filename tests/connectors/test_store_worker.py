"""The worker half over a store of names: which key a block is found under again."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from tests.connectors.test_schedulers import Output
from vllm_kvoffload.connectors.ascend_store import worker as worker_module
from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.connectors.ascend_store.scheduler import StoreScheduler
from vllm_kvoffload.connectors.ascend_store.worker import LEASE_S, RENEW_S, StoreWorker
from vllm_kvoffload.store import KeySpace, ReadObject, WriteObject, WriteRefusal

BLOCK = 64
HASHES = tuple(bytes([n]) * 32 for n in range(8))


class Names:
    """A store that keeps names only."""

    def __init__(self) -> None:
        self.readable: set[str] = set()
        self.reserved: set[str] = set()
        self.open: set[int] = set()
        self._handles = count(1)

    def open_read(self, keys, _lease_s):
        found = [ReadObject(key, 0, 1, next(self._handles)) if key in self.readable else None for key in keys]
        self.open |= {pin.handle for pin in found if pin is not None}
        return found

    def close_read(self, objects):
        self.open -= {pin.handle for pin in objects}

    def open_write(self, keys, _nbytes):
        taken = self.readable | self.reserved
        self.reserved |= set(keys)
        return [
            WriteRefusal.EXISTS if key in taken else WriteObject(key, 0, 1, next(self._handles))
            for key in keys
        ]

    def finish_write(self, objects, ok):
        for written, good in zip(objects, ok, strict=True):
            self.reserved.discard(written.key)
            if good:
                self.readable.add(written.key)
        return list(ok)


class Pipeline:
    """Moves everything at once."""

    drained = True

    def begin(self, step):
        self.lost, self.invalid, self.given_up = {}, set(), []
        self.requests = step.requests

    def fail(self, number, reason, invalid=True):
        self.lost[self.requests[number]] = reason
        if invalid:
            self.invalid.add(self.requests[number])

    def give_up(self, requests, _reason):
        self.given_up += requests

    def finish(self):
        return self.lost


@pytest.fixture
def world():
    elsewhere = {}
    store, keys = Names(), KeySpace("m", "", "bf16", BLOCK, "layout", "0of1", "probe")
    worker = StoreWorker(
        store, keys, Pipeline(), block_size=BLOCK, object_bytes=1, publishes=True, shares=True,
        agree=lambda lost: {**lost, **elsewhere},
    )  # fmt: skip

    def step(name, computed, end):
        first = computed == 0
        done = -(-computed // BLOCK)
        blocks = tuple(range(done, -(-end // BLOCK)))
        hashes = HASHES[computed // BLOCK : end // BLOCK]
        worker.begin_step(
            StoreMetadata([StoreStep(name, name, first, blocks, hashes, computed, 0, 0, end, end, False)])
        )
        worker.end_step()
        return worker.pipeline.lost

    return SimpleNamespace(store=store, keys=keys, worker=worker, step=step, elsewhere=elsewhere)


def test_chunks_are_found_again(world):
    for computed, end in ((0, 196), (196, 452), (452, 500)):
        assert world.step("r", computed, end) == {}
    assert {world.keys.key(hashed) for hashed in HASHES[:7]} <= world.store.readable


@pytest.mark.parametrize("others", [(3,), (0,), (0, 3, 5)], ids=str)
def test_blocks_that_somebody_else_has_yet_to_finish(world, others):
    """They are kept under the request's own name meanwhile, also one whose first rows are kept so already."""
    world.store.reserved |= {world.keys.key(HASHES[n]) for n in others}
    for computed, end in ((0, 196), (196, 452), (452, 500)):
        assert world.step("r", computed, end) == {}
    assert not {world.keys.key(HASHES[n]) for n in others} & world.store.readable
    world.worker.release({"r"})
    assert world.store.open == set()


def test_a_block_that_is_gone_is_missed(world):
    assert world.step("r", 0, 196) == {}
    world.store.readable.clear()
    assert "not in the store any more" in world.step("r", 196, 300)["r"]


def test_pins_are_renewed_before_their_leases_end(world, monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(worker_module, "time", clock)
    for computed, end in ((0, 196), (196, 300)):
        assert world.step("r", computed, end) == {}
    for seconds, renewed in (
        (LEASE_S - RENEW_S - 1, False),
        (LEASE_S - RENEW_S + 1, True),
        (LEASE_S - RENEW_S + 2, False),
    ):
        before = set(world.store.open)
        clock.monotonic = lambda seconds=seconds: seconds
        assert world.step("r", 300, 310) == {}
        pins = {pin.handle for pin in world.worker._requests["r"].pins.values()}
        assert pins <= world.store.open
        assert before.isdisjoint(pins) is renewed


def test_what_another_rank_lost_is_not_handed_to_decode_by_this_one(world):
    """A block that one rank could not load is lost on all ranks."""
    assert world.step("r", 0, 196) == {}
    assert world.worker.pipeline.given_up == []
    world.elsewhere["r"] = ("a load of rank 1 failed", True)
    assert world.step("r", 196, 452) == {}
    assert world.worker.pipeline.given_up == ["r"]
    assert world.worker.take_invalid() == set(range(8))
    assert not {world.keys.key(hashed) for hashed in HASHES[3:7]} & world.store.readable


def test_what_another_rank_could_not_store_is_handed_to_decode(world):
    world.elsewhere["r"] = ("a save of rank 0 failed", False)
    assert world.step("r", 0, 196) == {}
    assert world.worker.pipeline.given_up == []


def test_a_snapshot_of_other_drafts_is_not_taken_for_this_one(world):
    """After a loss a step may begin and end where an earlier one did, with other drafts."""
    assert world.step("r", 0, 100) == {}
    before = set(world.store.readable)
    assert world.step("r", 0, 100) == {}
    (new,) = world.store.readable - before
    assert ".partial." in new


def test_a_name_that_is_used_again_at_once(world):
    """vLLM tells of the end of the first one in the step in which the second one begins."""
    assert world.step("r", 0, 100) == {}
    world.step("r", 0, 100)
    world.worker.release({"r"})
    assert world.step("r", 100, 150) == {}
    world.worker.release({"r"})
    assert world.worker.num_pins == 0


class Odd:
    """A malformed request: missing attributes raise."""

    def __init__(self, **given):
        plain = {
            "request_id": "r", "block_hashes": list(HASHES), "num_tokens": 100, "num_prompt_tokens": 100,
            "num_output_tokens": 0, "max_tokens": 5, "skip_reading_prefix_cache": False,
        }  # fmt: skip
        self.__dict__.update({k: v for k, v in {**plain, **given}.items() if v is not ...})


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, True),
        ({"max_tokens": None}, True),
        ({"max_tokens": 0}, True),
        ({"max_tokens": 1 << 80}, True),
        ({"block_hashes": []}, True),
        ({"block_hashes": HASHES[:1]}, True),
        ({"request_id": "\ud800\n\0" * 999}, True),
        ({"block_hashes": None}, False),
        ({"block_hashes": ...}, False),
        ({"block_hashes": [None] * 8}, False),
        ({"max_tokens": "5"}, False),
        ({"num_output_tokens": ...}, False),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("keeps_all", [True, False])
def test_whatever_a_request_is_like_no_hook_raises(world, given, stored, keeps_all):
    request = Odd(**given)
    name = request.request_id
    store = SimpleNamespace(lookup=len)
    scheduler = StoreScheduler(store, world.keys, BLOCK, mtp=True, keeps_all=keeps_all)
    for _ in range(2):  # before and after a preemption
        assert 0 <= scheduler.matched_tokens(request, 0) < 100
        scheduler.allocated(request, 0)
        output = Output([(name, [1, 2], 0)], [], {name: 100})
        (step,) = scheduler.metadata(output).steps
        assert bool(step.refused) != stored
        world.worker.begin_step(StoreMetadata([step]))
        world.worker.end_step()
        assert bool(world.worker.pipeline.lost) != stored
        output = Output([], [(name, [], 100)], {name: 1})
        (step,) = scheduler.metadata(output).steps
        assert (bool(step.refused), step.begins) == (not stored, False)
    scheduler.finished(name)
    scheduler.finished(name)
    assert not scheduler._tracked
    world.worker.begin_step(StoreMetadata())
    world.worker.end_step()
    world.worker.release({name})
    assert world.worker.num_pins == 0


@pytest.mark.parametrize("hashed", [b"", b"x" * 65, None])
@pytest.mark.parametrize("computed", [0, 64])
def test_a_hash_that_makes_no_key_costs_its_request_only(world, hashed, computed):
    hashes = {0: (hashed, hashed), 64: (hashed,)}[computed]
    bad = StoreStep("bad", "bad", True, (0, 1), hashes, computed, computed, 0, 128, 128, False)
    good = StoreStep("good", "good", True, (2, 3), HASHES[:2], 0, 0, 0, 128, 128, False)
    world.worker.begin_step(StoreMetadata([bad, good]))
    world.worker.end_step()
    assert set(world.worker.pipeline.lost) == {"bad"}
    assert {world.keys.key(one) for one in HASHES[:2]} <= world.store.readable


def test_a_store_that_raises_anything_is_one_without_the_objects(world, monkeypatch):
    assert world.step("r", 0, 100) == {}
    for name in ("open_read", "open_write", "finish_write"):
        monkeypatch.setattr(world.store, name, lambda *_: 1 / 0)
    world.step("r", 100, 150)
    world.step("s", 0, 100)
    assert "not in the store" in world.step("s", 100, 150)["s"]
