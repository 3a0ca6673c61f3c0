"""Graphs of the simulated NPU: torch.npu.NPUGraph and torch.npu.graph.

While one is captured, nothing of what the device is told happens: operators and kernels, in their order and
on their streams, are written down with the memory that they were given. A replay does just these, and runs no
other Python. So what a graph reads must be where it was when the graph was captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.ascend.simulated_device import NPUTensor, capturing, syncs  # isort: skip
from tests.ascend.simulated_npu import SimulatedNPU  # isort: skip


class Graph:
    """The recorded operations."""

    def __init__(self, npu: SimulatedNPU) -> None:
        self._npu = npu
        self.calls: list[Callable[[], object]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch._C.DisableTorchFunction():
            for call in self.calls:
                call()
        late = [stream for stream in self._npu.streams if stream.kernels]
        for stream in late:
            stream.kernels.clear()
        if late:
            raise RuntimeError("a stream that the graph has forked was never joined")


class Recorder(TorchDispatchMode):
    """Records torch's operators, which run on copies of tensors they would change.

    strict: tensors must be the device's or made by the graph itself.
    """

    def __init__(self, calls: list[Callable[[], object]], strict: bool) -> None:
        super().__init__()
        self._calls = calls
        self._strict = strict
        self._own: set[int] = set()  # where the memory begins that the graph makes; its calls keep it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            if self._strict and isinstance(tensor, torch.Tensor) and not self._may_use(tensor):
                raise RuntimeError(f"{func}: memory of the host, {tuple(tensor.shape)}, in a graph")
        spare = Spare()
        written = {arg.name for arg in func._schema.arguments if arg.is_write}
        names = [arg.name for arg in func._schema.arguments]
        with torch._C.DisableTorchFunctionSubclass():
            given = [
                spare.copy(arg) if name in written else arg for name, arg in zip(names, args, strict=False)
            ]
            named = {name: spare.copy(arg) if name in written else arg for name, arg in kwargs.items()}
            out = spare.originals(func(*given, **named))
        self._own.update(leaf.untyped_storage().data_ptr() for leaf in tensors_of(out))
        self._calls.append(lambda: store(out, func(*args, **kwargs)))
        return out

    def operator(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The same for an operator of the device."""
        spare = Spare()
        out = spare.originals(function(*spare.copy(args), **spare.copy(kwargs)))
        self._own.update(leaf.untyped_storage().data_ptr() for leaf in tensors_of(out))
        self._calls.append(lambda: store(out, function(*args, **kwargs)))
        return out

    def _may_use(self, tensor: torch.Tensor) -> bool:
        own = tensor.untyped_storage().data_ptr() in self._own
        return own or isinstance(tensor, NPUTensor) or not tensor.ndim or not tensor.numel()


class Spare:
    """Copies tensors; a tensor that occurs twice has one copy."""

    def __init__(self) -> None:
        self._copies: dict[Any, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def copy(self, values: Any) -> Any:
        return tree_map(self._copy, values)

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if key not in self._copies:
            self._copies[key] = value.clone()
            self._originals[id(self._copies[key])] = value
        return self._copies[key]

    def originals(self, values: Any) -> Any:
        return tree_map(lambda value: self._originals.get(id(value), value), values)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def store(old: Any, new: Any) -> None:
    """A replay's results go where those of the capture are."""
    for before, after in zip(tensors_of(old), tensors_of(new), strict=True):
        if before.data_ptr() != after.data_ptr():
            before.copy_(after)


def add_graphs(npu: SimulatedNPU, graphs: list[Graph], *, strict: bool = True) -> None:
    """Gives torch.npu graphs. graphs: those that were made. strict: see :class:`Recorder`."""

    def new_graph() -> Graph:
        graphs.append(Graph(npu))
        return graphs[-1]

    @contextlib.contextmanager
    def capture(graph: Graph, pool: Any = None) -> Iterator[None]:  # noqa: ARG001
        recorder, before = Recorder(graph.calls, strict), len(syncs.seen)
        npu.graph_calls, capturing.operator = graph.calls, recorder.operator
        try:
            with recorder:
                yield
        finally:
            npu.graph_calls = capturing.operator = None
        if strict and len(syncs.seen) > before:
            raise RuntimeError(f"the host waits in a graph: {syncs.seen[before:]}")

    fake: Any = npu
    fake.NPUGraph, fake.graph, fake.empty_cache = new_graph, capture, lambda: None
