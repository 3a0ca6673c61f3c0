"""The worker's half over a store of names: what is found again under which key."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.connectors.ascend_store.worker import StoreWorker
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

    quiet = True

    def begin(self, step):
        self.lost, self.wrong, self.given_up = {}, set(), []
        self.requests = step.requests

    def fail(self, number, reason, wrong=True):
        self.lost[self.requests[number]] = reason
        if wrong:
            self.wrong.add(self.requests[number])

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


def test_what_another_rank_lost_is_not_handed_to_decode_by_this_one(world):
    """All ranks compute with what one of them could not load."""
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
