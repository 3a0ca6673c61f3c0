"""The worker half: maps blocks to store objects, publishes saved rows and reports lost ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_kvoffload.connectors.ascend_store.metadata import StoreMetadata, StoreStep
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.layerwise.pipeline import LayerPipeline, PipelineStep, Rows
from vllm_kvoffload.log import RateLimitedLog, get_logger
from vllm_kvoffload.store import KeySpace, ReadObject, Store, StoreError, WriteObject, WriteRefusal

logger = get_logger(__name__)

LEASE_S = 300.0
RENEW_S = 120.0
"""A pin with less remaining time is renewed before a step that needs it."""

Run = tuple[int, int, int, int, int]
Loss = tuple[str, bool]
"""(reason, invalid): whether the computed rows are invalid, or merely could not be stored."""


@dataclass
class Held:
    """State of a request that holds blocks.

    blocks: device ids. hashes: of full blocks. generation: see `StoreStep`. resident: leading tokens still
    present in layers with memory of their own. stored: leading blocks that need no more saving. partials:
    keys of blocks stored under the request's own name because they cannot be shared (yet). pins: open
    objects, by block.
    """

    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    generation: str = ""
    resident: int = 0
    stored: int = 0
    partials: dict[int, str] = field(default_factory=dict)
    pins: dict[int, ReadObject] = field(default_factory=dict)
    pinned_until: float = 0.0


@dataclass
class Current:
    """A request in a step. writes: (block number, object). first_lost: first block to report if it is
    lost.
    reason: why it is lost, "" if it is not. unsaved: why only this step's rows cannot be stored."""

    step: StoreStep
    held: Held
    runs: list[Run] = field(default_factory=list)
    own_runs: list[Run] = field(default_factory=list)
    saves: list[Run] = field(default_factory=list)
    writes: list[tuple[int, WriteObject]] = field(default_factory=list)
    first_lost: int = 0
    reason: str = ""
    unsaved: str = ""


