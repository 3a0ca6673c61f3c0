"""Points vllm-ascend to our classes where it has no option for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vllm_kvoffload.platforms.ascend.symbols import symbols_problem, version_problem
from vllm_kvoffload.platforms.foreign import core_problem, watch

NPU_PLATFORM = "vllm_ascend.platform.NPUPlatform"


def is_npu_platform(platform: object) -> bool:
    """Whether vLLM runs on vllm-ascend's platform or our subclass."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == NPU_PLATFORM for kind in type(platform).__mro__)


def adopt_platform(platform: Any) -> None:
    """Changes the class of vLLM's platform object to our subclass, for all its users. Idempotent.

    vLLM allows only one out-of-tree platform plugin, and that is vllm-ascend's. With a vllm-ascend whose
    version or symbols are not the supported ones the object keeps its class, and only configurations that
    ask for this package are refused.
    """
    if f"{type(platform).__module__}.{type(platform).__qualname__}" != NPU_PLATFORM:
        return
    problem = version_problem() or symbols_problem("platform") or core_problem()
    if problem is not None:
        watch(platform, problem, store_is_shared=True)
        return
    from vllm_kvoffload.platforms.ascend.platform import KVOffloadNPUPlatform

    platform.__class__ = KVOffloadNPUPlatform


@contextmanager
def runner_class(runner: type) -> Iterator[None]:
    """While the context is open, `NPUWorker.init_device` creates a runner of this class."""
    module: Any = import_module("vllm_ascend.worker.worker")
    original = module.NPUModelRunner
    module.NPUModelRunner = runner
    try:
        yield
    finally:
        module.NPUModelRunner = original
