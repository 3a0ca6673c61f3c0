"""Environment of every test process; it must stand before vLLM's first import."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("untimed", deadline=None)  # a busy machine is not a wrong result
settings.load_profile("untimed")

TESTS = Path(__file__).parent
LONG = ("faults", "connectors", "serve", "acpu", "ascendc", "ascend", "hostsim")
"""Folders whose files take minutes."""

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # engines run in the test's own process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM warns of a dozen harmless things at every start
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM's default leaves one of two cores idle
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads starve the side streams
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """pytest's caplog; also sees vLLM's loggers, which stop at vLLM's own handler once vLLM is imported."""
    logger = logging.getLogger("vllm")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.INFO)
    yield caplog
    logger.propagate = before[0]
    logger.setLevel(before[1])


def _share(path: Path) -> tuple[int, str]:
    """What is run by one process, in the order in which shares are handed out: the long ones first."""
    folder = path.relative_to(TESTS).parts[0]
    if folder in ("golden", "faults"):
        return int(folder != "golden"), folder  # the same engines and their references serve many files
    return (1 if folder in LONG else 2), str(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shares are handed out in the order of their first tests."""
    items.sort(key=lambda item: _share(item.path))


class ShareScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Divides the tests among processes. pytest-xdist's own groups do nothing with pytest 9.2."""

    def _split_scope(self, nodeid: str) -> str:
        return _share(TESTS.parent / nodeid.partition("::")[0])[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ShareScheduling:
    """Instead of the scheduler that `--dist` names."""
    return ShareScheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests made, in whatever process: among their reports' properties."""
    tables: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {}
    for report in chain.from_iterable(terminalreporter.stats.values()):
        for name, row in getattr(report, "user_properties", ()):
            if name.startswith("table: "):
                tables.setdefault(name[len("table: ") :], {})[tuple(row["line"])] = row
    for title, rows in tables.items():
        terminalreporter.section(title)
        head = next(iter(rows.values()))["head"]
        for line in _aligned([head, ["-" * len(name) for name in head], *rows]):
            terminalreporter.write_line(line)
        cells, good = (sum(row[key] for row in rows.values()) for key in ("cells", "good"))
        terminalreporter.write_line(f"{cells} cells, {good} as they must be")


def _aligned(lines: Iterable[Iterable[str]]) -> Iterable[str]:
    texts = [list(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for line in texts:
        yield "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()
