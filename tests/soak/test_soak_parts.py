"""The soak's checks, without processes: they detect faults, and only faults."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from tests.faults import fault_strangers as strangers
from tests.soak.soak_chaos import Excuse
from tests.soak.soak_load import LONGEST_ANSWER, Load, Oracle, Record, prompts
from tests.soak.soak_report import page
from tests.soak.soak_run import Outcome, Plan
from tests.soak.soak_watch import Sample, growth, memory, more_than, slope, wait_empty
from vllm_kvoffload.connectors.sfa_remote_d2h import wire

MIB = 1 << 20


def samples(own, life="decode.2", begin=0.0):
    return [
        Sample(begin + 10.0 * n, life, "VLLM::Worker", 7, 10.0 * n, 0, int(value), 50, 90)
        for n, value in enumerate(own)
    ]


def test_a_slope_is_not_moved_by_a_few_peaks():
    points = [(float(n), 100.0 + 2 * n + (5000 if n % 9 == 4 else 0)) for n in range(60)]
    assert slope(points) == pytest.approx(2, rel=0.05)
    assert slope(points[:1]) == 0


@pytest.mark.parametrize(
    ("rate", "flat"),
    [(0, True), (0.005, True), (-1, True), (0.03, False)],
    ids=["0", "little", "less", "3 %"],
)
def test_growth_counts_after_the_warm_up(rate, flat):
    warming = [400 * MIB * (1 - 0.5 * n / 60) for n in range(60)]  # much, and not counted
    living = [200 * MIB * (1 + rate * n / 200) for n in range(200)]
    (found,) = growth(samples([*warming, *living]), 600)
    assert found.judged
    assert found.flat is flat
    assert found.minutes == pytest.approx(33, abs=1)


@pytest.mark.parametrize(("steps", "flat"), [((0.1, 0.2, 0.3, 0.45), True), ((0.1, 0.3, 0.6, 0.8), False)])
def test_growth_in_steps_must_have_ended_by_the_second_half(steps, flat):
    living = [200 * MIB * (1 + 0.03 * sum(n / 300 >= step for step in steps)) for n in range(300)]
    (found,) = growth(samples([*[100 * MIB] * 60, *living]), 600)
    assert found.share > 0.02
    assert found.flat is flat


def test_growth_of_short_lives_is_not_judged():
    found = growth(samples([n * MIB for n in range(1, 70)]) + samples([MIB] * 200, "proxy.3"), 600)
    assert [(g.life, g.judged, g.flat) for g in found] == [("decode.2", False, True), ("proxy.3", True, True)]


def test_counts():
    assert more_than({"a": 3, "b": 3}, {"a": 5, "b": 6, "c": 99}, 2) == ["b: 6 after 3"]
    assert memory(os.getpid())[1] > MIB
    left = [2, 1, 0]
    assert wait_empty(lambda: "held" if left.pop(0) else "", 5) == ""
    assert wait_empty(lambda: "held", 0) == "held"


def test_excuses():
    excuse = Excuse("decode killed", 100.0)
    assert excuse.covers(50, 101)
    assert excuse.covers(500, 501), "it lasts"
    excuse.ended = 130.0
    assert excuse.covers(129, 200)
    assert not excuse.covers(50, 99)
    assert not excuse.covers(131, 200)


def test_prompts():
    made = prompts(3)
    assert made == prompts(3) != prompts(4)
    assert max(map(len, made)) + LONGEST_ANSWER < 2048
    assert len({tuple(prompt[:192]) for prompt in made if len(prompt) > 192}) < sum(
        len(p) > 192 for p in made
    )


class Ended:
    """A client that has ended, as far as the load looks at it."""

    def __init__(self, tokens, verdict, max_tokens=4):
        self.tokens, self.max_tokens, self.complete = tokens, max_tokens, verdict == "right"
        self.status, self.error, self._verdict = 200, "", verdict

    def verdict(self, reference):
        return "WRONG" if self.complete and self.tokens != reference else self._verdict

    def abort(self):
        pass


def test_the_load_judges_tokens():
    oracle = Oracle([[1, 2]])
    oracle.answers = [list("abcdefgh")]
    load = Load(1, oracle, 0, 0, True)

    def judged(kind, tokens, verdict):
        record = load._record(kind, 0, Ended(list(tokens), verdict), 0.0)
        return record.verdict, record.wrong

    assert judged("whole", "abcd", "right") == ("right", -1)
    assert judged("whole", "abxd", "right") == ("WRONG", 2)
    assert judged("whole", "abc", "right") == ("WRONG", 3)
    assert judged("sampled", "wxyz", "right") == ("right", -1)
    assert judged("sampled", "wxy", "right")[0] == "WRONG"
    assert judged("aborted", "ab", "gone")[0] == "gone"


def test_strangers_send_what_they_should():
    true = strangers.a_hello("00")
    frames = list(strangers.hostile_frames(random.Random(0), "00ff", true))
    assert wire.encode(strangers.a_hello("00ff")) in frames
    assert len(frames) > 180
    assert len({strangers._claimed(frame) for frame in frames}) > 40
    assert len(strangers.for_decode()) > 40
    assert len(strangers.for_prefill(9)) > 50


def test_ports_come_in_the_order_of_descriptors():
    with socket.socket() as one, socket.socket() as other:
        for link in (other, one):
            link.bind(("127.0.0.1", 0))
            link.listen()
        wanted = [link.getsockname()[1] for link in (one, other)]
        assert [port for port in strangers.listening(os.getsid(0)) if port in wanted] == wanted


def record(verdict, status=200, error=""):
    return Record("stream", 0, 1.0, 2.0, status, verdict, error, 3)


def test_the_page_says_what_failed():
    plan = Plan(60, 0, 4, 2, ("reset",), True, 300, 600, Path())
    outcome = Outcome([record("right")] * 5, minutes=60, calm_phases=9, chaos={"reset": 2})
    assert not outcome.problems
    assert "all held" in page(plan, outcome)
    outcome.records += [record("WRONG"), record("error", 500, "500: oops")]
    outcome.unexcused = outcome.records[-1:]
    outcome.growths = growth(samples([200 * MIB + n * MIB for n in range(200)]), 600)
    outcome.leaks, outcome.outlived = ["held in a calm phase: rows"], 1
    text = page(plan, outcome)
    for part in (
        "FAILED",
        "1 answers with wrong tokens",
        "outlived",
        "not flat: decode.2",
        "rows",
        "500: oops",
    ):
        assert part in text
    assert len(outcome.problems) == 5
