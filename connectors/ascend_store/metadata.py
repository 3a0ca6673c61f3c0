"""Messages from the scheduler half to the worker halves, one per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True)
class StoreStep:
    """The part of a step that concerns one request.

    run: unique name from block allocation until the request loses its blocks or ends, across all engines
    that ever share the store (unlike `req_id`, which clients choose). begins: blocks were allocated in
    this step; otherwise `blocks` and `hashes` extend the earlier ones. hashes: of full blocks. computed:
    tokens with KV, of which `local` are in the device's blocks when the request begins. stored: leading
    blocks found in the store at that time. end: tokens after the step, drafts included; confirmed: the
    same without drafts. last: the request's own KV is not needed after the step. generation: of the
    store's blocks that the request may use.
    refused: reason why the request cannot be stored, "" if it can; if set, only `blocks`, `computed`,
    `local` and `end` are valid.
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
    """dropped: requests that lost their blocks and may be scheduled again."""

    steps: list[StoreStep] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
