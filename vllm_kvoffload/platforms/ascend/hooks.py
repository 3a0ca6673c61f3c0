"""The places where vllm-ascend has to be told of our classes, because it has no option for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from vllm_kvoffload.platforms.ascend.symbols import check_symbols, check_version

NPU_PLATFORM = "vllm_ascend.platform.NPUPlatform"


def is_npu_platform(platform: object) -> bool:
    """Whether vLLM runs on vllm-ascend's platform, ours included."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == NPU_PLATFORM for kind in type(platform).__mro__)


def adopt_platform(platform: Any) -> None:
    """Makes vLLM's platform object one of our subclass, for all who hold it. Safe to call more than once.

    vLLM allows one out-of-tree platform plugin, and vllm-ascend's is it.

    Raises StartupRefusedError: vllm-ascend is too old or too new, or not what we were written against.
    """
    if f"{type(platform).__module__}.{type(platform).__qualname__}" != NPU_PLATFORM:
        return
    check_version()
    check_symbols("platform")
    from vllm_kvoffload.platforms.ascend.platform import KVOffloadNPUPlatform

    platform.__class__ = KVOffloadNPUPlatform


@contextmanager
def runner_class(runner: type) -> Iterator[None]:
    """`NPUWorker.init_device` makes a runner of this class while the context is open."""
    module: Any = import_module("vllm_ascend.worker.worker")
    original = module.NPUModelRunner
    module.NPUModelRunner = runner
    try:
        yield
    finally:
        module.NPUModelRunner = original
