"""KV stores: objects of whole KV blocks that outlive a request, behind one small interface.

Owns objects, their keys, reservations and leases, and eviction. `base` is the interface, `keys` and
`handshake` separate incompatible caches, `local` (one engine's own memory) and `memcache` implement the
interface. Never touches the layout of an object, vLLM's blocks and hashes, or the timing of loads and saves.
"""

from vllm_kvoffload.store.base import (
    CopySpans,
    Direction,
    ReadObject,
    Store,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
    WriteObject,
    WriteRefusal,
)
from vllm_kvoffload.store.handshake import Handshake, handshake, require_hash_seed
from vllm_kvoffload.store.keys import KeySpace
from vllm_kvoffload.store.registry import Role, make_store
from vllm_kvoffload.store.spans import DeviceCopies

__all__ = [
    "CopySpans",
    "DeviceCopies",
    "Direction",
    "Handshake",
    "KeySpace",
    "ReadObject",
    "Role",
    "Store",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "WriteObject",
    "WriteRefusal",
    "handshake",
    "make_store",
    "require_hash_seed",
]
