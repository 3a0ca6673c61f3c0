"""The two halves of the connector as vLLM's hooks call them: one in the scheduler, one in each worker.

Prefill and decode implement both. A default is what a side does that a hook doesn't concern.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_kvoffload.connectors.sfa_remote_d2h.io_thread import IOThread
from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_kvoffload.runtime.base import Event


@dataclass
class StepResults:
    """What a worker reports after a step.

    sent: requests whose blocks prefill may free. received: requests that decode has received, or has
    failed to. failed_blocks: of the latter. failures: their reasons.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    failures: dict[str, Failure] = field(default_factory=dict)


class ConnectorScheduler(ABC):
    """The scheduler's half."""

    def use_layout(self, digest: str) -> None:  # noqa: B027  # prefill's layout travels in its `Hello`
        """Learns the digest of the workers' layout."""

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:  # noqa: ARG002
        """Returns how many tokens will be transferred, and whether there are any."""
        return 0, False

    @abstractmethod
    def allocated(
        self, request: Request, blocks: KVCacheBlocks | None = None, num_external_tokens: int = 0
    ) -> None:
        """The request has its blocks."""

    @abstractmethod
    def metadata(self, output: SchedulerOutput | None = None) -> Any:
        """Returns the step's metadata for the workers."""

    @abstractmethod
    def reported(self, output: KVConnectorOutput) -> None:
        """Takes the workers' report of a step."""

    @abstractmethod
    def finished(self, req_id: str) -> bool:
        """The request has ended in the scheduler. Returns whether its blocks must be kept for now."""

    @abstractmethod
    def reset(self) -> bool:
        """Returns whether no KV of before the reset is in use any more."""

    def close(self) -> None:  # noqa: B027
        """Ends what runs in the background."""


class ConnectorWorker(IOThread):
    """A worker's half."""

    @abstractmethod
    def begin_step(self, metadata: Any) -> None:
        """Takes the step's metadata, of this side's kind, before the forward pass."""

    def drop(self, metadata: Any) -> None:  # decode keeps nothing of a dropped request
        """Handles requests whose blocks will be overwritten in this step."""

    def layer_done(self, layer: int, written: Event | None = None) -> None:
        """A layer's rows are written, or will be when the device reaches `written`."""

    def end_step(self, written: Event | None = None) -> None:
        """All layers are written, or will be when the device reaches `written`."""

    @abstractmethod
    def finish_step(self, finished_req_ids: Iterable[str] = (), idle: bool = False) -> StepResults:
        """Returns what has happened since the last step.

        finished_req_ids: ended in the scheduler. idle: the step computed nothing, so that the call may
        wait briefly.
        """
