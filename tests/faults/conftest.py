"""The cluster used by all faults, and the results matrix."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.faults.fault_report import REPORT

FULL = "faults_full"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Faults that need engines to start again are left to `make test-faults`."""
    if FULL in config.option.markexpr:
        return
    full = [item for item in items if item.get_closest_marker(FULL) is not None]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if item not in full]


@pytest.fixture(autouse=True)
def _matrix(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives the test's rows of the matrix to its report."""
    yield
    request.node.user_properties += [("table: fault matrix", row) for row in REPORT.take_rows()]


@pytest.fixture(autouse=True)
def _right_engines(request: pytest.FixtureRequest) -> None:
    """An earlier test may have left others, or none."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").heal()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Running and warm."""
    for package in ("vllm", "nixl_cu12"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    from tests.faults.fault_cluster import Cluster
    from tests.faults.fault_scene import warm_up
    from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

    folder = tmp_path_factory.mktemp("faults")
    model = build_checkpoint(folder / "model", MODELS["glm-tiny"])
    with Cluster(model, folder) as running:
        warm_up(running)
        yield running
