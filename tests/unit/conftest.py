"""Fixtures of the unit tests."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.stats_writer import Writer


@pytest.fixture
def start() -> Iterator[Callable[..., Writer]]:
    writers: list[Writer] = []

    def start_one(*args: Any, **kwargs: Any) -> Writer:
        writers.append(Writer(*args, **kwargs))
        return writers[-1]

    yield start_one
    for writer in writers:
        writer.kill()
        for pipe in (writer.process.stdin, writer.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        if writer.child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(writer.child, signal.SIGKILL)


@pytest.fixture
def instance() -> str:
    return f"test-{os.getpid()}-{time.time_ns()}"
