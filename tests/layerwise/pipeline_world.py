"""A prefill engine in miniature: real pipeline, gates and streams over modelled memory, store and readers.

Every row's value says whose it is, so that a row which was overwritten, or not loaded yet, shows.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from vllm_kvoffload.layerwise.buffer_plan import BufferOptions, CacheLayer, plan_buffers
from vllm_kvoffload.layerwise.pipeline import (
    LayerMemory,
    LayerPipeline,
    Part,
    PipelineLimits,
    PipelineStep,
    Rows,
)
from vllm_kvoffload.runtime import CPURuntime, DelayPlan, RuntimeFault
from vllm_kvoffload.store.base import CopySpans, StoreError

BLOCK = 4
NUM_BLOCKS = 24
LAYERS = 6


def value(layer: int, request: int, token: int) -> int:
    return (layer + 1) * 1_000_000 + (request + 1) * 10_000 + token


def accept(_address: int, _direction: str) -> None:
    """Every copy."""


class MemoryStore:
    """Moves bytes; refuses what a test says. `refuse(address, direction)` may raise StoreError."""

    name = "memory"

    def __init__(self) -> None:
        self.refuse: Callable[[int, str], object] = accept
        self.calls: list[tuple[str, int]] = []

    def copy(self, spans: CopySpans, direction: str) -> None:
        for far in spans.object_address:
            self.refuse(int(far), direction)
        self.calls.append((direction, len(spans)))
        for far, near, nbytes in zip(spans.object_address, spans.local_address, spans.nbytes, strict=True):
            pair = (int(near), int(far)) if direction == "load" else (int(far), int(near))
            ctypes.memmove(*pair, int(nbytes))


@dataclass
class Request:
    number: int
    blocks: list[int]
    objects: list[int]
    computed: int = 0
    resident: int = 0


@dataclass
class Readers:
    """Remote engines that read every layer of every request, late. A guard for the gates."""

    outstanding: dict[tuple[int, str], int] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    changed = staticmethod(lambda: None)

    def unread(self, layer: int, requests) -> list[str]:
        with self.lock:
            return [name for name in requests if self.outstanding.get((layer, name))]

    def give_up(self, requests, reason: str, _retry: bool) -> None:
        with self.lock:
            for name in requests:
                self.given_up.setdefault(name, reason)
                for key in [key for key in self.outstanding if key[1] == name]:
                    del self.outstanding[key]

    def published(self, layer: int, name: str) -> None:
        with self.lock:
            self.outstanding[layer, name] = 1

    def read(self, layer: int, name: str) -> None:
        with self.lock:
            self.outstanding.pop((layer, name), None)
        self.changed()


class World:
    """Runs random steps. `wrong` lists rows that were not what they should be, and where that was seen."""

    def __init__(
        self, seed: int, *, shared: int = 2, independent=(0,), max_ms: float = 1.0, readers: bool = False,
        limits: PipelineLimits | None = None, delays: bool = True,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        layers = [
            CacheLayer(n, "main", 8, "key" if n % 2 else None, 8 if n % 2 else 0) for n in range(LAYERS)
        ]
        self.plan = plan_buffers(layers, BufferOptions(shared, independent))
        shape = (NUM_BLOCKS, BLOCK)
        self.main = [np.full(shape, -1, dtype=np.int64) for _ in self.plan.slots]
        self.keys = [np.full(shape, -1, dtype=np.int64) for _ in self.plan.slots]
        self.pool = np.full((64, BLOCK * LAYERS * 2), -1, dtype=np.int64)
        self.store = MemoryStore()
        plan = DelayPlan(seed, max_ms) if delays else None
        self.runtime = CPURuntime(delays=plan, default_deadline_s=2)
        self.limits = limits or PipelineLimits(prefetch_layers=self.random.choice((1, 2, 3, 8)), deadline_s=5)
        self.pipeline = LayerPipeline(
            self.plan, self._memory(), NUM_BLOCKS, self.store, self.runtime, self.limits
        )
        self.readers = Readers() if readers else None
        if self.readers is not None:
            self.readers.changed = self.pipeline.gates.notify
            self.pipeline.use_guard(self.readers, 5)
        self.requests: list[Request] = []
        self.wrong: list[str] = []
        self.free_blocks, self.free_objects = list(range(NUM_BLOCKS)), list(range(64))
        self.failed: dict[str, str] = {}

    def _memory(self) -> list[LayerMemory]:
        memory, offset = [], 0
        for position, layer in enumerate(self.plan.layers):
            parts = []
            slot = self.plan.slot_of[position]
            for cache in [self.main[slot], self.keys[slot]][: 2 if layer.indexer else 1]:
                parts.append(Part(cache.ctypes.data, BLOCK * 8, 8, offset))
                offset += BLOCK * 8
            memory.append(LayerMemory(layer.index, tuple(parts)))
        return memory

    def add(self, tokens: int) -> Request:
        count = -(-tokens // BLOCK)
        request = Request(
            len(self.requests),
            [self.free_blocks.pop() for _ in range(count)],
            [self.pool[self.free_objects.pop()].ctypes.data for _ in range(count)],
        )
        self.requests.append(request)
        return request

    def step(self, chunks: dict[int, int]) -> dict[str, str]:
        """Computes the given number of tokens of each request; returns the failed requests and reasons."""
        batch = [(self.requests[number], count) for number, count in chunks.items()]
        shared, own, saves = [], [], []
        for owner, (request, count) in enumerate(batch):
            end = request.computed + count
            for n in range(-(-request.computed // BLOCK)):
                rows = min(BLOCK, request.computed - n * BLOCK)
                shared.append((request.objects[n], request.blocks[n], 0, rows, owner))
                skip = max(0, request.resident - n * BLOCK)
                if skip < rows:
                    own.append((request.objects[n], request.blocks[n], skip, rows - skip, owner))
            for n in range(request.computed // BLOCK, -(-end // BLOCK)):
                rows = min(BLOCK, end - n * BLOCK)
                saves.append((request.objects[n], request.blocks[n], 0, rows, owner))
        names = tuple(str(request.number) for request, _ in batch)
        self.pipeline.begin(
            PipelineStep(names, Rows.of(shared), Rows.of(own), Rows.of(saves), sum(c for _, c in batch))
        )
        for position, layer in enumerate(self.plan.layers):
            self.pipeline.wait_layer(layer.index)
            for request, count in batch:
                self._compute(position, request, count)
            if self.readers is not None:
                for request, _ in batch:
                    self._publish(position, request)
            self.pipeline.layer_done(layer.index)
        lost = self.pipeline.finish()
        self.failed.update(lost)
        for request, count in batch:
            if str(request.number) not in lost:
                request.computed += count
                request.resident = request.computed
        return lost

    def _caches(self, position: int) -> list[np.ndarray]:
        slot = self.plan.slot_of[position]
        return [self.main[slot], self.keys[slot]][: 2 if self.plan.layers[position].indexer else 1]

    def _compute(self, position: int, request: Request, count: int) -> None:
        for cache in self._caches(position):
            self._check(cache, position, request, request.computed, "attention")
            for token in range(request.computed, request.computed + count):
                row = value(position, request.number, token)
                cache[request.blocks[token // BLOCK], token % BLOCK] = row

    def _check(self, cache: np.ndarray, position: int, request: Request, tokens: int, who: str) -> None:
        if str(request.number) in self.failed or self.pipeline._state.failed:
            return
        for token in range(tokens):
            found = int(cache[request.blocks[token // BLOCK], token % BLOCK])
            if found != value(position, request.number, token):
                self.wrong.append(
                    f"{who}: layer {position}, request {request.number}, token {token}: {found}"
                )
                return

    def _publish(self, position: int, request: Request) -> None:
        assert self.readers is not None
        name, tokens = str(request.number), request.computed
        self.readers.published(position, name)

        def read() -> None:
            self._check(self._caches(position)[0], position, request, tokens, "remote")
            self.readers.read(position, name)

        self.runtime.stream("remote").submit(read)

    def random_run(self, steps: int = 4) -> None:
        for _ in range(3):
            self.add(self.random.randrange(6, 28))
        for _ in range(steps):
            chunks = {}
            for request in self.requests:
                left = len(request.blocks) * BLOCK - request.computed
                if left and self.random.random() < 0.8:
                    chunks[request.number] = self.random.randrange(1, min(left, 9) + 1)
            if chunks:
                self.step(chunks)
        self.check_store()

    def check_store(self) -> None:
        """Everything computed is in the store, once no save is running."""
        self.runtime.synchronize()
        memory = self.pipeline._memory
        for request in self.requests:
            if str(request.number) in self.failed:
                continue
            for position, layer in enumerate(memory):
                for part in layer.parts:
                    for token in range(request.computed):
                        address = request.objects[token // BLOCK] + part.offset + token % BLOCK * 8
                        found = ctypes.c_int64.from_address(address).value
                        if found != value(position, request.number, token):
                            where = f"layer {position}, request {request.number}, token {token}"
                            self.wrong.append(f"store: {where}: {found}")
                            return

    def close(self) -> None:
        self.runtime.shutdown()


def run(seed: int, **options) -> list[str]:
    world = World(seed, **options)
    try:
        world.random_run()
    finally:
        with (
            suppress(RuntimeFault) if world.wrong else nullcontext()
        ):  # a planted bug may leave threads stuck
            world.close()
    return world.wrong


__all__ = ["BLOCK", "MemoryStore", "StoreError", "World", "run", "value"]
