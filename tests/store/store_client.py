"""A store's caller for tests: objects whose bytes follow from their key, so that wrong ones are seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_kvoffload.store import CopySpans, ReadObject, Store, WriteObject, WriteRefusal
from vllm_kvoffload.transfer.base import Region

OBJECT_BYTES = 8192
SLOTS = 16


def content(key: str, nbytes: int = OBJECT_BYTES, version: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of an object."""
    seed = hashlib.sha256(f"{key}/{version}".encode()).digest()
    return np.random.default_rng(list(seed)).integers(0, 256, nbytes, dtype=np.uint8)


class Caller:
    """One client with registered memory of its own: uint8 [SLOTS, nbytes]."""

    def __init__(
        self, store: Store, nbytes: int = OBJECT_BYTES, memory: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """memory: of a device, uint8 [SLOTS * nbytes]; None for some of the host's."""
        self.store, self.nbytes = store, nbytes
        made = np.zeros(SLOTS * nbytes, dtype=np.uint8) if memory is None else memory
        self.buffer = made.reshape(SLOTS, nbytes)
        self.address = int(self.buffer.ctypes.data)
        device = "host" if memory is None else "npu"
        store.register([Region(self.address, self.buffer.nbytes, device)])

    def spans(self, addresses: Sequence[int], pieces: int = 4) -> CopySpans:
        """Each object in `pieces`, as layers are."""
        step = self.nbytes // pieces
        offsets = np.arange(pieces, dtype=np.int64) * step
        objects = np.array(addresses, dtype=np.int64)[:, None] + offsets
        local = self.address + np.arange(len(addresses), dtype=np.int64)[:, None] * self.nbytes + offsets
        return CopySpans(objects.ravel(), local.ravel(), np.full(objects.size, step, dtype=np.int64))

    def reserve(self, keys: Sequence[str]) -> list[WriteObject]:
        """All of them, or an assertion fails."""
        made = self.store.open_write(keys, self.nbytes)
        assert all(isinstance(object_, WriteObject) for object_ in made), made
        return [object_ for object_ in made if isinstance(object_, WriteObject)]

    def fill(self, objects: Sequence[WriteObject], version: int = 0) -> None:
        """Saves each object's bytes."""
        for slot, object_ in enumerate(objects):
            self.buffer[slot] = content(object_.key, self.nbytes, version)
        self.store.copy(self.spans([object_.address for object_ in objects]), "save")

    def put(self, keys: Sequence[str], version: int = 0) -> list[bool | WriteRefusal]:
        """Writes what can be written; True where it was published."""
        made = self.store.open_write(keys, self.nbytes)
        objects = [object_ for object_ in made if isinstance(object_, WriteObject)]
        published = iter([])
        if objects:
            self.fill(objects, version)
            published = iter(self.store.finish_write(objects, [True] * len(objects)))
        return [next(published) if isinstance(object_, WriteObject) else object_ for object_ in made]

    def load(self, objects: Sequence[ReadObject]) -> None:
        """Loads and checks each object's bytes."""
        self.buffer[:] = 0
        self.store.copy(self.spans([object_.address for object_ in objects]), "load")
        for slot, object_ in enumerate(objects):
            assert np.array_equal(self.buffer[slot], content(object_.key, self.nbytes)), object_.key

    def get(self, keys: Sequence[str], lease_s: float = 10.0) -> list[bool]:
        """Whether each key was readable; also checks the bytes."""
        opened = self.store.open_read(keys, lease_s)
        objects = [object_ for object_ in opened if object_ is not None]
        try:
            if objects:
                self.load(objects)
        finally:
            self.store.close_read(objects)
        return [object_ is not None for object_ in opened]
