"""Fixtures of the golden tests."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def _lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    from tests.golden.lab import Lab

    lab = Lab(tmp_path_factory.mktemp("golden"))
    yield lab
    lab.close()
    gc.unfreeze()  # see EngineUnderTest.close: at exit everything is to be looked at


@pytest.fixture
def lab(_lab):
    """Runs workloads with and without offload."""
    return _lab
