"""`python -m tests.soak --minutes 60`: a joint 2P1D deployment under load, kills, freezes and strangers.

Needs about 16 GB and 2 cores. The report, the journal, samples and the logs of all processes are left in
`build/soak`. Exit status 0 when everything held, 1 when not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests import ROOT
from tests.soak.soak_chaos import KINDS
from tests.soak.soak_report import page
from tests.soak.soak_run import Plan, Soak


def parse(arguments: list[str]) -> Plan:
    """The plan that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load and chaos, without the start")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, load and chaos")
    parser.add_argument("--users", type=int, default=4, help="clients that ask at a time")
    parser.add_argument("--prefills", type=int, default=2, help="prefill servers")
    parser.add_argument(
        "--only", nargs="*", choices=sorted(KINDS), help="kinds of chaos; none for a steady load"
    )
    parser.add_argument("--without", nargs="+", default=[], choices=sorted(KINDS), help="kinds left out")
    parser.add_argument("--no-sampled", action="store_true", help="no requests with a seed and a temperature")
    parser.add_argument("--calm", type=float, default=300.0, help="seconds from one calm phase to the next")
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes of a process that don't count")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "soak")
    found = parser.parse_args(arguments)
    kinds = KINDS if found.only is None else found.only
    return Plan(
        minutes=found.minutes,
        seed=found.seed,
        users=found.users,
        prefills=found.prefills,
        kinds=tuple(kind for kind in kinds if kind not in found.without),
        sampled=not found.no_sampled,
        calm_s=found.calm,
        warm_up_s=60 * found.warm_up,
        folder=found.folder,
    )


def main(arguments: list[str]) -> int:
    plan = parse(arguments)
    outcome = Soak(plan).run()
    text = page(plan, outcome)
    (plan.folder / "report.txt").write_text(text, encoding="utf-8")
    print(text)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
