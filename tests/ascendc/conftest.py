from __future__ import annotations

import pytest

from tests.ascendc.twin_kernels import Kernels, build


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels(build())
