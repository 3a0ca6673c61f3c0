"""What the scheduler's half tells the workers' halves, once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class StoreStep:
    """What a step computes of a request.

    run: names the request from the allocation of its blocks to their loss or its end, in any engine that ever
    shares the store; unlike `req_id`, which clients choose. begins: the request was given its blocks just
    now; else `blocks` and `hashes` add to those before. hashes: of full blocks. computed: tokens whose KV
    exists; of these `local` are in the device's blocks when the request begins. stored: leading blocks that
    the store had then. end: tokens after the step, drafts included; confirmed: without them. last: the
    request's own KV is not needed after the step. generation: of the blocks in the store that the request may
    use. refused: why the request can't be stored, "" if it can; of the other fields only `blocks`,
    `computed`, `local` and `end` count then.
    """

    req_id: str
    run: str
    begins: bool
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    computed: int
    local: int
    stored: int
    end: int
    confirmed: int
    last: bool
    generation: str = ""
    refused: str = ""


@dataclass
class StoreMetadata(KVConnectorMetadata):
    """dropped: requests that lost their blocks, and may come again."""

    steps: list[StoreStep] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
