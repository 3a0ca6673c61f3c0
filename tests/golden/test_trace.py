"""A trace recorded by an engine says what its indexers chose: planned again, it gives its counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.golden.engine import Job
from tests.golden.test_deliveries import MODEL, options
from tests.golden.workloads import prompt
from vllm_kvoffload import ops
from vllm_kvoffload.trace import TraceError, TraceReader, TraceStep

pytestmark = pytest.mark.slow

SLOTS = 256
# Prompts of one chunk: between two chunks a request may draft, and loses those rows with the next chunk.
JOBS = tuple(Job(prompt(length, 60), max_tokens=40, arrival=3 * n) for n, length in enumerate((250, 90, 200)))


class Replay:
    """Plans one group's steps. Requests get rows in order of appearance, one each: none is reused."""

    def __init__(self, topk: int, requests: int) -> None:
        self._residency = ops.Residency.allocate(requests, SLOTS)
        self._out, self._workspace = ops.PlanOut(4 * requests, requests, topk, 4), ops.Workspace()
        self._rows: dict[str, int] = {}
        self.hits = self.misses = 0

    def step(self, step: TraceStep) -> None:
        rows = [self._rows.setdefault(request.name, len(self._rows)) for request in step.requests]
        topk = [
            np.pad(ids, (0, self._out.slots.shape[1] - len(ids)), constant_values=-1)
            for request in step.requests
            for ids in request.ids
        ]
        starts = np.cumsum([0, *(request.query_len for request in step.requests)])
        ops.dsa_plan(
            torch.from_numpy(np.array(topk, dtype=np.int32)),
            torch.from_numpy(starts.astype(np.int32)),
            torch.tensor([request.seq_len for request in step.requests], dtype=torch.int32),
            torch.tensor(rows, dtype=torch.int32),
            self._residency,
            self._out,
            self._workspace,
        )
        self.hits += int(self._out.stats[0])
        self.misses += int(self._out.stats[1])


def test_planning_a_recorded_trace_gives_the_engines_counters(lab, tmp_path):
    path = tmp_path / "run.kvtrace"
    engine = lab.engine(MODEL, {"topk_buffer_size": SLOTS, "trace_path": str(path)}, **options(3))
    engine.run(JOBS)
    stats = engine.trace.stats
    lab.close()
    trace = TraceReader(path)
    replays = [Replay(trace.header.index_topk, len(JOBS)) for _ in range(trace.header.num_groups)]
    for step in trace:
        replays[step.group].step(step)
    assert trace.closed
    assert trace.dropped == 0
    hits, misses = sum(r.hits for r in replays), sum(r.misses for r in replays)
    assert (hits, misses) == (stats["hits"], stats["misses"])
    assert misses > 0


def test_a_trace_is_not_overwritten(lab, tmp_path):
    path = tmp_path / "run.kvtrace"
    path.write_text("something else")
    with pytest.raises((TraceError, ValueError), match="exists"):
        lab.engine(offload={"topk_buffer_size": SLOTS, "trace_path": str(path)})
    assert path.read_text() == "something else"
