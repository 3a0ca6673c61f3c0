"""Two TP ranks in processes of their own: one host pool, written by rank 0, read by both."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
from engine import engine, worst_difference
from workloads import WORKLOADS

from vllm_kvoffload import ops

pytestmark = pytest.mark.slow

STEP = {"max_num_batched_tokens": 960}  # "late" in one step, the longest prompt of "mixed" in two
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **STEP}
NAMES = ("mixed", "late")


def pool_inode(worker):  # noqa: ARG001
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    inodes = {line.split()[4] for line in maps if "/dev/shm/#" in line or "/dev/shm/kvoffload-" in line}
    assert len(inodes) == 1, maps
    return inodes.pop()


def written_bytes(worker):
    return worker.model_runner.offload.manager.stats.written_bytes


def slow_down_large_writes(worker):  # noqa: ARG001
    write = ops.host_write

    def slow(host, rows, slots):
        if len(rows) > 300:
            time.sleep(0.5)  # more than what is left of the step
        write(host, rows, slots)

    ops.host_write = slow


def forget_the_barrier(worker):
    worker.model_runner.offload.manager.store._barrier = None


def test_two_ranks(lab):
    one_rank = {name: lab.reference(name, **STEP).outcomes for name in NAMES}
    lab.close()
    directory = lab.checkpoint("glm-tiny")
    with engine(directory, **TWO_RANKS) as plain:
        expected = {name: plain.run(WORKLOADS[name].jobs) for name in NAMES}
    for name in NAMES:
        assert worst_difference(expected[name], one_rank[name]) < 1e-4

    with engine(directory, {"topk_buffer_size": 64}, **TWO_RANKS) as offloading:

        def wrong() -> list[str]:
            results = {name: offloading.run(WORKLOADS[name].jobs) for name in NAMES}
            return [name for name in NAMES if worst_difference(results[name], expected[name]) != 0.0]

        assert wrong() == []
        first, second = offloading.on_workers(pool_inode)
        assert first == second
        first, second = offloading.on_workers(written_bytes)
        assert first > 0 == second
        offloading.on_workers(slow_down_large_writes)
        assert wrong() == []
        # control: rank 1 does not wait for what rank 0 writes, neither in this step nor in the next
        offloading.on_workers(forget_the_barrier)
        assert wrong() == list(NAMES)
    assert not multiprocessing.active_children()
