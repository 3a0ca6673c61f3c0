"""Keys of stored blocks: everything that makes two caches different is in them. Pure.

``<model>.<facts>.<shard>.<block hash>``: the model's name as far as a key can hold it, for people; a digest
of all facts; the shard; the hash that vLLM gives the block, which covers all tokens before it. After a reset
a generation stands before the hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields

import msgspec

MAX_KEY_CHARS = 256
"""MemCache's limit."""

VERSION = 1
"""Of the meaning of keys and objects; another version never shares an object with this one."""

_MODEL_CHARS = 40
_REQUEST_CHARS = 64


@dataclass(frozen=True)
class KeySpace:
    """The facts that must agree before two engines may exchange blocks.

    model: its name or path. revision: of the checkpoint, "" where unknown. dtype: of the KV cache.
    block_size: tokens of a block. layout_digest: of the order, offsets and sizes of the layers in an object.
    shard: which part of the heads, such as "0of1". hash_probe: the hash of a fixed block, by the process that
    hashes; it differs between hash seeds and algorithms. namespace: keeps engines apart that agree on all
    else.

    Raises ValueError: a block size below 1, or a shard that can't stand in a key.
    """

    model: str
    revision: str
    dtype: str
    block_size: int
    layout_digest: str
    shard: str
    hash_probe: str
    namespace: str = ""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size {self.block_size}: expected at least 1")
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", self.shard):
            raise ValueError(f"shard {self.shard!r}: expected 1 to 32 letters, digits, _ or -")

    @property
    def prefix(self) -> str:
        """What all keys of this space begin with."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"{_tag(self.model)}.{_digest([VERSION, facts])}.{self.shard}"

    @property
    def manifest_key(self) -> str:
        """Where the engines that mean to share this model's blocks leave their facts."""
        return f"{_tag(self.model)}.{_digest([VERSION, self.namespace, self.model])}.manifest"

    def key(self, block_hash: bytes, generation: str = "") -> str:
        """Key of a full block. generation: up to 16 letters and digits.

        Raises ValueError: no hash, or one of more than 64 bytes; another generation.
        """
        if not 0 < len(block_hash) <= 64:
            raise ValueError(f"block hash of {len(block_hash)} bytes: expected 1 to 64")
        if not generation:
            return f"{self.prefix}.{block_hash.hex()}"
        if not re.fullmatch(r"[A-Za-z0-9]{1,16}", generation):
            raise ValueError(f"generation {generation!r:.40}: expected up to 16 letters and digits")
        return f"{self.prefix}.{generation}.{block_hash.hex()}"

    def partial(self, request: str, block_index: int, end_token: int) -> str:
        """Key of a snapshot of a request's last block, which holds its tokens up to `end_token`."""
        # Request ids come from clients: any characters, any length.
        name = (
            request
            if re.fullmatch(rf"[A-Za-z0-9_-]{{1,{_REQUEST_CHARS}}}", request)
            else _digest([ord(c) for c in request])
        )
        return f"{self.prefix}.partial.{name}.{block_index}.{end_token}"


def _tag(model: str) -> str:
    name = model.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_MODEL_CHARS] or "model"


def _digest(value: object) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:32]
