"""Exact prefetch of followers, alone: what it fetches, what it drops, what it leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from vllm_kvoffload import ops
from vllm_kvoffload.geometry import Component, KVGeometry
from vllm_kvoffload.runtime import CPURuntime, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.sparse.delivery import DecodeParts, InPlaceDelivery
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.hot_pool import GroupPool, HotPool
from vllm_kvoffload.sparse.partitions import PartitionTable
from vllm_kvoffload.sparse.prefetch import STREAM, FollowerPrefetch
from vllm_kvoffload.sparse.stats import OffloadStats
from vllm_kvoffload.sparse.step_state import StepState

ROW_BYTES, TOPK, BLOCK = 8, 4, 4
ROW = (Component("kv", ROW_BYTES),)
GEOMETRY = KVGeometry("model", ("full", "shared", "shared"), "test", TOPK, ROW, ROW, 0, 0)  # type: ignore[arg-type]
DEADLINE_S = 10.0


class Bench:
    """Two decoding requests with all of their choices missing, and a prefetch stream that can be held."""

    def __init__(self, runtime: CPURuntime, deadline_s: float = DEADLINE_S) -> None:
        self.partitions = PartitionTable(2)
        self.hot = HotPool(GEOMETRY, num_partitions=2, num_slots=16, ways=16, policy="rrip")
        host = [torch.full((4, BLOCK, ROW_BYTES), 10 * layer + 1, dtype=torch.uint8) for layer in range(3)]
        host_rows = HostRows(host, runtime, writer=True, barrier=None, deadline_s=deadline_s)
        self.prefetch = FollowerPrefetch(host_rows, self.hot, self.partitions, runtime, deadline_s)
        self.stats = OffloadStats()
        self.parts = DecodeParts(host_rows, self.hot, self.partitions, runtime, self.stats, deadline_s)
        self.leases = tuple(self.partitions.acquire(name) for name in ("a", "b"))
        self._stream, self._go_on = runtime.stream(STREAM), threading.Event()
        self.pool: GroupPool = self.hot.groups[0]
        self.plan, self._workspace = ops.PlanOut(2, 2, TOPK, 1), ops.Workspace()

    def hold(self) -> None:
        self._stream.submit(self._go_on.wait, 20)

    def go_on(self) -> None:
        self._go_on.set()

    def start(self) -> StepState:
        step = self.step()
        topk = torch.arange(TOPK, dtype=torch.int32).repeat(2, 1)
        ops.dsa_plan(
            topk,
            step.decode_start_loc,
            step.decode_seq_lens,
            step.decode_partitions,
            self.pool.residency,
            self.plan,
            self._workspace,
        )
        assert self.plan.miss_counts.tolist() == [TOPK, TOPK]
        self.prefetch.start((1, 2), self.plan, step)
        return step

    def fetched(self, layer: int, partition: int) -> int:
        """Slots of a partition that hold something."""
        return int((self.hot.layers[layer][partition] != 0).any(1).sum())

    def step(self) -> StepState:
        partitions = torch.tensor([lease.partition for lease in self.leases], dtype=torch.int32)
        return StepState(
            decode=np.arange(2),
            prefill=(),
            decode_prefix_in_step=False,
            fresh=(),
            decode_ids=("a", "b"),
            decode_tokens=torch.arange(2),
            token_partitions=partitions,
            decode_start_loc=torch.arange(3, dtype=torch.int32),
            decode_seq_lens=torch.tensor([7, 7], dtype=torch.int32),
            decode_partitions=partitions,
            decode_block_table=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
            decode_slots=torch.tensor([6, 14]),
            leases=self.leases,
        )


@pytest.fixture
def runtime() -> Iterator[CPURuntime]:
    with CPURuntime() as runtime:
        yield runtime


def test_followers_get_what_the_owner_planned(runtime: CPURuntime) -> None:
    bench = Bench(runtime)
    bench.start()
    for layer in (1, 2):
        assert bench.prefetch.take(layer) == 2 * TOPK * ROW_BYTES
        assert [bench.fetched(layer, row) for row in (0, 1)] == [TOPK, TOPK]
        assert bench.hot.layers[layer].max() == 10 * layer + 1
        assert bench.prefetch.take(layer) is None  # taken
    assert bench.fetched(0, 0) == 0  # the owner fetches for itself


def test_no_thread_is_woken_when_nothing_is_missing(
    runtime: CPURuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, started = Bench(runtime), []
    real = FollowerPrefetch.start

    def start(self: FollowerPrefetch, followers: Any, *args: Any) -> None:
        started.append(tuple(followers))
        real(self, followers, *args)

    monkeypatch.setattr(FollowerPrefetch, "start", start)
    delivery = InPlaceDelivery(bench.parts, TOPK, 1)
    new_rows = torch.full((2, ROW_BYTES), 99, dtype=torch.uint8)
    for ids, wakes in (([0, 1, 2, 3], 1), ([3, 2, 1, 0], 0), ([0, 1, 2, 4], 1)):
        started.clear()
        step, fetched = bench.step(), bench.stats.fetched_bytes
        topk = torch.tensor([ids] * 2, dtype=torch.int32)
        for layer in range(3):
            part = delivery.deliver(layer, topk, new_rows, step)
            chosen = part.rows[part.indices.flatten()]
            assert (chosen == 10 * layer + 1).all()
        assert started == [(1, 2)] * wakes
        assert (bench.stats.fetched_bytes > fetched) == bool(wakes)


def test_a_partition_with_a_new_owner_is_left_alone(runtime: CPURuntime) -> None:
    bench = Bench(runtime)
    bench.hold()
    bench.start()
    gone = bench.partitions.release("a")
    assert bench.partitions.acquire("c").partition == gone.partition
    bench.go_on()
    assert bench.prefetch.take(1) == TOPK * ROW_BYTES
    assert [bench.fetched(1, lease.partition) for lease in bench.leases] == [0, TOPK]


def test_a_follower_waits_for_its_own_rows_only(runtime: CPURuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, real, started = Bench(runtime), ops.dsa_serve, threading.Event()

    def serve(host: torch.Tensor, hot: torch.Tensor, *args: Any) -> int:
        if hot is bench.hot.layers[2]:
            assert started.wait(20)
        return real(host, hot, *args)

    monkeypatch.setattr(ops, "dsa_serve", serve)
    bench.start()
    assert bench.prefetch.take(1) == 2 * TOPK * ROW_BYTES
    started.set()
    assert bench.prefetch.take(2) == 2 * TOPK * ROW_BYTES


def test_a_failed_fetch_fails_its_layer_and_nothing_later(
    runtime: CPURuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, real = Bench(runtime), ops.dsa_serve

    def serve(*_: Any) -> int:
        raise OSError("bad page")

    monkeypatch.setattr(ops, "dsa_serve", serve)
    bench.start()
    with pytest.raises(TaskFailedError, match="bad page"):
        bench.prefetch.take(1)
    bench.prefetch.join()
    monkeypatch.setattr(ops, "dsa_serve", real)
    for row in (0, 1):
        bench.hot.reset_partition(row)
    bench.start()
    assert bench.prefetch.take(1) == 2 * TOPK * ROW_BYTES


def test_a_stuck_fetch_ends_at_the_deadline_and_is_still_joined(runtime: CPURuntime) -> None:
    bench = Bench(runtime, deadline_s=0.05)
    bench.hold()
    bench.start()
    for wait in (lambda: bench.prefetch.take(1), bench.prefetch.join):
        with pytest.raises(WaitTimeoutError, match="misses of layer 1"):
            wait()
    bench.go_on()
    runtime.synchronize()
    bench.prefetch.join()
    assert bench.prefetch.take(1) is None
