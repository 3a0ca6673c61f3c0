"""The device that an engine's process computes on, as far as connectors care."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_kvoffload.runtime import CpuRuntime, Runtime
from vllm_kvoffload.runtime.npu import NpuRuntime


def current_npu() -> Any:
    """torch.npu in an engine on Ascend, None in one on CPU."""
    if current_platform.is_cpu():
        return None
    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def make_runtime() -> Runtime:
    """Side streams for this process's device, of the connector's own."""
    npu = current_npu()
    return CpuRuntime() if npu is None else NpuRuntime(npu, npu.current_device())
