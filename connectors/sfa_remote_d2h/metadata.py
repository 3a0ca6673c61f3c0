"""What the scheduler's halves tell the workers' halves, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from vllm_kvoffload.connectors.sfa_remote_d2h.pending import Receive


@dataclass(frozen=True)
class Target:
    """Decode's control plane, from the rendezvous: `port` is that of TP rank 0 of the request's DP rank."""

    host: str
    port: int
    tp_size: int


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


@dataclass
class PrefillMetadata(KVConnectorMetadata):
    """dropped: requests whose blocks were taken back, and whether they will come again. held: finished ones
    whose blocks stay until the worker names them."""

    steps: list[PrefillStep] = field(default_factory=list)
    dropped: list[tuple[str, bool]] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


@dataclass
class DecodeMetadata(KVConnectorMetadata):
    """receives: newly allocated requests. answered: rendezvous that ended, with an error or ""."""

    receives: list[Receive] = field(default_factory=list)
    answered: list[tuple[str, str]] = field(default_factory=list)
