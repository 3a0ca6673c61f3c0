"""The accelerator of this engine process, as the connectors use it."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_kvoffload.runtime import CPURuntime, Runtime
from vllm_kvoffload.runtime.npu import NPURuntime


def current_npu() -> Any:
    """Returns torch.npu on Ascend, None on CPU."""
    if current_platform.is_cpu():
        return None
    return torch.npu  # type: ignore[attr-defined]  # torch_npu adds it


def make_runtime() -> Runtime:
    """Creates side streams on this process's device, owned by the connector."""
    npu = current_npu()
    return CPURuntime() if npu is None else NPURuntime(npu, npu.current_device())
