"""The tilings: pure C++ of the host, no kernel is run. Coverage, lines that no two cores share, refusals."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.ascendc.twin_kernels import LINE, Kernels, RefusedError
from vllm_kvoffload.policies import POLICIES

KERNELS = ROOT / "csrc" / "ascendc"
PLAN = {
    "requests": 4,
    "tokens": 8,
    "width": 2048,
    "max_query": 1,
    "rows": 8,
    "sets": 512,
    "ways": 16,
    "policy": 2,
    "capacity": 8192,
    "compact": 1,
}
SERVE = {
    "requests": 64,
    "tokens": 64,
    "hot_rows": 65,
    "slots": 8192,
    "capacity": 2048,
    "blocks": 10000,
    "block_size": 128,
    "table_width": 1024,
    "bytes0": 1024,
    "bytes1": 128,
}
COMPACT = {key: SERVE[key] for key in ("requests", "tokens")} | {"width": 2048}
COMPACT |= {
    key: SERVE[key]
    for key in ("hot_rows", "slots", "blocks", "block_size", "table_width", "bytes0", "bytes1")
}
INSTALL = COMPACT | {"capacity": 2048}
INSTALL = {
    key: INSTALL[key]
    for key in ("requests", "tokens", "width", "hot_rows", "slots", "capacity", "bytes0", "bytes1")
}
GATHER = {
    "requests": 64,
    "tokens": 64,
    "width": 2048,
    "queries": 4,
    "rows_kept": 65,
    "pitch": 2064,
    "blocks": 10000,
    "block_size": 128,
    "table_width": 1024,
    "bytes0": 1024,
    "bytes1": 128,
}
HOST_WRITE = {"tokens": 64, "blocks": 10000, "block_size": 128, "bytes0": 1024, "bytes1": 128}
SHAPES = {
    "dsa_plan": PLAN,
    "dsa_serve": SERVE,
    "dsa_serve_compact": COMPACT,
    "dsa_install": INSTALL,
    "gather_selection": GATHER,
    "host_write": HOST_WRITE,
}


def tile(kernels: Kernels, op: str, cores: int, **changes: int) -> dict[str, int]:
    assert changes.keys() <= SHAPES[op].keys()
    return kernels.tile(op, tuple((SHAPES[op] | changes).values()), cores)


@pytest.mark.parametrize("cores", [1, 5, 20, 40, 48, 64])
@pytest.mark.parametrize("requests", [1, 2, 3, 8, 64])
@pytest.mark.parametrize(("sets", "ways"), [(64, 16), (64, 32), (512, 16), (1024, 16), (1024, 32)])
def test_parts_of_a_plan(kernels: Kernels, cores: int, requests: int, sets: int, ways: int) -> None:
    width = min(2048, sets * ways // 4)
    data = tile(kernels, "dsa_plan", cores, requests=requests, sets=sets, ways=ways, width=width)
    parts, part_sets = data["parts"], data["part_sets"]
    assert parts * part_sets == sets, "each set in exactly one part"
    assert part_sets >= LINE, "hands, one byte each, fill lines"
    assert part_sets * ways % LINE == 0, "so do ages"
    if parts > 1 and requests * parts > cores:  # more than one part for each core: only to fit the buffer
        assert sets == 1024
    if requests * parts * 2 <= cores:
        assert part_sets == LINE, "more cores are there"


def test_the_workspace_of_a_plan(kernels: Kernels) -> None:
    """Regions one after the other, each of a request or part filling lines."""
    data = tile(kernels, "dsa_plan", 40, max_query=4)
    requests, parts = PLAN["requests"], data["parts"]
    assert parts == 8
    assert data["values_offset"] == 0
    assert data["records_offset"] == requests * parts * 4 * PLAN["width"] * 4
    assert data["totals_offset"] - data["records_offset"] == requests * parts * LINE
    assert data["states_offset"] - data["totals_offset"] == requests * LINE
    assert data["empties_offset"] - data["states_offset"] == requests * 8192
    assert data["workspace_bytes"] - data["empties_offset"] == requests * 8192 // 8
    assert all(data[name] % LINE == 0 for name in data if name.endswith("_offset"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sets": 32, "width": 128},
            "sets: the kernel needs at least 64 per partition, got 32; use a topk_buffer_size of",
        ),
        ({"sets": 96}, "sets: must be a power of two, got 96"),
        ({"ways": 8}, "ways: must be 16 or 32, got 8"),
        ({"max_query": 5}, "query tokens per request: must be 1 to 4, got 5"),
        ({"width": 100}, "top-k width: must be a multiple of 16, got 100"),
        ({"policy": -1}, "policy: must be 0 to"),
        ({"policy": len(POLICIES)}, f"policy: must be 0 to {len(POLICIES) - 1}, got {len(POLICIES)}"),
        ({"sets": 64}, "top-k: 1 query tokens of 2048 ids do not fit a partition of 1024 slots"),
        ({"capacity": 1024}, "miss capacity: 1024 is less than the 2048 ids of a request"),
        ({"requests": 40000}, "unified buffer: the plan needs"),
        ({"requests": -1}, "requests: must be 0 to"),
        ({"rows": 1 << 20}, "pool: must have less than 2^31 slots in all"),
        ({"sets": 4096}, "slots per partition: must be at most 32768"),
    ],
)
def test_plans_refused(kernels: Kernels, changes: dict[str, int], message: str) -> None:
    with pytest.raises(RefusedError) as refused:
        tile(kernels, "dsa_plan", 40, **changes)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("op", SHAPES)
@pytest.mark.parametrize("cores", [0, 65])
def test_cores_refused(kernels: Kernels, op: str, cores: int) -> None:
    with pytest.raises(RefusedError, match=f"cores: must be 1 to 64, got {cores}"):
        tile(kernels, op, cores)


@pytest.mark.parametrize(
    "op", ["dsa_serve", "dsa_serve_compact", "dsa_install", "gather_selection", "host_write"]
)
@pytest.mark.parametrize(("bytes0", "bytes1"), [(1024, 128), (1152, 0), (656, 0), (16, 16), (8192, 8192)])
def test_staging_buffers(kernels: Kernels, op: str, bytes0: int, bytes1: int) -> None:
    data = tile(kernels, op, 40, bytes0=bytes0, bytes1=bytes1)
    for size, pitch in ((bytes0, data["pitch0"]), (bytes1, data["pitch1"])):
        assert pitch % 32 == 0
        assert 0 <= pitch - size < 32
    assert 1 <= data["batch_rows"] <= 32
    assert data["buffer_bytes"] == data["batch_rows"] * (data["pitch0"] + data["pitch1"])
    assert 2 * data["buffer_bytes"] < 192 * 1024
    if (bytes0, bytes1) == (1024, 128):
        assert data["batch_rows"] >= 16, "deep enough to hide the host's latency"


def test_rows_that_share_lines_stay_with_one_core(kernels: Kernels) -> None:
    for op in ("dsa_serve", "dsa_install"):
        assert tile(kernels, op, 40)["by_request"] == 0
        assert tile(kernels, op, 40, bytes0=656, bytes1=0)["by_request"] == 1
    for op in ("dsa_serve_compact", "host_write"):
        assert tile(kernels, op, 40)["group"] == 1
        assert tile(kernels, op, 40, bytes0=656, bytes1=0)["group"] == 4
        assert tile(kernels, op, 40, bytes0=1024, bytes1=32)["group"] == 2


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        ("dsa_serve", {"bytes0": 100}, r"row_bytes\[0\]: must be a multiple of 16, got 100"),
        ("dsa_serve", {"bytes0": 0}, r"row_bytes\[0\]: must be 16 to 8192, got 0"),
        (
            "dsa_serve",
            {"bytes0": 656, "slots": 127},
            "pool: partitions of 127 slots of 656 bytes must begin on a line",
        ),
        ("dsa_serve", {"table_width": 60000}, "unified buffer: .* narrower block table"),
        ("dsa_serve", {"requests": 20000}, "unified buffer: .* use fewer requests per call"),
        ("dsa_serve", {"blocks": 1 << 25}, r"host: must have less than 2\^31 tokens"),
        ("dsa_serve_compact", {"slots": 0}, "slots per partition: must be 1 to"),
        ("dsa_install", {"capacity": 0}, "miss capacity: must be 1 to"),
        (
            "gather_selection",
            {"pitch": 2049},
            r"status pitch \(allocate .* must be a multiple of 16, got 2049",
        ),
        ("gather_selection", {"pitch": 2048}, "status pitch: must be 2049 to"),
        ("host_write", {"blocks": 1 << 25}, r"host: must have less than 2\^31 tokens"),
        (
            "host_write",
            {"blocks": 3, "block_size": 1, "bytes0": 16},
            "host: 3 rows of 16 bytes must end with a line",
        ),
        (
            "gather_selection",
            {"width": 17, "pitch": 32, "bytes0": 16},
            "selection: 17 rows of 16 bytes must end with",
        ),
    ],
)
def test_rows_refused(kernels: Kernels, op: str, changes: dict[str, int], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        tile(kernels, op, 40, **changes)


@pytest.mark.parametrize("op", sorted(path.parent.parent.name for path in KERNELS.glob("*/op_kernel/*.cpp")))
def test_kernels_with_syncall_start_on_all_cores_at_once(op: str) -> None:
    """Batch scheduling, declared exactly where cores wait for each other: elsewhere it would only delay."""
    folder = KERNELS / op / "op_kernel"
    waits = any("SyncAll(" in path.read_text() for path in folder.iterdir())
    (entry,) = re.findall(r'extern "C" (.*)__global__', (folder / f"{op}.cpp").read_text())
    assert entry.strip() == ("__schedmode__(1)" if waits else "")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@pytest.mark.parametrize(
    ("version", "refused"), [("9.0.0", True), ("8.5.0.alpha001", True), ("9.1.0", False)]
)
def test_the_build_refuses_cann_without_batch_scheduling(tmp_path: Path, version: str, refused: bool) -> None:
    (tmp_path / "compiler").mkdir()
    (tmp_path / "compiler" / "version.info").write_text(f"Version={version}\nversion_dir=x\n")
    ran = subprocess.run(
        ["cmake", "-S", str(KERNELS), "-B", str(tmp_path / "build")],
        env={**os.environ, "ASCEND_HOME_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode, "there is no CANN here"
    assert ("9.1 or later" in ran.stderr) is refused
