"""Keys of stored blocks, which include every fact that distinguishes two caches. No I/O.

``<model>.<facts>.<shard>.<block hash>``: the model's name, shortened to fit, for readability; a digest of all
facts; the shard; vLLM's hash of the block, which covers all preceding tokens. After a reset, a generation
precedes the hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields

import msgspec

MAX_KEY_CHARS = 256
"""MemCache's limit."""

VERSION = 1
"""Version of the format of keys and objects; different versions never share objects."""

_MODEL_CHARS = 40
_REQUEST_CHARS = 64


@dataclass(frozen=True)
class KeySpace:
    """The facts that must agree before two engines may exchange blocks.

    model: its name or path. revision: of the checkpoint, "" if unknown. dtype: of the KV cache.
    block_size: tokens per block. layout_digest: of the order, offsets and sizes of the layers in an object.
    shard: the part of the heads, such as "0of1". hash_probe: the hash of a fixed block, from the process that
    hashes; it differs between hash seeds and algorithms. namespace: separates engines that otherwise agree.

    Raises ValueError: a block size below 1, or a shard that is not valid in a key.
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
        """Common prefix of all keys of this space."""
        facts = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"{_tag(self.model)}.{_digest([VERSION, facts])}.{self.shard}"

    @property
    def manifest_key(self) -> str:
        """Key of the manifest, in which engines that share this model's blocks publish their facts."""
        return f"{_tag(self.model)}.{_digest([VERSION, self.namespace, self.model])}.manifest"

    def key(self, block_hash: bytes, generation: str = "") -> str:
        """Key of a full block. generation: up to 16 letters and digits.

        Raises ValueError: an empty hash or one of more than 64 bytes; an invalid generation.
        """
        if not 0 < len(block_hash) <= 64:
            raise ValueError(f"block hash of {len(block_hash)} bytes: expected 1 to 64")
        if not generation:
            return f"{self.prefix}.{block_hash.hex()}"
        if not re.fullmatch(r"[A-Za-z0-9]{1,16}", generation):
            raise ValueError(f"generation {generation!r:.40}: expected up to 16 letters and digits")
        return f"{self.prefix}.{generation}.{block_hash.hex()}"

    def partial(self, request: str, block_index: int, end_token: int) -> str:
        """Key of a snapshot of a request's last block, with its tokens up to `end_token`."""
        # Request ids come from clients and may have any characters and length.
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
