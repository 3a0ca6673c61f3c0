"""Pipeline of layers through shared buffers: loads prefixes from the store and saves computed rows.

A step is a list of requests, each with rows to load and to save. For every layer, in order: its gate opens,
the rows of its requests' prefixes are loaded from the store, attention runs, the new rows are saved, and the
next layer with the same memory may start to load. Loads and saves run on side streams.

Rows already in a buffer are not loaded. A layer with memory of its own keeps its rows and loads only missing
ones (`own_loads`). The rows of any other layer are overwritten by the next step and are loaded once a step
(`shared_loads`), by row rather than by whole block.

Failures are scoped to requests. `finish` names each request with a failed copy; none of its KV may be
published or attended to (I-11). No torch: memory is given as addresses, the platform's work as an event.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.layerwise.slot_gate import COMPUTE, SAVE, ReadGuard, SlotGates, Storage
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.runtime.base import (
    Event,
    Runtime,
    RuntimeClosedError,
    RuntimeFault,
    TaskFailedError,
    WaitTimeoutError,
)
from vllm_kvoffload.store.base import CopySpans, Direction, Int64Array, Store, StoreError

logger = get_logger(__name__)

LOAD_STREAM = "store-load"
SAVE_STREAM = "store-save"

SETTLE_S = 1.0
"""Limit of a step's wait for an abandoned copy, whose deadline passed in an earlier step."""


@dataclass(frozen=True)
class Part:
    """A component of a layer's cache. base: address of block 0; stride: bytes between blocks; row_bytes: of a
    token; offset: of this layer's component in an object, in bytes."""

    base: int
    stride: int
    row_bytes: int
    offset: int


@dataclass(frozen=True)
class LayerMemory:
    """Addresses of a layer's caches. index: its number in the model."""

    index: int
    parts: tuple[Part, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a token."""
        return sum(part.row_bytes for part in self.parts)


@dataclass(frozen=True)
class Rows:
    """N runs of rows, each within a block: int64 [N] each.

    objects: addresses in the store; blocks: ids on the device; first, count: rows; owners: request numbers.
    """

    objects: Int64Array
    blocks: Int64Array
    first: Int64Array
    count: Int64Array
    owners: Int64Array

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int, int, int]]) -> Rows:
        """From (object, block, first, count, owner)."""
        columns = np.array(runs, dtype=np.int64).reshape(-1, 5).T
        return cls(*(np.ascontiguousarray(column) for column in columns))

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return int(self.count.sum())

    def only(self, mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Rows:
        """The runs selected by the mask."""
        return Rows(
            self.objects[mask], self.blocks[mask], self.first[mask], self.count[mask], self.owners[mask]
        )

    def spans(self, memory: LayerMemory) -> CopySpans:
        """The runs as copies of one layer."""
        objects, local, nbytes = [], [], []
        for part in memory.parts:
            start = self.first * part.row_bytes
            objects.append(self.objects + (start + part.offset))
            local.append(self.blocks * part.stride + (start + part.base))
            nbytes.append(self.count * part.row_bytes)
        return CopySpans(np.concatenate(objects), np.concatenate(local), np.concatenate(nbytes))


NO_ROWS = Rows.of([])


@dataclass(frozen=True)
class PipelineStep:
    """A step's copies. requests: names, indexed by the rows' owners. computed: new rows among `saves`."""

    requests: tuple[str, ...] = ()
    shared_loads: Rows = NO_ROWS
    own_loads: Rows = NO_ROWS
    saves: Rows = NO_ROWS
    computed: int = 0


@dataclass
class PipelineStats:
    """Totals. needed_*: minimum bytes to copy: each computed row of a layer once, each missing prefix row of
    a layer once a step. wait_s: time that computation waited for its layers' memory."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    needed_load_bytes: int = 0
    needed_save_bytes: int = 0
    wait_s: float = 0.0
    failed_requests: int = 0

    @property
    def ratio(self) -> float:
        """Bytes copied, relative to the minimum."""
        needed = self.needed_load_bytes + self.needed_save_bytes
        return (self.loaded_bytes + self.saved_bytes) / needed if needed else 1.0


@dataclass(frozen=True)
class PipelineLimits:
    """prefetch_layers: number of layers that loads may run ahead, the next layer included. max_runs,
    max_bytes: per call of the store, 0 for no limit. deadline_s: of a copy; reads_s: of remote reads."""

    prefetch_layers: int = 8
    max_runs: int = 0
    max_bytes: int = 0
    deadline_s: float = 30.0
    reads_s: float = 0.0


@dataclass
class _State:
    """A step in progress, by position. invalid: the failed requests with invalid KV. hung: why its copies
    were abandoned, "" if they were not."""

    issued: int = 0
    loads: dict[int, Event] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: dict[int, str] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)
    hung: str = ""


