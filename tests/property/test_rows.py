"""RowTable against a model: no shared rows, stale generations are refused, all rows return."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_kvoffload.sparse.rows import (
    NoFreeRowError,
    RowLeakError,
    RowLease,
    RowTable,
    UnknownRequestError,
)

REQUESTS = st.integers(0, 11).map("req-{}".format)


class RowsMachine(RuleBasedStateMachine):
    @initialize(num_rows=st.integers(1, 8))
    def start(self, num_rows: int) -> None:
        self.table = RowTable(num_rows)
        self.live: dict[str, RowLease] = {}
        self.ended: set[RowLease] = set()

    @rule(req_id=REQUESTS)
    def acquire(self, req_id: str) -> None:
        if req_id not in self.live and len(self.live) == self.table.num_rows:
            with pytest.raises(NoFreeRowError, match=f"'{req_id}'.*all {self.table.num_rows} rows"):
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
        rows = {self.table.acquire(f"fill-{i}").row for i in range(self.table.num_rows)}
        assert rows == set(range(self.table.num_rows))
        for i in range(self.table.num_rows):
            self.ended.add(self.table.release(f"fill-{i}"))

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        rows = [lease.row for lease in self.live.values()]
        assert len(set(rows)) == len(rows)
        assert self.table.num_free == self.table.num_rows - len(rows)
        assert set(self.table.live) == set(self.live)
        for req_id, lease in self.live.items():
            assert self.table.lookup(req_id) == lease
            assert self.table.check(*lease)
            assert not self.table.check(lease.row, lease.generation + 1)
        assert not any(self.table.check(*lease) for lease in self.ended)
        if self.live:
            with pytest.raises(RowLeakError, match="still held"):
                self.table.check_empty()
        else:
            self.table.check_empty()


TestRows = RowsMachine.TestCase
TestRows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_free_row_has_no_current_generation() -> None:
    table = RowTable(2)
    assert not table.check(0, 0)
    lease = table.acquire("a")
    table.release("a")
    assert not table.check(lease.row, lease.generation)
    assert not table.check(lease.row, lease.generation + 1)


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_the_table_are_refused(row: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= row < 2"):
        RowTable(2).check(row, 0)


def test_table_needs_a_row() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        RowTable(0)


def test_errors_name_a_bounded_number_of_holders() -> None:
    table = RowTable(20)
    for i in range(20):
        table.acquire(f"r{i}")
    with pytest.raises(RowLeakError, match=r"20 of 20 rows.*'r7' and 12 more"):
        table.check_empty()
