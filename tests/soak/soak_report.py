"""The page that concludes a soak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.soak.soak_load import Load
from tests.soak.soak_run import Outcome, Plan

MIB = 1 << 20
SHOWN = 12
SMALL_BYTES = 16 * MIB
"""A process below has no line of its own, unless it grows."""


def page(plan: Plan, outcome: Outcome) -> str:
    """Text of about a page: the actions, the observations, and whether all checks passed."""
    return "\n".join(_lines(plan, outcome)) + "\n"


def _lines(plan: Plan, outcome: Outcome) -> Iterator[str]:
    verdict = "FAILED" if outcome.problems else "all held"
    yield f"Soak of {outcome.minutes:.0f} minutes, seed {plan.seed}: {verdict}"
    yield (
        f"{plan.prefills} joint prefill servers, 1 decode server with offload, the proxy; {plan.users} users;"
        f" load in {outcome.loaded_share:.0%} of the time; {outcome.calm_phases} calm phases"
    )
    chaos = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.chaos.items()))
    yield f"chaos: {chaos or 'none'}"
    yield ""
    yield from _requests(outcome)
    yield ""
    yield from _memory(outcome)
    if outcome.problems:
        yield ""
        yield f"{len(outcome.problems)} problems:"
        for problem in outcome.problems[:SHOWN]:
            yield f"- {problem.splitlines()[0]}"
        if len(outcome.problems) > SHOWN:
            yield f"- and {len(outcome.problems) - SHOWN} more: see journal.txt"


def _requests(outcome: Outcome) -> Iterator[str]:
    verdicts = ("right", "gone", "error", "WRONG", "HANGS")
    yield "requests    " + "".join(f"{name:>8}" for name in verdicts)
    for kind in Load.KINDS:
        found = Counter(record.verdict for record in outcome.records if record.kind == kind)
        yield f"{kind:12}" + "".join(f"{found[name]:8}" for name in verdicts)
    statuses = Counter(record.status for record in outcome.records)
    said = ", ".join(f"{count} x {status or 'none'}" for status, count in sorted(statuses.items()))
    yield f"answers by status: {said}"
    yield (
        f"wrong tokens: {len(outcome.wrong)}; outlived every deadline: {outcome.outlived}; "
        f"failed without a kill, a freeze or a mismatch to explain it: {len(outcome.unexcused)}"
    )
    errors = Counter(record.error[:90] for record in outcome.records if record.verdict == "error")
    for error, count in errors.most_common(8):
        yield f"{count:6} x {error}"


def _memory(outcome: Outcome) -> Iterator[str]:
    yield "own memory after the warm-up, by process (anonymous and shared; slope of a robust line)"
    judged = [growth for growth in outcome.growths if growth.judged]
    for growth in judged:
        if growth.median >= SMALL_BYTES or not growth.flat:
            name = f"{growth.life:14} {growth.process:16} {growth.minutes:5.1f} min"
            size = f"{growth.median / MIB:8.1f} MiB {growth.rate / MIB:+8.2f} MiB/h {growth.share:+7.2%}"
            late = "" if growth.late_share is None else f", second half {growth.late_share:+.2%}"
            yield f"{name} {size}{late}  {'flat' if growth.flat else 'GROWS'}"
    yield f"{len(outcome.growths) - len(judged)} more processes did not live long enough to be judged"
