"""csrc/ascendc/torch without CANN: it compiles against torch and stubs of CANN and torch_npu, and loads.

Its operators fit their schemas. What they do on an NPU is not shown by this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ascendc.twin_kernels import ROOT

HERE = Path(__file__).parent
SOURCES = [
    ROOT / "csrc" / "ascendc" / "torch" / "ops.cpp",
    ROOT / "csrc" / "ascendc" / "torch" / "tensors.cpp",
    HERE / "host_stubs" / "stubs.cpp",
]
# Loading after torch_ops has declared dsa_plan: torch compares each C++ function with its operator's schema.
SCRIPT = """
import sys
import torch
import vllm_kvoffload.ops.torch_ops
torch.ops.load_library(sys.argv[1])
ops = torch.ops.kvoffload
assert torch._C._dispatch_has_kernel_for_dispatch_key("kvoffload::dsa_plan", "PrivateUse1")
for name in ("dsa_serve_rows", "dsa_serve_compact_rows", "dsa_install_rows", "gather_selection_rows",
             "host_write_rows"):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kvoffload::{name}", "PrivateUse1"), name
    arguments = getattr(ops, name).default._schema.arguments
    print(name, *(a.name for a in arguments if a.alias_info and a.alias_info.is_write))
memory = torch.zeros(3 * 4096, dtype=torch.uint8)
assert ops.host_register(memory.data_ptr(), 4096) == memory.data_ptr()
ops.host_unregister(memory.data_ptr())
try:
    ops.host_register(memory.data_ptr(), 100)
except RuntimeError as error:
    print(str(error).splitlines()[0])
ids = torch.zeros((2, 8), dtype=torch.int32, device="meta")
rows = [torch.zeros((3, 64, 128), dtype=torch.uint8, device="meta")]
print(tuple(ops.dsa_install_rows(rows, rows, ids[0], ids[0], ids, ids, ids[0]).shape))
"""


@pytest.mark.slow
def test_the_binding_compiles_and_loads(tmp_path: Path) -> None:
    root = Path(torch.__file__).parent
    library = tmp_path / "libkvoffload_ascend_stub.so"
    includes = [root / "include", root / "include" / "torch" / "csrc" / "api" / "include"]
    command = ["c++", "-std=c++20", "-O0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command += [
        "-Wno-unused-parameter",
        f"-I{HERE / 'host_stubs'}",
        *(f"-isystem{path}" for path in includes),
    ]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    command += [
        *map(str, SOURCES),
        "-o",
        str(library),
        f"-L{root / 'lib'}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(library)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.splitlines() == [
        "dsa_serve_rows hot",
        "dsa_serve_compact_rows selection",
        "dsa_install_rows hot",
        "gather_selection_rows selection status lengths",
        "host_write_rows",
        "host_register: mapping 100 bytes failed with error 107000",
        "(40, 8)",
    ]
