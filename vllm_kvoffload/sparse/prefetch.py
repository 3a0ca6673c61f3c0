"""Exact prefetch of the follower layers' misses, which the group's plan lists.

The owner's plan names the misses of every layer of its group, so no prediction is involved. While owner and
followers compute, a side stream fetches the followers' rows from the host pool; each follower waits only for
its own event.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_kvoffload import ops
from vllm_kvoffload.runtime.base import Event, Runtime, join_events
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.hot_pool import HotPool
from vllm_kvoffload.sparse.partitions import PartitionTable
from vllm_kvoffload.sparse.step_state import StepState

STREAM = "prefetch"


def fetch_misses(
    host_rows: HostRows,
    hot: HotPool,
    layer: int,
    step: StepState,
    plan: ops.PlanOut,
    partitions: torch.Tensor,
) -> int:
    """Copies a plan's misses of one layer into their slots; returns the bytes. Skips negative partitions."""
    host, slots = host_rows.layers[layer], hot.layers[layer]
    return host_rows.row_ops.serve(host, slots, step.decode_block_table, partitions, plan)


class FollowerPrefetch:
    """The follower layers' fetches in flight.

    Args:
        host_rows: the host pool. hot: the target of the copies. partitions: their leases.
        runtime: provides the prefetch stream.
        deadline_s: limit of every wait.
    """

    def __init__(
        self,
        host_rows: HostRows,
        hot: HotPool,
        partitions: PartitionTable,
        runtime: Runtime,
        deadline_s: float,
    ) -> None:
        self._host_rows = host_rows
        self._hot = hot
        self._partitions = partitions
        self._compute = runtime.current_stream()
        self._stream = runtime.stream(STREAM)
        self._deadline_s = deadline_s
        self._events: dict[int, Event] = {}
        self._fetched: dict[int, int] = {}

    def start(self, followers: Sequence[int], plan: ops.PlanOut, step: StepState) -> None:
        """Queues the layers' fetches. The plan must not change until they are taken or joined."""
        if not followers:
            return
        self._stream.wait_event(self._compute.record("plan, and last use of the slots it gives away"))
        for layer in followers:
            self._stream.submit(self._fetch, layer, plan, step, label=f"prefetch layer {layer}")
            self._events[layer] = self._stream.record(f"misses of layer {layer}")

    def take(self, layer: int) -> int | None:
        """Waits for a layer's fetch. Returns the bytes fetched, or None if no fetch was queued.

        Raises:
            TaskFailedError, WaitTimeoutError: the rows could not be fetched.
        """
        event = self._events.get(layer)
        if event is None:
            return None
        event.wait(self._deadline_s)
        del self._events[layer]  # after the wait: a stuck fetch must be joined before its slots are reused
        return self._fetched.pop(layer)

    def join(self) -> None:
        """Waits for fetches left by a partly executed step and ignores their failures.

        Raises:
            WaitTimeoutError: a fetch is stuck.
        """
        join_events(self._events.values(), self._stream, self._deadline_s)
        self._events.clear()
        self._fetched.clear()

    def _fetch(self, layer: int, plan: ops.PlanOut, step: StepState) -> None:
        partitions = self._partitions.still_leased(step.decode_partitions, step.leases)
        self._fetched[layer] = fetch_misses(self._host_rows, self._hot, layer, step, plan, partitions)