class LayerPipeline:
    """The pipeline of one rank. Called by the compute thread; each step runs from `begin` to `finish`.

    Args:
        plan, memory: of the same layers, in the same order. num_blocks: blocks in each cache.
    """

    def __init__(
        self,
        plan: BufferPlan,
        memory: Sequence[LayerMemory],
        num_blocks: int,
        store: Store,
        runtime: Runtime,
        limits: PipelineLimits,
    ) -> None:
        self.stats = PipelineStats()
        self.invalid: set[str] = set()
        """The last step's failed requests whose computation is invalid."""
        self._plan, self._memory, self._store = plan, tuple(memory), store
        self._runtime, self._limits = runtime, limits
        self._loads, self._saves = runtime.stream(LOAD_STREAM), runtime.stream(SAVE_STREAM)
        self._position = {layer.index: position for position, layer in enumerate(memory)}
        storages = [
            [Storage(part.base, part.stride, part.stride * num_blocks) for part in layer.parts]
            for layer in memory
        ]
        self.gates = SlotGates(storages, [layer.index for layer in memory])
        self._guard: ReadGuard | None = None
        self._step: PipelineStep = PipelineStep()
        self._state = _State()
        self._stuck: list[Event] = []

    def use_guard(self, guard: ReadGuard, reads_s: float) -> None:
        """Makes gates wait until remote readers have read the memory, for at most `reads_s` seconds."""
        self._guard = guard
        self._limits = replace(self._limits, reads_s=reads_s)
        self.gates.use_guard(guard)

    # ------------------------------------------------------------------------------------- the compute thread

    def begin(self, step: PipelineStep) -> None:
        """Begins a step and issues its first loads."""
        drained = self._settle()
        self._step, self._state = step, _State()
        self.gates.begin_step()
        self._count_needed(step)
        if not drained:
            self._state.hung = "a copy of an earlier step does not end"
            for number in range(len(step.requests)):
                self.fail(number, self._state.hung)
        if step.requests:
            self._issue(0)

    def fail(self, request: int, reason: str, invalid: bool = True) -> None:
        """Marks a request as failed: its rows are no longer copied.

        invalid: whether its KV is invalid; otherwise it is valid, but not stored.
        """
        if request not in self._state.failed:
            self._state.failed[request] = reason
            self.stats.failed_requests += 1
        if invalid:
            self._state.invalid.add(request)
            self.give_up([self._step.requests[request]], reason)

    def give_up(self, requests: Sequence[str], reason: str) -> None:
        """Invalidates all remote reads of these requests in this step."""
        if self._guard is not None:
            self._guard.give_up(requests, reason, True)

    def wait_layer(self, index: int) -> None:
        """Waits until a layer's memory holds its requests' prefixes and may be written. Idempotent."""
        position = self._position[index]
        state = self._state
        if not self._step.requests or position in state.opened:
            return
        state.opened.add(position)
        self._issue(position)
        begin = time.monotonic()
        event = state.loads.pop(position, None)
        if event is None or state.hung:
            self._acquire(position)
        else:
            self._join_load(position, event, state)
        if state.hung:
            self._fail_owners(self._rows_to_load(position), state.hung)
        self.stats.wait_s += time.monotonic() - begin

    def _join_load(self, position: int, event: Event, state: _State) -> None:
        try:
            event.wait(self._limits.reads_s + 2 * self._limits.deadline_s)
        except RuntimeFault as error:
            reason = f"loading layer {self._memory[position].index}: {error}"
            if isinstance(error, WaitTimeoutError):
                self._hang(state, reason)
            self._loads.recover()
            self._fail_owners(self._rows_to_load(position), reason)
            self._acquire(position)

    def _hang(self, state: _State, reason: str) -> None:
        """Abandons the step's copies because one hangs; waiting would cost another deadline at every layer.

        All requests with outstanding copies fail. An abandoned load writes only to blocks of failed requests;
        the data of an abandoned save is not published.
        """
        if not state.hung:
            state.hung = reason
            with suppress(RuntimeClosedError):  # the engine shuts down while a load waits
                self._stuck += [stream.record("given up") for stream in (self._loads, self._saves)]
            self.gates.begin_step()
            self.gates.notify()

    def layer_done(self, index: int) -> None:
        """Called after a layer's attention: saves its rows and lets a later layer load. Idempotent."""
        position = self._position[index]
        state = self._state
        if not self._step.requests or position in state.done:
            return
        state.done.add(position)
        if state.hung:  # no more copies: `finish` waits for the computation
            self.gates.release(position, COMPUTE)
            return
        computed = self._runtime.current_stream().record(f"layer {index} computed")
        saving = bool(len(self._step.saves))
        if saving:
            self.gates.hold(position, SAVE)
        if saving or not computed.query():
            self._saves.submit(self._save, position, computed, self._step, state, label=f"save layer {index}")
        else:
            self.gates.release(position, COMPUTE)
        self._issue(position + 1)

    def finish(self) -> dict[str, str]:
        """Ends the step, copying layers that did not run as well. Returns failed requests and the reasons."""
        if self._step.requests:
            for layer in self._memory:  # such as an MTP layer in a step without drafts
                self.wait_layer(layer.index)
                self.layer_done(layer.index)
            self._join_end(self._state)
        failed = {self._step.requests[number]: why for number, why in self._state.failed.items()}
        self.invalid = {self._step.requests[number] for number in self._state.invalid}
        self._step = PipelineStep()
        return failed

    def _join_end(self, state: _State) -> None:
        if not state.hung:
            self._end("saving", self._saves.record("saves of a step"), state)
        # Draft passes may still run on a device; the next step's loads must not overlap with them.
        self._end("computing", self._runtime.current_stream().record("computation of a step"), state)
        if state.hung:
            self._fail_owners(self._step.saves, state.hung, invalid=False)

    def _end(self, what: str, event: Event, state: _State) -> None:
        try:
            event.wait(self._limits.deadline_s)
        except RuntimeFault as error:
            reason = f"{what}: {error}"
            if isinstance(error, WaitTimeoutError):
                self._stuck.append(event)
                self._hang(state, reason)
            self._saves.recover()
            self._fail_owners(self._step.saves, reason, invalid=False)

    @property
    def drained(self) -> bool:
        """Whether all abandoned copies have drained; their objects may be closed only then."""
        return not self._stuck

    def _settle(self) -> bool:
        """Joins abandoned copies of earlier steps, which still use memory. Returns whether all have ended."""
        for event in list(self._stuck):
            try:
                event.wait(min(self._limits.deadline_s, SETTLE_S))
            except WaitTimeoutError:
                return False
            except TaskFailedError:
                logger.debug("a copy that was given up failed", exc_info=True)
            self._stuck.remove(event)
        return True

    def _count_needed(self, step: PipelineStep) -> None:
        for position, layer in enumerate(self._memory):
            rows = step.shared_loads if self._plan.is_shared(position) else step.own_loads
            self.stats.needed_load_bytes += rows.num_rows * layer.row_bytes
            self.stats.needed_save_bytes += step.computed * layer.row_bytes

    # ------------------------------------------------------------------------------------ loads and saves

    def _rows_to_load(self, position: int) -> Rows:
        return self._step.shared_loads if self._plan.is_shared(position) else self._step.own_loads

    def _issue(self, current: int) -> None:
        """Issues the loads of layers from `current` on, in order, up to the prefetch limit."""
        state, end = self._state, min(current + self._limits.prefetch_layers, len(self._memory))
        while state.issued < end and not state.hung:
            position = state.issued
            before = self._plan.predecessors.get(position)
            if before is not None and before not in state.done:
                return  # its buffer's previous owner is not computed yet
            state.issued += 1
            if len(self._rows_to_load(position)):
                label = f"load layer {self._memory[position].index}"
                self._loads.submit(self._load, position, self._step, state, label=label)
                state.loads[position] = self._loads.record(label)

    def _acquire(self, position: int) -> None:
        """Waits for a layer's gates; fails the requests that still hold a gate at the deadline."""
        requests, state, limits = self._step.requests, self._state, self._limits
        limit_s = max(limits.deadline_s, limits.reads_s)
        for blocker in self.gates.wait(position, requests, limit_s):
            reason = f"its memory was not free after {limit_s:g} s: {blocker}"
            if blocker.request:
                if self._guard is not None:
                    self._guard.give_up([blocker.request], reason, False)
            else:
                self._hang(state, reason)
                self._fail_owners(self._step.saves, reason, invalid=False)
        self.gates.occupy(position)

    def _load(self, position: int, step: PipelineStep, state: _State) -> None:
        if state is not self._state or state.hung:
            return  # belongs to an abandoned step
        self._acquire(position)
        if state.hung:
            return
        rows = step.shared_loads if self._plan.is_shared(position) else step.own_loads
        self.stats.loaded_bytes += self._move(rows, position, "load", state)

    def _save(self, position: int, computed: Event, step: PipelineStep, state: _State) -> None:
        try:
            computed.wait(self._limits.deadline_s)
            self.gates.release(position, COMPUTE)
            self.stats.saved_bytes += self._move(step.saves, position, "save", state)
        finally:
            self.gates.release(position, SAVE)

    def _move(self, rows: Rows, position: int, direction: Direction, state: _State) -> int:
        """Copies a layer's rows of all requests that have not failed; returns the bytes copied.

        A request that merely failed to be stored still loads its prefix: decode may use its computation.
        """
        excluded = state.invalid if direction == "load" else state.failed
        if excluded:
            rows = rows.only(~np.isin(rows.owners, list(excluded)))
        if not len(rows):
            return 0
        memory = self._memory[position]
        try:
            return self._copy(rows.spans(memory), direction)
        except StoreError:
            pass  # copying each request alone shows which one failed
        moved = 0
        for owner in np.unique(rows.owners):
            try:
                moved += self._copy(rows.only(rows.owners == owner).spans(memory), direction)
            except StoreError as error:
                reason = f"{direction} of layer {memory.index}: {error}"
                self.fail(int(owner), reason, invalid=direction == "load")
        return moved

    def _copy(self, spans: CopySpans, direction: Direction) -> int:
        for piece in pieces(spans, self._limits.max_runs, self._limits.max_bytes):
            self._store.copy(piece, direction)
        return spans.total_bytes

    def _fail_owners(self, rows: Rows, reason: str, invalid: bool = True) -> None:
        for owner in np.unique(rows.owners):
            self.fail(int(owner), reason, invalid)


def pieces(spans: CopySpans, max_runs: int, max_bytes: int) -> list[CopySpans]:
    """Splits copies into calls of at most `max_runs` runs of at most `max_bytes` bytes each; 0: no limit."""
    if max_bytes and len(spans) and int(spans.nbytes.max()) > max_bytes:
        counts = -(-spans.nbytes // max_bytes)
        which = np.repeat(np.arange(len(spans)), counts)
        part = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = part * max_bytes
        nbytes = np.minimum(spans.nbytes[which] - offset, max_bytes)
        spans = CopySpans(spans.object_address[which] + offset, spans.local_address[which] + offset, nbytes)
    if not max_runs or len(spans) <= max_runs:
        return [spans]
    return [
        CopySpans(
            spans.object_address[start : start + max_runs],
            spans.local_address[start : start + max_runs],
            spans.nbytes[start : start + max_runs],
        )
        for start in range(0, len(spans), max_runs)
    ]
