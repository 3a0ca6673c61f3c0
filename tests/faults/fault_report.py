"""The matrix: outcomes of the requests of each fault and phase, as a table."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("before rendezvous", "waiting", "pulling", "finishing", "streaming")
"""Of the request that a fault hits: decode has not asked for a prefill; it has, and prefill has not begun;
prefill computes and layers are read; all is read and decode asks whether it counts; tokens flow."""


@dataclass
class Cell:
    """outcomes: of the requests in that phase. The worst is shown."""

    outcomes: list[str] = field(default_factory=list)


@dataclass
class Row:
    """One fault. seconds: until everything was back; others: requests that the fault must not touch."""

    cells: dict[str, Cell] = field(default_factory=dict)
    others: int = 0
    seconds: float | None = None
    passed: bool = False

    @property
    def texts(self) -> list[str]:
        """As the table has it, under HEAD."""
        return [
            *(_shown(self.cells.get(phase)) for phase in PHASES),
            f"{self.others} right" if self.passed else str(self.others),
            "-" if self.seconds is None else f"{self.seconds:.1f} s",
            "ok" if self.passed else "FAILED",
        ]


HEAD = ["fault", *PHASES, "others", "back after", ""]


class Report:
    """Rows by fault; filled by the tests, printed at the end of the run."""

    def __init__(self) -> None:
        self._new: dict[str, Row] = {}

    def row(self, fault: str) -> Row:
        return self._new.setdefault(fault, Row())

    def take_rows(self) -> list[dict[str, object]]:
        """Those that were not taken yet, as tests/conftest.py wants lines of tables."""
        rows, self._new = self._new, {}
        return [
            {
                "head": HEAD,
                "line": [fault, *row.texts],
                "cells": len(row.cells),
                "good": len(row.cells) if row.passed else 0,
            }
            for fault, row in rows.items()
        ]


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return ""
    counts = {outcome: cell.outcomes.count(outcome) for outcome in cell.outcomes}
    return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())


REPORT = Report()
