"""Runs benchmarks by name and prints their rows as a table, or as one JSON document."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks.registry import BENCHMARKS, Row, load


def print_row(row: Row) -> None:
    print(
        f"{row.name:<36} {row.value:>11.4g} {row.unit:<8} {row.baseline:>11.4g} {row.ratio:>7.2f}x",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all when none given"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list of rows instead of a table")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; choose from {', '.join(BENCHMARKS)}")
    if not arguments.json:
        print(f"{'name':<36} {'value':>11} {'unit':<8} {'baseline':>11} {'ratio':>8}")
    rows: list[Row] = []
    for name in arguments.names or BENCHMARKS:
        for row in load(name).run():
            rows.append(row)
            if not arguments.json:
                print_row(row)
    if arguments.json:
        json.dump([row.as_json() for row in rows], sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
