"""Tensors of the simulated NPU: CPU memory that says it is a device's and behaves like it.

What can't be mixed on a device can't be mixed here, and every operation for which the host would have to wait
until the device has worked off its queue is noted. A real device tensor is told from one in host memory by
its device; here, by its type.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

NPU = torch.device("privateuseone", 0)
SYNCS = {
    "item", "tolist", "__bool__", "__int__", "__index__", "__float__", "__contains__", "cpu", "nonzero",
    "masked_select", "equal", "allclose", "unique",
}  # fmt: skip


class Syncs:
    """Where the host had to wait, by the thread that watches only."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._thread = threading.get_ident()

    def note(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self.seen.append(what)

    def take(self) -> list[str]:
        """Those since the last call."""
        seen, self.seen = self.seen, []
        return seen


syncs = Syncs()


class Capturing:
    """The recorder of device operators while a graph is captured, None otherwise."""

    operator: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None


capturing = Capturing()


class NPUTensor(torch.Tensor):
    """A tensor of the device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def on_npu(tensor: torch.Tensor) -> NPUTensor:
    """The same memory as the device's."""
    return tensor.as_subclass(NPUTensor)


def plain(value: Any) -> Any:
    """Views device tensors as host tensors, for simulated device code; other values unchanged."""
    if not isinstance(value, NPUTensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def is_pinned(tensor: Any) -> bool:
    return getattr(tensor, "_simulated_pin", False)


def target_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call of Tensor.to names."""
    for value in (*args[1:], kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, str):
            return torch.device(value)
    return None


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def wrap(value: Any) -> Any:
    return on_npu(value) if type(value) is torch.Tensor else value


def without_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cpu = torch.device("cpu")
    swap = functools.partial(tree_map, lambda v: cpu if isinstance(v, torch.device) else plain(v))
    return swap(args), swap(kwargs)


def move(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None) -> Any:
    """Tensor.to."""
    source = args[0]
    here = isinstance(source, NPUTensor)
    there = here if device is None else device.type != "cpu"
    if here != there and not (there and kwargs.get("non_blocking") and is_pinned(source)):
        syncs.note("to")
    plain_args, plain_kwargs = without_device(args, kwargs)
    moved = run(torch.Tensor.to, plain_args, plain_kwargs)
    if here != there and moved.data_ptr() == source.data_ptr():
        moved = moved.clone()
    return on_npu(moved) if there else moved


def copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensor.copy_, which may cross."""
    target, source = args[:2]
    crosses = isinstance(target, NPUTensor) != isinstance(source, NPUTensor)
    host = source if isinstance(target, NPUTensor) else target
    if crosses and not (kwargs.get("non_blocking") and is_pinned(host)):
        syncs.note("copy_")
    run(torch.Tensor.copy_, tuple(map(plain, args)), kwargs)
    return target


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any torch function with a tensor of the device among its arguments."""
    name = getattr(func, "__name__", "")
    if func == torch.Tensor.device.__get__:
        return NPU
    if func == torch.Tensor.is_cpu.__get__:
        return False
    if func is torch.Tensor.to:
        return move(args, kwargs, target_of(args, kwargs))
    if func is torch.Tensor.copy_:
        return copy(args, kwargs)
    if name == "numpy":
        raise TypeError("can't convert a tensor of the device to numpy")
    if name in SYNCS:
        syncs.note(name)
    if name == "cpu":
        return plain(args[0]).clone()
    if name in ("__getitem__", "__setitem__") and any(
        isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
    ):
        syncs.note("index by mask")
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, NPUTensor) and leaf.ndim:
            raise RuntimeError(
                f"{name}: expected all tensors to be on one device; {leaf.shape} is the host's"
            )
    result = run(func, args, kwargs)
    return result if name in SYNCS else tree_map(wrap, result)


class Device(TorchFunctionMode):
    """While it is active, tensors can be made on the device, moved there and pinned."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            pinned = args[0].clone()
            pinned._simulated_pin = True
            return pinned
        if func is torch.Tensor.to and not isinstance(args[0], NPUTensor):
            device = target_of(args, kwargs)
            if device is not None and device.type != "cpu":
                return move(args, kwargs, device)
        if (
            func is torch.Tensor.copy_
            and isinstance(args[1], NPUTensor)
            and not isinstance(args[0], NPUTensor)
        ):
            return copy(args, kwargs)
        device = kwargs.get("device")
        if isinstance(device, torch.device) and device.type != "cpu" and func is not torch.Tensor.to:
            _, kwargs = without_device((), kwargs)
            return on_npu(func(*args, **kwargs))
        return func(*args, **kwargs)


def device_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator of the device, written for plain tensors: all its tensors must be of one place."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {isinstance(tensor, NPUTensor) for tensor in tensors}
        if len(places) > 1:
            raise RuntimeError(f"{function.__name__}: tensors of the host and of the device")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            run_it = capturing.operator or (lambda call, args, kwargs: call(*args, **kwargs))
            result = run_it(function, tree_map(plain, args), tree_map(plain, kwargs))
            return tree_map(wrap, result) if True in places else result

    return checked


def watched() -> Iterator[Device]:
    """For a fixture: the device, and nothing noted yet."""
    syncs.__init__()  # type: ignore[misc]
    with Device() as device:
        yield device
