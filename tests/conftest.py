"""Environment of every test process; it must stand before vLLM's first import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

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


def _share(path: Path) -> tuple[int, str]:
    """What is run by one process, in the order in which shares are handed out: the long ones first."""
    folder = path.relative_to(TESTS).parts[0]
    if folder == "golden":
        return 0, folder  # one engine and its references serve many files
    return (1 if folder in LONG else 2), str(path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Divides the tests among pytest-xdist's processes (`-n 2 --dist loadgroup`)."""
    items.sort(key=lambda item: _share(item.path))
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_share(item.path)[1]))
