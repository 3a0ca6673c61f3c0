"""Checks of the emulated device itself, in its environment: python streams_child.py NAME

Prints a JSON value; each name is one function below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

ROUNDS, SIZE = 20, 1 << 16


def copies(wait: bool) -> int:
    """How often a sum over rows that a side stream brings is right."""
    side, right = torch.npu.Stream(), 0
    rows = torch.zeros(SIZE, device="npu")
    for number in range(1, ROUNDS + 1):
        source = torch.full((SIZE,), float(number)).pin_memory()
        with torch.npu.stream(side):
            rows.copy_(source, non_blocking=True)
        if wait:
            torch.npu.current_stream().wait_stream(side)
        right += rows.sum().item() == number * SIZE
        torch.npu.synchronize()
    return right


def with_wait() -> int:
    return copies(True)


def without_wait() -> int:
    return copies(False)


def back_without_wait() -> int:
    """How often the host sees what a device-to-host copy brings before it waits for it."""
    target, seen = torch.zeros(SIZE).pin_memory(), 0
    for number in range(1, ROUNDS + 1):
        rows = torch.full((SIZE,), float(number), device="npu")
        target.copy_(rows, non_blocking=True)
        seen += bool(target[0] == number)
        torch.npu.synchronize()
        assert target[0] == number
    return seen


def events() -> list[Any]:
    """[complete at once, complete after a wait, milliseconds between two records]."""
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    rows = torch.zeros(SIZE, device="npu")
    start.record()
    for _ in range(20):
        rows.add_(1)
    end.record()
    at_once = end.query()
    end.synchronize()
    return [at_once, end.query(), start.elapsed_time(end)]


def memory() -> list[int]:
    """Free bytes: at first, with a tensor of 64 MiB, with 8 MiB of CANN's own more, and without those."""
    import ctypes

    from npu_emulator.hooks import LIBRARIES

    torch.npu.init()
    free = [torch.npu.mem_get_info()[0]]
    rows = torch.zeros(16 << 20, device="npu")
    free.append(torch.npu.mem_get_info()[0])
    cann, address = ctypes.CDLL(str(LIBRARIES / "libnpu_emulator.so")), ctypes.c_void_p()
    assert cann.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(8 << 20), 0) == 0
    free.append(torch.npu.mem_get_info()[0])
    assert cann.aclrtFree(address) == 0
    del rows
    return [*free, torch.npu.mem_get_info()[0]]


def operators() -> list[str]:
    """Operators of aten whose results differ from the CPU's, for views, index lists and in-place calls."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    index = torch.tensor([4, 1])
    cases: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "matmul": lambda a, _: a @ a.t(),
        "index": lambda a, i: a[i],
        "index_put": lambda a, i: a.clone().index_put_((i,), a[0]),
        "slice": lambda a, _: a[1:5:2, 3:].contiguous(),
        "cat": lambda a, _: torch.cat([a, a[:, :2]], 1),
        "in place": lambda a, _: a.clone()[2:].mul_(3).add_(1),
        "topk": lambda a, _: a.topk(3).indices,
        "cast": lambda a, _: a.to(torch.bfloat16) + 1,
        "transposed": lambda a, _: a.t().contiguous().view(-1),
        "where": lambda a, _: torch.where(a > 0, a, -a),
        "out": lambda a, _: torch.add(a, a, out=torch.empty_like(a)),
        "scalar": lambda a, _: a.sum() * 2,
    }
    return [
        name
        for name, function in cases.items()
        if not torch.equal(function(x.npu(), index.npu()).cpu(), function(x, index))
    ]


def unknown_operator() -> str:
    try:
        torch_npu.npu_dynamic_quant(torch.zeros(2, 32, device="npu", dtype=torch.float16))
    except NotImplementedError as error:
        return str(error)
    return ""


def graph() -> list[float]:
    """A captured graph over inputs that change: results of three replays, and of the capture itself."""
    rows, out = torch.zeros(4, device="npu"), torch.zeros(4, device="npu")
    captured = torch.npu.NPUGraph()
    with torch.npu.graph(captured):
        out.copy_((rows * 2).add_(1))
    results = [out.sum().item()]
    for number in (1, 2, 3):
        rows.fill_(number)
        captured.replay()
        results.append(out.sum().item())
    return results


def leak() -> int:
    """Allocates 3 MiB by CANN's function and keeps them."""
    import ctypes

    from npu_emulator.hooks import LIBRARIES

    torch.npu.init()
    address = ctypes.c_void_p()
    cann = ctypes.CDLL(str(LIBRARIES / "libnpu_emulator.so"))
    return int(cann.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(3 << 20), 0))


def guard() -> None:
    """Reads device memory on the host: ends the process when the guard is on."""
    import ctypes

    print(ctypes.c_float.from_address(torch.ones(4, device="npu").data_ptr()).value)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
