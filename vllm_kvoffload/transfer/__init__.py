"""One-sided transfer engines behind one small interface: register memory, add a peer, read, poll.

Owns registrations, peers' metadata and reads in flight, including when their memory has drained. `base` is
the interface, `spans` merges and checks spans, `nixl` (UCX) and `memfabric` (Ascend) implement it. Never
touches requests, leases or the wire protocol (``connectors``), nor the layout of the memory.
"""

from vllm_kvoffload.transfer.base import (
    PeerHandle,
    ReadHandle,
    ReadStatus,
    Region,
    TransferEngine,
    TransferError,
    TransferUnavailableError,
)
from vllm_kvoffload.transfer.registry import make_engine
from vllm_kvoffload.transfer.spans import RegionTable, Spans, coalesce

__all__ = [
    "PeerHandle",
    "ReadHandle",
    "ReadStatus",
    "Region",
    "RegionTable",
    "Spans",
    "TransferEngine",
    "TransferError",
    "TransferUnavailableError",
    "coalesce",
    "make_engine",
]
