"""What the scheduler's halves tell the workers' halves, once per step."""

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
    """Decode's control plane, from the rendezvous: `port` is that of TP rank 0 of the request's DP rank.

    secret: of this start of decode; a prefill rank must present it when it introduces itself.
    """

    host: str
    port: int
    tp_size: int
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class PrefillStep:
    """What a step computes of a request that decode waits for. opens: the first step of a transfer.

    start, blocks: those that this step completes, and decode lacks. final: nothing comes after them.
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
    """Tells all ranks of decode that no transfer of a request will come, and why."""

    request: str
    target: Target
    prompt: bytes
    reason: str


@dataclass
class PrefillMetadata(KVConnectorMetadata):
    """dropped: requests whose blocks were taken back, and whether they will come again. held: finished ones
    whose blocks stay until the worker names them. declined: those that can't be handed over."""

    steps: list[PrefillStep] = field(default_factory=list)
    dropped: list[tuple[str, bool]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)


@dataclass
class DecodeMetadata(KVConnectorMetadata):
    """receives: newly allocated requests. answered: rendezvous that ended, with an error or "". secret: what
    prefill ranks have to present, "" while there is none."""

    receives: list[Receive] = field(default_factory=list)
    answered: list[tuple[str, str]] = field(default_factory=list)
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class LayoutMetadata(KVConnectorHandshakeMetadata):
    """Digest of the worker's layout, which the scheduler's half puts into every rendezvous."""

    digest: str


@dataclass
class ReceiveReport(KVConnectorWorkerMetadata):
    """Receives that failed in a step, by request id: of one rank, or merged from several."""

    failures: dict[str, Failure]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReceiveReport:
        """Another rank's report joins; of two reasons for one request a mismatch says more."""
        assert isinstance(other, ReceiveReport)
        failures = dict(self.failures)
        for req_id, failure in other.failures.items():
            if req_id not in failures or failure.failure == ReceiveFailure.MISMATCH:
                failures[req_id] = failure
        return ReceiveReport(failures)
