"""An engine that is closed leaves nothing behind: threads, files, shared memory."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest

from tests.golden.engine import engine
from tests.golden.workloads import WORKLOADS

pytestmark = pytest.mark.slow


def _held() -> dict[str, object]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "segments": sorted(path.name for path in Path("/dev/shm").glob("kvoffload-*")),
        "mappings": sum("/dev/shm/" in line and "/sem." not in line for line in maps.splitlines()),
    }


def test_nothing_stays(lab):
    lab.close()
    directory = lab.checkpoint("glm-tiny")
    held = []
    for _ in range(3):
        with engine(directory, {"topk_buffer_size": 64}) as under_test:
            under_test.run(WORKLOADS["abort"].jobs)
            during = _held()
        held.append(_held())
    assert {"d2h", "h2d"} <= {name.split("-")[-1] for name in during["threads"]}, during
    assert during["mappings"] > 0
    assert held[0]["mappings"] == 0
    assert held[0] == held[1] == held[2]
