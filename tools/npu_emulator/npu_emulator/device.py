"""Registers kernels for the device: aten's by the CPU's, torch_npu's and vllm-ascend's by ``ops``."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from npu_emulator.hooks import LIBRARIES

# Memory, views and what needs the device itself stay torch_npu's own: names with or without an overload.
KEPT = frozenset(
    [
        *("_to_copy", "copy_", "resize_", "resize_as_", "record_stream", "_local_scalar_dense", "is_pinned"),
        *("as_strided", "view", "view.dtype", "_reshape_alias", "view_as_real", "view_as_complex"),
        *("detach", "alias", "lift", "lift_fresh", "new_empty", "new_empty_strided"),
        *("narrow", "select.int", "slice.Tensor", "unfold", "diagonal", "split", "split_with_sizes", "chunk"),
        *("expand", "permute", "transpose", "t", "squeeze", "unsqueeze", "unbind"),
    ]
)
KEPT_PREFIXES = ("empty", "set_", "_fft", "_pin", "_resize")
# Of torch_npu's own operators: facts about tensors and memory, which work as they are.
KEPT_NPU = frozenset(
    [
        *("get_npu_format", "get_storage_size", "empty_with_format", "unsafe_empty_with_format"),
        *("empty_with_swapped_memory", "copy_memory_", "npu_change_data_ptr"),
    ]
)


def has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def all_names(namespace: str) -> list[str]:
    prefix = f"{namespace}::"
    return [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]


_kept: list[Any] = []


def library_of(namespace: str, kind: str) -> Any:
    """A torch.library.Library, kept for ever: its registrations end with it."""
    _kept.append(torch.library.Library(namespace, kind))  # type: ignore[no-untyped-call]
    return _kept[-1]


def aten_names() -> list[str]:
    """Operators of aten that the CPU can run for the device, without the namespace."""
    chosen = []
    for full in all_names("aten"):
        name = full.removeprefix("aten::")
        base = name.split(".")[0]
        if base in KEPT or name in KEPT or base.startswith(KEPT_PREFIXES):
            continue
        composite = has(full, "CompositeExplicitAutograd") or has(full, "CompositeImplicitAutograd")
        if has(full, "CPU") or (has(full, "PrivateUse1") and composite):
            chosen.append(name)
    return chosen


def defined_by_us() -> None:
    """Declares vllm-ascend's compiled operators, whose library needs CANN, by the schemas of its source."""
    from importlib.util import find_spec

    spec = find_spec("vllm_ascend")
    folder = Path(next(iter(spec.submodule_search_locations or []))) if spec else None
    if folder is None or not (folder / "operator_schemas.txt").exists():
        return
    library = library_of("_C_ascend", "FRAGMENT")
    declared: set[str] = set()
    for schema in (folder / "operator_schemas.txt").read_text().splitlines():
        name = schema.split("(")[0].strip()
        if name not in declared:
            declared.add(name)
            library.define(schema)


def register(how: str, namespace: str, names: Iterable[str]) -> None:
    """how: "run_on_cpu", "copy" or "unknown". names: of declared operators."""
    libraries = ctypes.CDLL(str(LIBRARIES / "operators.so"))
    listed = sorted(names)
    array = (ctypes.c_char_p * len(listed))(*(name.encode() for name in listed))
    getattr(libraries, f"npu_emulator_{how}")(namespace.encode(), array, len(listed))


def on_cpu(namespace: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Declares operators, by schema, that run on a device's stream and get CPU tensors over its memory."""
    library = library_of(namespace, "FRAGMENT")
    for schema, function in functions.items():
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    register("run_on_cpu", namespace, [schema.split("(")[0] for schema in functions])


def install(_: types.ModuleType) -> None:
    """Called once, after torch_npu has been imported."""
    register("run_on_cpu", "aten", aten_names())
    register("copy", "aten", ["copy_"])
    defined_by_us()
    from npu_emulator import ops

    for namespace, functions in ops.implementations().items():
        library = library_of(namespace, "IMPL")
        known = {full.removeprefix(f"{namespace}::") for full in all_names(namespace)}
        ours = {name: function for name, function in functions.items() if name in known}
        for name, function in ours.items():
            library.impl(name, function, "CPU")
            if namespace == "_C_ascend" and not has(f"{namespace}::{name}", "Meta"):
                library.impl(name, function, "Meta")  # shapes for torch.compile, as its C++ library has them
        register("run_on_cpu", namespace, ours)
        others = {n for n in known - set(ours) if n.split(".")[0] not in KEPT_NPU}
        decided = {n for n in others if namespace == "_C_ascend" or has(f"{namespace}::{n}", "PrivateUse1")}
        register("unknown", namespace, decided)
