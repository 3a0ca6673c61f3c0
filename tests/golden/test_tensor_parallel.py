"""Two TP ranks in processes of their own: one host pool, written by rank 0, read by both."""

from __future__ import annotations

import glob
import multiprocessing
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.golden.engine import Job, engine, worst_difference
from tests.golden.store_lab import stats, transfer_config
from tests.golden.test_mtp_baseline import assert_same_tokens, mtp
from tests.golden.workloads import WORKLOADS, prompt
from vllm_kvoffload import ops

pytestmark = pytest.mark.slow

STEP = {"max_num_batched_tokens": 960}  # "same_step" in one step, the longest prompt of "mixed" in two
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", **STEP}
NAMES = ("mixed", "same_step")


def pool_inode(worker):  # noqa: ARG001
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    inodes = {line.split()[4] for line in maps if "/dev/shm/#" in line or "/dev/shm/kvoffload-" in line}
    assert len(inodes) == 1, maps
    return inodes.pop()


def written_bytes(worker):
    return worker.model_runner.offload.manager.stats.written_bytes


def slow_down_a_large_write(worker):  # noqa: ARG001
    write = ops.host_write

    def slow(host, rows, slots):
        if len(rows) > 700:
            ops.host_write = write
            time.sleep(3)  # by far more than a step
        write(host, rows, slots)

    ops.host_write = slow


def pins_and_hits(worker):  # noqa: ARG001
    return stats()["pins"], stats()["hit_tokens"]


def communicator_name(worker):  # noqa: ARG001
    return os.environ["VLLM_DIST_IDENT"]


def forget_what_the_layer_wrote(worker, layer):
    manager = worker.model_runner.offload.manager
    begin_draft, store = manager.begin_draft, manager.host_rows

    def careless(*args):
        written, store._written[layer] = store._written[layer], None
        begin_draft(*args)
        store._written[layer] = written

    manager.begin_draft = careless


def forget_the_barrier(worker):
    worker.model_runner.offload.manager.host_rows._barrier = None


@pytest.fixture
def two_ranks(lab):
    """Starts an engine of two ranks; afterwards removes what vLLM's communicator leaves in shared memory."""
    lab.close()

    @contextmanager
    def start(offload=None, model="glm-tiny", **options):
        with engine(lab.checkpoint(model), offload, **{**TWO_RANKS, **options}) as under_test:
            (name,) = set(under_test.on_workers(communicator_name))
            yield under_test
        assert not multiprocessing.active_children()
        for path in Path("/dev/shm").glob(f"vllm_dist_{glob.escape(name)}-*"):
            path.unlink()

    return start


def test_two_ranks(lab, two_ranks):
    with two_ranks() as plain:
        expected = {name: plain.run(WORKLOADS[name].jobs) for name in NAMES}

    with two_ranks({"topk_buffer_size": 64}) as offloading:

        def run_with_a_slow_write(name: str) -> float:
            offloading.on_workers(slow_down_a_large_write)
            return worst_difference(offloading.run(WORKLOADS[name].jobs), expected[name])

        # "same_step" reads in the same step what is written, "mixed" in the next
        assert {name: run_with_a_slow_write(name) for name in NAMES} == dict.fromkeys(NAMES, 0.0)
        first, second = offloading.on_workers(pool_inode)
        assert first == second
        first, second = offloading.on_workers(written_bytes)
        assert first > 0 == second
        # control: rank 1 does not wait for what rank 0 writes
        offloading.on_workers(forget_the_barrier)
        assert run_with_a_slow_write("same_step") > 1e-3

    with two_ranks(kv_transfer_config=transfer_config(1, [])) as storing:  # rank 0 writes, both read
        for name in ("same_step", "same_step"):  # the second time with a warm store
            assert worst_difference(storing.run(WORKLOADS[name].jobs), expected[name]) < 1e-4
        assert [pins for pins, _ in storing.on_workers(pins_and_hits)] == [0, 0]
        assert all(hits > 0 for _, hits in storing.on_workers(pins_and_hits))

    for name in NAMES:
        one_rank = lab.reference(name, **STEP).outcomes
        assert worst_difference(expected[name], one_rank) < 1e-4


def test_two_ranks_with_drafts(lab, two_ranks):
    model, drafting = "glm-tiny-mtp", mtp(3)
    works = {"same_step": WORKLOADS["same_step"].jobs}
    works["one chunk"] = (Job(prompt(800, 13), max_tokens=8), Job(prompt(100, 13), max_tokens=8))

    def run(engine, name: str, slow: bool = False):
        if slow:
            engine.on_workers(slow_down_a_large_write)
        outcomes = engine.run(works[name])
        return outcomes, engine.trace.drafts

    with two_ranks(None, model, **drafting) as plain:
        expected = {name: run(plain, name) for name in works}

    with two_ranks({"topk_buffer_size": 256}, model, **drafting) as offloading:
        for name, (right, right_drafts) in expected.items():
            outcomes, drafts = run(offloading, name, slow=True)
            assert worst_difference(outcomes, right) == 0.0
            assert drafts == right_drafts
        # control: a draft pass doesn't wait until the rows of the pass before are written
        offloading.on_workers(forget_what_the_layer_wrote, 4)
        _, drafts = run(offloading, "one chunk", slow=True)
        assert drafts != expected["one chunk"][1]

    one_rank = lab.reference("same_step", model, **STEP, **drafting).outcomes
    assert_same_tokens(expected["same_step"][0], one_rank)
