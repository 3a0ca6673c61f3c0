"""PartitionTable against a model: none shared, stale generations refused, all returned."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_kvoffload.sparse.partitions import (
    NoFreePartitionError,
    PartitionLeakError,
    PartitionLease,
    PartitionTable,
    UnknownRequestError,
)

REQUESTS = st.integers(0, 11).map("req-{}".format)


class PartitionsMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 8))
    def start(self, total: int) -> None:
        self.table = PartitionTable(total)
        self.live: dict[str, PartitionLease] = {}
        self.ended: set[PartitionLease] = set()

    @rule(req_id=REQUESTS)
    def acquire(self, req_id: str) -> None:
        if req_id not in self.live and len(self.live) == self.table.total:
            with pytest.raises(NoFreePartitionError, match=f"'{req_id}'.*all {self.table.total} are held"):
                self.table.acquire(req_id)
            return
        lease = self.table.acquire(req_id)
        assert self.live.setdefault(req_id, lease) == lease  # sticky
        assert lease not in self.ended

    @rule(req_id=REQUESTS)
    def release(self, req_id: str) -> None:
        if req_id not in self.live:
            with pytest.raises(UnknownRequestError, match=f"'{req_id}'"):
                self.table.release(req_id)
            return
        lease = self.live.pop(req_id)
        assert self.table.release(req_id) == lease
        self.ended.add(lease)

    @rule()
    def release_all(self) -> None:
        for req_id in list(self.live):
            self.release(req_id)
        self.table.check_empty()
        numbers = {self.table.acquire(f"fill-{i}").partition for i in range(self.table.total)}
        assert numbers == set(range(self.table.total))
        for i in range(self.table.total):
            self.ended.add(self.table.release(f"fill-{i}"))

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        numbers = [lease.partition for lease in self.live.values()]
        assert len(set(numbers)) == len(numbers)
        assert self.table.num_free == self.table.total - len(numbers)
        assert set(self.table.live) == set(self.live)
        for req_id, lease in self.live.items():
            assert self.table.lookup(req_id) == lease
            assert self.table.check(*lease)
            assert not self.table.check(lease.partition, lease.generation + 1)
        assert not any(self.table.check(*lease) for lease in self.ended)
        if self.live:
            with pytest.raises(PartitionLeakError, match="still held"):
                self.table.check_empty()
        else:
            self.table.check_empty()


TestPartitions = PartitionsMachine.TestCase
TestPartitions.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_free_partition_has_no_current_generation() -> None:
    table = PartitionTable(2)
    assert not table.check(0, 0)
    lease = table.acquire("a")
    table.release("a")
    assert not table.check(lease.partition, lease.generation)
    assert not table.check(lease.partition, lease.generation + 1)


@pytest.mark.parametrize("partition", [-1, 2])
def test_partitions_outside_the_table_are_refused(partition: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= partition < 2"):
        PartitionTable(2).check(partition, 0)


def test_table_needs_a_partition() -> None:
    with pytest.raises(ValueError, match="total=0"):
        PartitionTable(0)


def test_errors_name_a_bounded_number_of_holders() -> None:
    table = PartitionTable(20)
    for i in range(20):
        table.acquire(f"r{i}")
    with pytest.raises(PartitionLeakError, match=r"20 of 20 partitions.*'r7' and 12 more"):
        table.check_empty()
