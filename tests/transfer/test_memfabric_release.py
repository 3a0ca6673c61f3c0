"""The names and signatures that this package uses of MemFabric, in the real package of release 1.3.

It imports on stand-ins for CANN (`hostsim`), which is enough to look at it. Its kernels need an NPU; their
source is a part of the package.
"""

from __future__ import annotations

import json
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
import memfabric_hybrid
from vllm_kvoffload.platforms.ascend.host_memory import load_offload

offload, engine = load_offload(), memfabric_hybrid.TransferEngine
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


@pytest.fixture(scope="module")
def package() -> dict:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict = json.loads(ran.stdout.splitlines()[-1])
    return found


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
    used = {"device_id", "reserve_size", "alloc_size", "world_size", "rank_id", "scene", "store_url"}
    assert used <= set(package["fields"])
    assert package["shared"] == "SHARED"
    assert parameters(package["offload"]["initialize"]) == ["config"]
    assert parameters(package["offload"]["uninitialize"]) == []
    assert len(parameters(package["offload"]["get_dva"].split("\n")[0])) == 1
    assert package["python"]["empty"] == ["sizes", "dtype", "pin_memory"]
    assert package["python"]["sparse_copy"] == ["srcPtrs", "dstPtrs", "lenPtrs", "sizePtr", "deviceId"]


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
