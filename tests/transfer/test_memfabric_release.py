"""The names and signatures that this package uses of MemFabric and MemCache, in the real packages.

Those of the installed release import on stand-ins for CANN (`hostsim`), those of the other releases come from
the package index and import without any, which is enough to look at them. The kernels need an NPU; their
source is a part of MemFabric's package.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests import ROOT, hostsim
from vllm_kvoffload.platforms.ascend.rows import MAX_PAIR_BYTES

pytestmark = pytest.mark.skipif(bool(hostsim.missing()), reason=hostsim.missing() or "-")

CHILD = """
import inspect, json, sys

from tests import hostsim

    hostsim.activate()
import memcache_hybrid, memfabric_hybrid
from vllm_kvoffload.platforms.ascend.host_memory import offload_module

offload, engine = offload_module(), memfabric_hybrid.TransferEngine
store = memcache_hybrid.DistributedObjectStore
methods = ("initialize", "get_rpc_port", "register_memory", "batch_transfer_sync_read")
functions = ("set_log_level", "set_conf_store_tls")
print(json.dumps({
    "engine": {name: getattr(engine, name).__doc__ for name in methods},
    "functions": {name: getattr(memfabric_hybrid, name).__doc__ for name in functions},
    "offload": {name: getattr(offload, name).__doc__ for name in ("initialize", "uninitialize", "get_dva")},
    "python": {name: list(inspect.signature(getattr(offload, name)).parameters)
               for name in ("empty", "sparse_copy")},
    "fields": [name for name in dir(offload.OffloadConfig) if not name.startswith("_")],
    "shared": offload.Scene.SHARED.name,
}))
"""
INSTALLED = pytest.mark.skipif(bool(hostsim.missing()), reason=hostsim.missing() or "-")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("installed", marks=INSTALLED),
        *(pytest.param(release, marks=pytest.mark.slow) for release in ("1.2.0", "1.2.1", "1.3.0")),
    ],
)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    release, environ = request.param, dict(os.environ)
    if release != "installed":
        folder = tmp_path_factory.mktemp(f"release-{release}")
        names = ("memfabric-hybrid", "memcache-hybrid")
        sites = [package_index.unpack(f"{name}=={release}", folder / name) for name in names]
        paths = [*map(str, sites), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    ran = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict = json.loads(ran.stdout.splitlines()[-1])
    if release != "installed":
        assert Path(found["folder"]).is_relative_to(folder)
    return {**found, "release": release}


def parameters(signature: str) -> list[str]:
    """Names, without self: of what pybind11 writes into a docstring."""
    inside = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    inside = re.sub(r"\[[^]]*\]|<[^>]*>", "", inside)
    return [
        name
        for name in (part.split(":")[0].strip() for part in inside.split(","))
        if name not in ("self", "")
    ]


def test_the_transfer_engine(package: dict) -> None:
    engine = {name: parameters(text) for name, text in package["engine"].items()}
    assert engine["initialize"][:4] == ["store_url", "session_id", "role", "device_id"]
    assert "store_server_role" in engine["initialize"]
    assert engine["get_rpc_port"] == []
    assert engine["register_memory"] == ["buffer_addr", "capacity"]
    assert engine["batch_transfer_sync_read"][:4] == ["dest_session", "buffers", "peer_buffers", "lengths"]
    assert all(text.rstrip().endswith("-> int") for text in package["engine"].values())
    assert len(parameters(package["functions"]["set_conf_store_tls"])) == 2
    assert len(parameters(package["functions"]["set_log_level"])) == 1


def test_the_offload_module(package: dict) -> None:
    used = {"device_id", "reserve_size", "alloc_size", "world_size", "rank_id", "scene"}
    assert used <= set(package["fields"])
    later = package["release"] != "1.2.0"  # which has neither, and does without
    assert ("store_url" in package["fields"]) == later
    assert (package["offload"]["get_dva"] is not None) == later
    assert package["shared"] == "SHARED"
    assert parameters(package["offload"]["initialize"]) == ["config"]
    assert parameters(package["offload"]["uninitialize"]) == []
    if later:
        assert len(parameters(package["offload"]["get_dva"].split("\n")[0])) == 1
    assert package["python"]["empty"] == ["sizes", "dtype", "pin_memory"]
    assert package["python"]["sparse_copy"] == ["srcPtrs", "dstPtrs", "lenPtrs", "sizePtr", "deviceId"]


def test_the_protocols_of_reads(package: dict) -> None:
    assert "data_op_type" in parameters(package["engine"]["initialize"])
    assert (
        "data_op_type: _pymf_transfer.TransDataOpType = <TransDataOpType.SDMA: 1>"
        in (package["engine"]["initialize"])
    )
    assert {"SDMA", "DEVICE_RDMA", "DEVICE_URMA"} <= set(package["kinds"])


def test_the_kernels_are_not_in_the_package(package: dict) -> None:
    """A wheel's own file is empty or not there; which the doctor and the start-up tell from a built one."""
    path = Path(package["folder"]) / "lib" / LIBRARY
    assert not path.exists() or path.stat().st_size == 0
    assert path.exists() == (package["release"] != "1.2.0")
    assert find_kernels(Path(package["folder"]), (1, 3, 0), "") is None
    command = (Path(package["folder"]) / "cli.py").is_file()
    assert command == (package["release"] != "1.2.0")  # `mfcli kernel install`


def test_the_store(package: dict) -> None:
    store = {name: parameters(text.split("\n")[0]) for name, text in package["store"].items()}
    assert store["init"] == ["device_id", "init_bm"]
    assert store["register_buffer"] == ["buffer_ptr", "size"]
    assert store["batch_is_exist"] == store["batch_remove_lease"] == ["keys"]
    assert store["batch_add_lease"] == ["keys", "leaseTtlMs"]
    assert store["batch_get_key_info"][:1] == ["keys"]
    assert store["batch_alloc"] == ["keys", "sizes", "media", "leaseTtlMs"]
    assert store["batch_copy"][:4] == ["gva_ptrs", "buffer_ptrs", "sizes", "direct"]
    assert store["batch_write_finish"] == ["keys", "res"]
    assert len(store["remove_batch"]) == 1
    assert store["close"] == []
    assert package["directions"] == {"L2G": 0, "G2L": 1, "G2H": 2, "H2G": 3}


@INSTALLED
def test_what_is_known_of_the_copy_kernel() -> None:
    """Entries of the two halves share a buffer of the core, and the copy is queued on the current stream."""
    folder = hostsim.memfabric_libraries().parent / "_kernel" / "acc_offload"
    kernel = (folder / "operators" / "acc_offload_sparse_copy.h").read_text()
    (size,) = re.findall(r"UB_DOUBLE_BUFFER_SIZE = (\d+) \* 1024", kernel)
    assert int(size) << 10 == MAX_PAIR_BYTES
    assert "half_ = size_ >> 1" in kernel
    assert (
        "getCurrentNPUStream(devIdx)" in (folder / "launch" / "acc_offload_operators_launch.cpp").read_text()
    )
