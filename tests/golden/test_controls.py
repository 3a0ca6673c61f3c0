"""Broken on purpose: what a comparison with no offload must notice."""

from __future__ import annotations

from itertools import count

import pytest

from tests.golden.engine import Job, worst_difference
from tests.golden.lab import OFFLOAD
from tests.golden.workloads import prompt
from vllm_kvoffload import ops

pytestmark = pytest.mark.slow

JOBS = (Job(prompt(400, 30), max_tokens=12), Job(prompt(30, 30), max_tokens=4, arrival=1))


@pytest.fixture
def offloading(lab):
    """An engine, and what JOBS give on it when all is well."""
    under_test = lab.engine(offload=OFFLOAD)
    return under_test, under_test.run(JOBS)


@pytest.mark.parametrize("used", [True, False], ids=["a row that is fetched", "a row that no request has"])
@pytest.mark.parametrize("layer", range(4))
def test_one_corrupted_host_row(offloading, monkeypatch, layer, used):
    under_test, right = offloading
    serve, target = ops.dsa_serve, under_test.manager.host_rows.layers[layer]
    corrupted = []

    def corrupt_and_serve(host, hot, tables, rows, ids, slots, counts):
        # The first decode step after the prefill fetches its whole choice.
        request = int(counts.argmax())
        if host is target and not corrupted and counts[request] > 40:
            token = int(ids[request, 20])
            block = int(tables[request, token // 64]) if used else under_test.num_blocks - 1
            corrupted.append(host[block, token % 64].fill_(0))
        return serve(host, hot, tables, rows, ids, slots, counts)

    monkeypatch.setattr(ops, "dsa_serve", corrupt_and_serve)
    wrong = under_test.run(JOBS)
    assert len(corrupted) == 1
    assert worst_difference(wrong[1:], right[1:]) == 0.0
    if used:
        assert worst_difference(wrong[:1], right[:1]) > 1e-3
    else:
        assert worst_difference(wrong[:1], right[:1]) == 0.0


@pytest.mark.parametrize(
    ("op", "call"),
    [("write_rows", 8), ("host_write", 2), ("host_write", 5), ("host_read", 2), ("dsa_serve", 8)],
)
def test_a_copy_that_does_not_happen(offloading, monkeypatch, op, call):
    under_test, right = offloading
    copy, calls = getattr(ops, op), count()

    def sometimes(*args):
        return 0 if next(calls) == call else copy(*args)

    monkeypatch.setattr(ops, op, sometimes)
    wrong = under_test.run(JOBS)
    assert next(calls) > call
    assert worst_difference(wrong, right) > 1e-3


@pytest.mark.parametrize("what", ["next step", "prefill load", "buffer reuse"])
def test_a_wait_that_does_not_happen(offloading, monkeypatch, what):
    under_test, right = offloading
    manager = under_test.manager
    slow = manager.host_rows._stream if what == "next step" else manager.prefill._stream
    if what == "next step":
        monkeypatch.setattr(manager.host_rows, "join", lambda: None)
    elif what == "prefill load":
        # Its events are the caller's own, which are always reached.
        monkeypatch.setattr(slow, "record", manager.prefill._compute.record)
    else:  # every job in the buffer that the first one still uses
        monkeypatch.setattr(manager.prefill, "_buffers", manager.prefill._buffers[:1] * 2)
    monkeypatch.setattr(slow._lane, "_delays", SlowStart())
    wrong = under_test.run(JOBS)
    monkeypatch.undo()
    slow.synchronize(60)
    assert worst_difference(wrong, right) > 1e-3


class SlowStart:
    """Delays a stream once, by more than a step takes."""

    def __init__(self) -> None:
        self._calls = count()

    def delay_s(self, *_):
        return 2.0 if next(self._calls) == 0 else 0.0
