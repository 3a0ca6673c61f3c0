"""Messages from the scheduler halves to the worker halves, one per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Failure, Receive
from vllm_kvoffload.metrics.fields import ReceiveFailure


@dataclass(frozen=True)
class Target:
    """Decode's control plane, from the rendezvous; `port` belongs to TP rank 0 of the request's DP rank.

    secret: of the current run of decode; a prefill rank presents it in its `Hello`.
    """

    host: str
    port: int
    tp_size: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class PrefillStep:
    """The part of a step that concerns one request that decode waits for. opens: first step of a transfer.

    start, blocks: blocks that this step completes and decode lacks. final: no more blocks will follow.
    """

    req_id: str
    request: str
    target: Target
    prompt: bytes
    num_blocks: int
    opens: bool
    start: int
    blocks: tuple[int, ...]
    final: bool


@dataclass(frozen=True)
class Decline:
    """Tells all decode ranks that a request will not be transferred, and why."""

    request: str
    target: Target
    prompt: bytes
    reason: str


@dataclass
class PrefillMetadata(KVConnectorMetadata):
    """dropped: requests that lost their blocks, and whether they will be scheduled again. held: finished
    ones whose blocks stay until the worker releases them. declined: requests that cannot be handed over."""

    steps: list[PrefillStep] = field(default_factory=list)
    dropped: list[tuple[str, bool]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)


@dataclass
class DecodeMetadata(KVConnectorMetadata):
    """receives: newly allocated requests. answered: rendezvous that ended, with an error or "". secret:
    the secret that prefill ranks must present, "" while there is none."""

    receives: list[Receive] = field(default_factory=list)
    answered: list[tuple[str, str]] = field(default_factory=list)
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class LayoutMetadata(KVConnectorHandshakeMetadata):
    """Digest of the worker's layout, which the scheduler half puts into every rendezvous."""

    digest: str


@dataclass
class ReceiveReport(KVConnectorWorkerMetadata):
    """Receives that failed in a step, by request id; of one rank, or merged from several."""

    failures: dict[str, Failure]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReceiveReport:
        """Merges another rank's report; of two reasons for one request, a mismatch takes precedence."""
        assert isinstance(other, ReceiveReport)
        failures = dict(self.failures)
        for req_id, failure in other.failures.items():
            if req_id not in failures or failure.failure == ReceiveFailure.MISMATCH:
                failures[req_id] = failure
        return ReceiveReport(failures)
