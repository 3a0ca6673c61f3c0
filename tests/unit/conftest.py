"""Fixtures of the unit tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that sees vLLM's loggers too, which end at vLLM's own handler."""
    logger = logging.getLogger("vllm")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.INFO)
    yield caplog
    logger.propagate = before[0]
    logger.setLevel(before[1])