class StoreWorker:
    """The worker half of one rank.

    Args:
        publishes: whether this rank writes; caches are equal on all ranks.
        shares: whether layers share memory, so that running requests' KV lives only in the store.
        agree: merges the lost requests of all ranks: lost on one rank means lost on all.
    """

    def __init__(
        self,
        store: Store,
        keys: KeySpace,
        pipeline: LayerPipeline,
        *,
        block_size: int,
        object_bytes: int,
        publishes: bool,
        shares: bool,
        agree: Callable[[dict[str, Loss]], dict[str, Loss]],
    ) -> None:
        self.pipeline = pipeline
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self._store, self._keys = store, keys
        self._block_size, self._object_bytes = block_size, object_bytes
        self._publishes, self._shares, self._agree = publishes, shares, agree
        self._requests: dict[str, Held] = {}
        self._step: list[Current] = []
        self._begun: set[str] = set()  # begun in this step
        self._log = RateLimitedLog(__name__, subject="store")
        self._number = 0  # step number, equal on all ranks
        self._invalid: set[int] = set()
        self._undrained_writes: list[WriteObject] = []
        self._undrained_reads: list[ReadObject] = []

    # ------------------------------------------------------------------------------------ beginning of a step

    def begin_step(self, metadata: StoreMetadata) -> None:
        """Opens the objects that the step needs and starts its first loads."""
        for req_id in metadata.dropped:
            self._forget(req_id)
        self._number += 1
        self._step = [Current(step, self._update(step)) for step in metadata.steps]
        self.prompt_tokens += sum(step.end - step.computed for step in metadata.steps)
        self._begun = {step.req_id for step in metadata.steps if step.begins}
        self._pin()
        for number, current in enumerate(self._step):
            self._plan(current, number)
        self.pipeline.begin(
            PipelineStep(
                requests=tuple(current.step.req_id for current in self._step),
                shared_loads=Rows.of([run for current in self._step for run in current.runs]),
                own_loads=Rows.of([run for current in self._step for run in current.own_runs]),
                saves=Rows.of([run for current in self._step for run in current.saves]),
                computed=sum(self._new_rows(current) for current in self._step),
            )
        )
        for number, current in enumerate(self._step):
            if current.reason:
                self.pipeline.fail(number, current.reason)
            elif current.unsaved:
                self.pipeline.fail(number, current.unsaved, invalid=False)
        self._end_undrained()

    def _plan(self, current: Current, number: int) -> None:
        """Plans a request's loads and saves. An error affects this request only."""
        try:
            self._plan_loads(current, number)
        except Exception as error:
            self._log.warning("request", f"{shown(current.step.req_id)} is lost: {error!r}")
            current.reason = f"its KV can't be loaded: {error!r}"
            current.runs.clear()
            current.own_runs.clear()
        if current.reason:
            return
        if current.step.refused:
            if self._shares:  # shared buffers lose its rows after this step
                current.unsaved = current.step.refused
            return
        try:
            if self._publishes:
                self._plan_saves(current, number)
        except Exception as error:
            self._log.warning("request", f"{shown(current.step.req_id)} is not stored: {error!r}")
            current.unsaved = f"its KV can't be stored: {error!r}"
            current.saves.clear()

    def _update(self, step: StoreStep) -> Held:
        if step.begins:
            self._forget(step.req_id)
            self._requests[step.req_id] = Held(
                generation=step.generation, resident=step.local, stored=step.stored
            )
            self.hit_tokens += step.computed - step.local
            self.prompt_tokens += step.computed - step.local
        held = self._requests[step.req_id]
        held.blocks += step.blocks
        held.hashes += step.hashes
        # The token count can shrink: rejected drafts, lost rows.
        held.resident = min(held.resident, step.computed)
        held.stored = min(held.stored, step.computed // self._block_size)
        return held

    def _needed(self, current: Current) -> range:
        """Returns the blocks with rows missing in some layer."""
        stop = -(-current.step.computed // self._block_size)
        if self._shares:
            return range(stop)
        resident = current.held.resident
        return range(resident // self._block_size if resident < current.step.computed else stop, stop)

    def _pin(self) -> None:
        """Opens the objects of all needed blocks in as few calls as possible, and reopens expiring pins."""
        now = time.monotonic()
        expiring: list[ReadObject] = []
        for current in self._step:
            held = current.held
            if held.pins and held.pinned_until - now < RENEW_S:
                expiring += held.pins.values()
                held.pins = {}
        for attempt in (0, 1):
            wanted = [one for current in self._step for one in self._wanted(current, attempt)]
            if wanted:
                self._open(wanted, now)
        self._close(expiring)  # closed only now, so they could not be evicted in between

    def _wanted(self, current: Current, attempt: int) -> list[tuple[Held, int, str]]:
        """Lists (request, block, key) not yet open; attempt 1 uses the alternative keys."""
        held, wanted = current.held, []
        try:
            for number in self._needed(current):
                names = self._names(held, number) if number not in held.pins else []
                if attempt < len(names):
                    wanted.append((held, number, names[attempt]))
        except Exception as error:  # a hash that yields no valid key
            self._log.warning("request", f"{shown(current.step.req_id)} has no keys: {error}")
            return []
        return wanted

    def _open(self, wanted: Sequence[tuple[Held, int, str]], now: float) -> None:
        try:
            found = self._store.open_read([key for _, _, key in wanted], LEASE_S)
        except Exception as error:  # any error: the objects are not open
            self._log.warning("open", f"it does not answer: {_text(error)}")
            return
        for (held, number, _), pin in zip(wanted, found, strict=True):
            if pin is not None:
                held.pinned_until = now + LEASE_S if not held.pins else min(held.pinned_until, now + LEASE_S)
                held.pins[number] = pin

    def _names(self, held: Held, number: int) -> list[str]:
        """Returns the keys that a block may be stored under, the most likely first."""
        names = [self._key(held, number)] if number < len(held.hashes) else []
        if number in held.partials:
            names.append(held.partials[number])
        return names

    def _key(self, held: Held, number: int) -> str:
        return self._keys.key(held.hashes[number], held.generation)

    def _plan_loads(self, current: Current, owner: int) -> None:
        step, held, size = current.step, current.held, self._block_size
        current.first_lost = min(self._needed(current).start, step.computed // size)
        for number in self._needed(current):
            pin = held.pins.get(number)
            if pin is None:
                if self._shares:  # the blocks before it will still be present in the next step
                    current.first_lost = number
                current.reason = f"block {number} of its KV is not in the store any more"
                current.runs.clear()
                current.own_runs.clear()
                return
            begin, end = number * size, min((number + 1) * size, step.computed)
            run = (pin.address, held.blocks[number], 0, end - begin, owner)
            if self._shares:
                current.runs.append(run)
            if held.resident < end:
                skip = max(held.resident - begin, 0)
                current.own_runs.append((*run[:2], skip, end - begin - skip, owner))

    # ----------------------------------------------------------------------------------------------- saves

    def _plan_saves(self, current: Current, owner: int) -> None:
        """Reserves objects for blocks completed by the step and, with shared buffers, for its remaining
        rows."""
        step, held, size = current.step, current.held, self._block_size
        full = min(step.confirmed // size, len(held.hashes))
        named = [(number, self._key(held, number)) for number in range(held.stored, full)]
        if self._shares and not step.last:
            rest = range(max(full, step.computed // size), -(-step.end // size))
            named += [(number, self._partial(step, number)) for number in rest]
        again = self._reserve(current, named)
        if again and self._shares:  # another writer holds the block, and may never publish it
            self._reserve(current, [(number, self._partial(step, number)) for number in again])
        for number, written in current.writes:
            rows = min((number + 1) * size, step.end) - number * size
            current.saves.append((written.address, held.blocks[number], 0, rows, owner))

    def _reserve(self, current: Current, named: Sequence[tuple[int, str]]) -> list[int]:
        """Opens objects for writing. Returns blocks whose key is taken but not readable yet."""
        if not named:
            return []
        keys = [key for _, key in named]
        try:
            granted = self._store.open_write(keys, self._object_bytes)
        except Exception as error:  # any error counts as no room
            self._log.warning("reserve", f"it takes nothing: {_text(error)}")
            return []
        held, existing, again = current.held, [], []
        for (number, key), result in zip(named, granted, strict=True):
            if isinstance(result, WriteObject):
                current.writes.append((number, result))
            elif result is WriteRefusal.EXISTS and not self._is_shared(held, number):
                if number in held.pins:  # holds its first rows, which this step still loads
                    again.append(number)
                else:
                    existing.append((held, number, key))
        if existing:
            self._open(existing, time.monotonic())
        return again + [number for _, number, _ in existing if number not in held.pins]

    def _partial(self, step: StoreStep, number: int) -> str:
        end = min((number + 1) * self._block_size, step.end)
        # Drafts of different steps may end at the same token, also after a loss or a preemption.
        return self._keys.partial(f"{step.run}-{self._number}", number, end)

    def _new_rows(self, current: Current) -> int:
        """Number of rows to save: with shared buffers all rows that the step computes, otherwise whole
        blocks."""
        step, size = current.step, self._block_size
        if not self._shares:
            return len(current.writes) * size
        return sum(
            max(0, min((number + 1) * size, step.end) - max(number * size, step.computed))
            for number, _ in current.writes
        )

    # ------------------------------------------------------------------------------------------ end of a step

    def end_step(self) -> None:
        """Publishes what was saved, except for requests that lost a row on any rank."""
        failed = self.pipeline.finish()
        losses = self._agree({name: (why, name in self.pipeline.invalid) for name, why in failed.items()})
        if not self._shares:
            self._spread(losses)
        writes = [(current, number, w) for current in self._step for number, w in current.writes]
        if self.pipeline.drained:
            self._finish([w for _, _, w in writes], [c.step.req_id not in losses for c, _, _ in writes])
        else:
            self._undrained_writes += [w for _, _, w in writes]
        for current in self._step:
            reason, invalid = losses.get(current.step.req_id, ("", False))
            if invalid:
                self.pipeline.give_up([current.step.req_id], reason)
            # Without shared buffers the device holds all rows, including those that could not be stored.
            if invalid or (reason and self._shares):
                self._lose(current, reason, invalid)
            else:
                self._settle(current)
        self._step = []

    def _spread(self, losses: dict[str, Loss]) -> None:
        """Extends the loss to requests that attended to lost rows: vLLM shares a block with other requests
        as soon as its load or computation is planned."""
        lost_blocks: set[int] = set()
        lost = [current for current in self._step if losses.get(current.step.req_id, ("", False))[1]]
        while lost:
            lost_blocks.update(*(self._blocks(current, current.step.end) for current in lost))
            lost = []
            for current in self._step:
                own = current.held.blocks[: -(-current.step.computed // self._block_size)]
                name, invalid = current.step.req_id, losses.get(current.step.req_id, ("", False))[1]
                if not invalid and not lost_blocks.isdisjoint(own):
                    current.first_lost = next(n for n, block in enumerate(own) if block in lost_blocks)
                    losses[name] = ("a neighbour lost blocks that it attended to", True)
                    lost.append(current)

    def _blocks(self, current: Current, end: int) -> list[int]:
        """Returns the request's device blocks up to a token, which are lost with it."""
        return current.held.blocks[current.first_lost : -(-end // self._block_size)]

    def _finish(self, writes: Sequence[WriteObject], ok: Sequence[bool]) -> None:
        """Publishes written objects. An unpublished one is found missing by the next step that needs it."""
        if not writes:
            return
        try:
            published = self._store.finish_write(writes, ok)
        except Exception as error:  # any error: none of them is readable
            self._log.warning("publish", f"{len(writes)} blocks were not stored: {_text(error)}")
            return
        failed = sum(good and not done for good, done in zip(ok, published, strict=True))
        if failed:
            logger.warning("%d blocks were not stored: they took too long, or the store forgot them", failed)

    def _end_undrained(self) -> None:
        """Releases objects that an abandoned copy may still have been using, once it has ended."""
        if self.pipeline.drained:
            writes, self._undrained_writes = self._undrained_writes, []
            reads, self._undrained_reads = self._undrained_reads, []
            self._finish(writes, [False] * len(writes))
            self._close(reads)

    def _settle(self, current: Current) -> None:
        step, held, size = current.step, current.held, self._block_size
        full = min(step.confirmed // size, len(held.hashes))
        held.stored = max(held.stored, full)
        held.resident = step.end
        if self._shares:
            # All ranks use the same object names, even if only one of them writes.
            for number in range(step.computed // size, -(-step.end // size)):
                if not self._is_shared(held, number):
                    self._unpin(held, [number])
                held.partials[number] = self._partial(step, number)

    def _is_shared(self, held: Held, number: int) -> bool:
        pin = held.pins.get(number)
        return pin is not None and number < len(held.hashes) and pin.key == self._key(held, number)

    def _lose(self, current: Current, reason: str, invalid: bool) -> None:
        """Reports the request's rows as lost and forgets them."""
        step, held, size = current.step, current.held, self._block_size
        logger.warning("request %s lost its KV: %s", step.req_id, reason)
        first = current.first_lost
        self._invalid.update(self._blocks(current, step.end if invalid else step.computed))
        held.stored = min(held.stored, first)
        held.resident = min(held.resident, first * size)
        held.partials = {number: key for number, key in held.partials.items() if number < first}
        self._unpin(held)

    def take_invalid(self) -> set[int]:
        """Returns device blocks with lost rows, each once."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def release(self, req_ids: set[str]) -> None:
        """Releases everything of requests that have ended."""
        for req_id in req_ids - self._begun:  # a client may reuse a name at once
            self._forget(req_id)

    def metrics(self) -> dict[str, int]:
        """Counters by key of `metrics.STORE`, except the buffer sizes."""
        moved = self.pipeline.stats
        return {
            "store_loaded_bytes": moved.loaded_bytes,
            "store_saved_bytes": moved.saved_bytes,
            "store_needed_bytes": moved.needed_load_bytes + moved.needed_save_bytes,
            "store_prompt_tokens": self.prompt_tokens,
            "store_hit_tokens": self.hit_tokens,
            "store_lost_requests": moved.failed_requests,
            "store_wait_us": int(moved.wait_s * 1e6),
            "store_pinned_objects": self.num_pins,
        }

    @property
    def num_pins(self) -> int:
        """Number of objects kept open."""
        return sum(len(held.pins) for held in self._requests.values()) + len(self._undrained_reads)

    def _forget(self, req_id: str) -> None:
        held = self._requests.pop(req_id, None)
        if held is not None:
            self._unpin(held)

    def _unpin(self, held: Held, numbers: Sequence[int] | None = None) -> None:
        chosen = list(held.pins) if numbers is None else [n for n in numbers if n in held.pins]
        self._close([held.pins.pop(number) for number in chosen])

    def _close(self, pins: Sequence[ReadObject]) -> None:
        if not self.pipeline.drained:  # a copy may still be running
            self._undrained_reads += pins
        elif pins:
            self._store.close_read(pins)


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, StoreError) else repr(error)
