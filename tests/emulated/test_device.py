"""The emulated NPU itself: memory, streams, events, operators, graphs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.emulated.emulator_env import ROUNDS, child, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DELAYS = {"NPU_EMULATOR_DELAY_US": "3000"}


@pytest.fixture(scope="module")
def python() -> Path:
    return environment()


def answer(python: Path, name: str, **settings: str) -> Any:
    done = child(python, "streams_child.py", name, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_missing_wait_shows(python: Path, seed: str) -> None:
    assert answer(python, "without_wait", NPU_EMULATOR_SEED=seed, **DELAYS) < ROUNDS
    assert answer(python, "back_without_wait", NPU_EMULATOR_SEED=seed, **DELAYS) < ROUNDS


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_wait_makes_it_right(python: Path, seed: str) -> None:
    assert answer(python, "with_wait", NPU_EMULATOR_SEED=seed, **DELAYS) == ROUNDS


def test_events(python: Path) -> None:
    at_once, later, milliseconds = answer(python, "events", **DELAYS)
    assert (at_once, later) == (False, True)
    assert milliseconds > 0


def test_memory_is_accounted_for(python: Path) -> None:
    before, tensor, more, after = answer(python, "memory", NPU_EMULATOR_MEMORY_MB="256")
    assert before <= 256 << 20
    assert before - tensor >= 64 << 20
    assert tensor - more >= 8 << 20
    assert after == tensor  # the caching allocator keeps what the tensor had


def test_out_of_memory(python: Path) -> None:
    done = child(python, "streams_child.py", "memory", NPU_EMULATOR_MEMORY_MB="32")
    assert done.returncode
    assert "out of memory" in done.stderr


@pytest.mark.parametrize("settings", [{}, DELAYS, {"NPU_EMULATOR_GUARD": "1"}])
def test_operators(python: Path, settings: dict[str, str]) -> None:
    assert answer(python, "operators", **settings) == []


def test_an_unknown_operator_is_named(python: Path) -> None:
    message = answer(python, "unknown_operator")
    assert "npu::npu_dynamic_quant" in message
    assert "tools/npu_emulator" in message


def test_a_graph_is_captured_and_replayed(python: Path) -> None:
    assert answer(python, "graph", **DELAYS) == [0, 12, 20, 28]


def test_the_guard_finds_host_code(python: Path) -> None:
    assert "1.0" in child(python, "streams_child.py", "guard").stdout
    done = child(python, "streams_child.py", "guard", NPU_EMULATOR_GUARD="1")
    assert done.returncode < 0
    assert "host code touches device memory" in done.stderr


def test_leaks_are_reported(python: Path) -> None:
    done = child(python, "streams_child.py", "leak", NPU_EMULATOR_LEAKS="1")
    assert done.returncode == 0
    found = re.search(r"(\d+) allocations of device memory are alive at exit, (\d+) bytes", done.stderr)
    assert found
    assert int(found.group(2)) >= 3 << 20
    assert "alive at exit" not in child(python, "streams_child.py", "leak").stderr


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(python: Path, ranks: int, tmp_path: Path) -> None:
    """Every rank checks all of them against what they must give."""
    command = [
        str(python),
        str(Path(__file__).parent / "collectives_child.py"),
        str(tmp_path / "store"),
        str(ranks),
    ]
    running = [
        subprocess.Popen(
            [*command, str(rank)], stderr=subprocess.PIPE, text=True, env={**os.environ, **DELAYS}
        )
        for rank in range(ranks)
    ]
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
