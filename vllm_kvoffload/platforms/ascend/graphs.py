"""Full decode graphs: what happens before and after a replay, which runs the layers' kernels and no Python.

Before it the step is put where the graph's kernels look for it; after it the host does for all layers at once
what each layer does when it runs itself. Requests that a graph was captured with, and a step lacks, have
neither a row of the pools nor a slot. Graphs are captured, and replayed in dummy runs, without any request.
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
    """The steps of a manager that run in graphs. Its plans must be made in place by the AscendC kernels.

    on: the step on the device, while one runs in a graph; layers that are captured read it.
    """

    on: DeviceBatch | None = None

    def __init__(self, manager: SparseKVManager, delivery: KernelDelivery) -> None:
        self._manager = manager
        self._delivery = delivery

    def can_run(self, count: int) -> bool:
        """Whether a graph of ``count`` tokens can run the manager's step. Else its layers have to."""
        manager, queries = self._manager, self._manager.max_query_len
        requests, rest = divmod(count, queries)
        return not rest and requests <= manager.rows.num_rows and manager.step.can_pad(requests, queries)

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Around the replay of a graph of ``count`` tokens, its capture, or layers that run as it would."""
        requests = count // self._manager.max_query_len
        self.on = self._delivery.place(self._manager.enter_graph(requests))
        try:
            yield
        finally:
            self.on = None
        self._delivery.replayed()
        self._manager.leave_graph()

    def end_layer(self, layer: int) -> None:
        """A layer that is captured, or runs as if it were, has got its rows."""
        if layer == self._manager.geometry.num_target_layers - 1:
            self._delivery.end_step()


def decode_graphs(manager: SparseKVManager) -> DecodeGraphs | None:
    """None where layers need the host."""
    delivery = manager.delivery
    return DecodeGraphs(manager, delivery) if isinstance(delivery, KernelDelivery) else None
