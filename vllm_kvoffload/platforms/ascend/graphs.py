"""Full decode graphs: host work before and after a replay, which runs the layers' kernels and no Python.

Before a replay the step is copied to the addresses that the graph's kernels read; afterwards the host does
the per-layer bookkeeping of all layers at once. Requests in the captured graph that the step lacks have
neither a pool row nor a slot. Graphs are captured, and replayed in dummy runs, without any request.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_kvoffload.platforms.ascend.delivery import KernelDelivery

if TYPE_CHECKING:
    from vllm_kvoffload.platforms.ascend.kernels import DeviceBatch
    from vllm_kvoffload.sparse.manager import SparseKVManager


class DecodeGraphs:
    """Runs a manager's steps in graphs. Its plans must be made in place by the AscendC kernels.

    on: the step on the device while it runs in a graph; read by layers during capture.
    """

    on: DeviceBatch | None = None

    def __init__(self, manager: SparseKVManager, delivery: KernelDelivery) -> None:
        self._manager = manager
        self._delivery = delivery

    def can_run(self, count: int) -> bool:
        """Whether a graph of ``count`` tokens can run the manager's step; if not, its layers must."""
        manager, queries = self._manager, self._manager.max_query_len
        requests, rest = divmod(count, queries)
        return not rest and requests <= manager.partitions.total and manager.step.can_pad(requests, queries)

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Wraps a replay of a graph of ``count`` tokens, its capture, or layers that run in the same way."""
        requests = count // self._manager.max_query_len
        self.on = self._delivery.place(self._manager.enter_graph(requests))
        try:
            yield
        finally:
            self.on = None
        self._delivery.replayed()
        self._manager.leave_graph()

    def end_layer(self, layer: int) -> None:
        """Called when a layer under capture, or running in the same way, has its rows."""
        if layer == self._manager.geometry.num_target_layers - 1:
            self._delivery.end_step()


def decode_graphs(manager: SparseKVManager) -> DecodeGraphs | None:
    """Returns None if layers need the host."""
    delivery = manager.delivery
    return DecodeGraphs(manager, delivery) if isinstance(delivery, KernelDelivery) else None
