"""Operators of torch_npu and vllm-ascend, by CPU tensors.

To add one: a function with the operator's own parameters in a module here, decorated with its name
(``@operator("npu::npu_rms_norm")``). It gets CPU tensors over the device's memory and returns new
ones, or writes to its arguments where the schema says so. Arguments that it doesn't cover must raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Implementation = TypeVar("Implementation", bound=Callable[..., Any])

NAMESPACES = ("npu", "atb", "_C_ascend")
_registered: dict[str, dict[str, Callable[..., Any]]] = {name: {} for name in NAMESPACES}


def operator(*names: str) -> Callable[[Implementation], Implementation]:
    """Registers a function as the CPU implementation of operators: "namespace::name.overload"."""

    def register(function: Implementation) -> Implementation:
        for full in names:
            namespace, name = full.split("::")
            _registered[namespace][name] = function
        return function

    return register


def implementations() -> dict[str, dict[str, Callable[..., Any]]]:
    """{namespace: {name: function}} of all operators."""
    from npu_emulator.ops import attention, dense, moe, sparse  # noqa: F401  they register themselves

    return _registered
