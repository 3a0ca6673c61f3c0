"""Bugs planted into the offload core are found by the programs that pass without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.property.manager_model import Setup, setup_for
from tests.property.manager_programs import WrongRowError, run_failing_program, run_program, run_rank_pair
from vllm_kvoffload import ops
from vllm_kvoffload.sparse.compact import CompactDelivery, PublishedPlanner
from vllm_kvoffload.sparse.host_rows import HostRows
from vllm_kvoffload.sparse.hot_pool import HotPool
from vllm_kvoffload.sparse.manager import SparseKVManager
from vllm_kvoffload.sparse.partitions import PartitionError, PartitionLease, PartitionTable
from vllm_kvoffload.sparse.prefetch import FollowerPrefetch
from vllm_kvoffload.sparse.prefill_stream import PrefillStream

pytestmark = pytest.mark.timeout(300)

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Planted:
    """A bug to plant; `run` are the programs that must find it within the seeds, by raising `error`."""

    plant: Patch
    run: Callable[[Setup, int], object] = run_program
    error: type[Exception] | tuple[type[Exception], ...] = WrongRowError
    setup: Callable[[int], Setup] = setup_for


def disabled(owner: Any, name: str) -> Patch:
    return lambda patch: patch.setattr(owner, name, lambda *_args, **_kwargs: None)


def disabled_with(owner: Any, name: str, result: object) -> Patch:
    return lambda patch: patch.setattr(owner, name, lambda *_args, **_kwargs: result)


def before(owner: Any, name: str, action: Callable[..., object]) -> Patch:
    """Runs `action` with the same arguments before the real thing."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def patched(*args: Any) -> Any:
            action(*args)
            return real(*args)

        patch.setattr(owner, name, patched)

    return plant


def slots_not_copied(patch: pytest.MonkeyPatch) -> None:
    def write(store: Any, layer: int, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if store.writer:
            store._stream.submit(ops.host_write, store.layers[layer], rows, slot_mapping)
            store._written[layer] = store._stream.record()
            store.bytes_written += rows.numel()

    patch.setattr(HostRows, "write", write)


def prefix_in_step_missed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SparseKVManager,
        "_prefixes_in_step",
        lambda _self, batch, _fresh: np.zeros(batch.num_requests, dtype=bool),
    )


def prefix_in_step_missed_in_decode(patch: pytest.MonkeyPatch) -> None:
    real = SparseKVManager._sort
    patch.setattr(SparseKVManager, "_sort", lambda *args: replace(real(*args), decode_prefix_in_step=False))


def prefix_in_step_missed_in_prefill(patch: pytest.MonkeyPatch) -> None:
    real = PrefillStream.begin_step
    patch.setattr(
        PrefillStream,
        "begin_step",
        lambda self, requests, layers: real(
            self, [replace(r, prefix_in_step=False) for r in requests], layers
        ),
    )


def buffer_closed_before_attention(patch: pytest.MonkeyPatch) -> None:
    open_buffer, close = PrefillStream.open, PrefillStream.close

    def early(self: PrefillStream, layer: int, index: int) -> torch.Tensor:
        buffer = open_buffer(self, layer, index)
        close(self)
        return buffer

    patch.setattr(PrefillStream, "open", early)
    patch.setattr(PrefillStream, "close", lambda _self: None)


def partitions_by_batch_index(patch: pytest.MonkeyPatch) -> None:
    def acquire(_self: SparseKVManager, req_id: str, batch: Any) -> PartitionLease:
        return PartitionLease(batch.req_ids.index(req_id), 0)

    patch.setattr(SparseKVManager, "_acquire", acquire)
    patch.setattr(PartitionTable, "check", lambda *_: True)


def known_after_release(patch: pytest.MonkeyPatch) -> None:
    def release(self: SparseKVManager, req_ids: Any) -> None:
        for req_id in req_ids:
            if self.partitions.lookup(req_id) is not None:
                self.partitions.release(req_id)

    patch.setattr(SparseKVManager, "release", release)


def followers_not_served(patch: pytest.MonkeyPatch) -> None:
    def fetch(self: FollowerPrefetch, layer: int, _plan: Any, _step: Any) -> None:
        self._fetched[layer] = 0

    patch.setattr(FollowerPrefetch, "_fetch", fetch)


def prefetches_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def take(self: FollowerPrefetch, layer: int) -> int | None:
        return None if self._events.pop(layer, None) is None else self._fetched.pop(layer, 0)

    patch.setattr(FollowerPrefetch, "take", take)


def installs_not_joined(patch: pytest.MonkeyPatch) -> None:
    def join(self: CompactDelivery) -> bool:
        self._installed.clear()
        return True

    patch.setattr(CompactDelivery, "_join", join)


def installs_of_a_failed_step_count(patch: pytest.MonkeyPatch) -> None:
    real = CompactDelivery.deliver

    def deliver(self: CompactDelivery, *args: Any) -> Any:
        part = real(self, *args)
        self._layers_to_serve.update(dict.fromkeys(self._layers_to_serve, 0))
        return part

    patch.setattr(CompactDelivery, "deliver", deliver)


def draft_passes_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    def begin_draft(self: SparseKVManager, batch: Any, index: int) -> None:
        self._settle()
        layer = self.geometry.num_target_layers
        self._begin(batch, range(layer, layer + 1), self.step.fresh if index == 0 else ())

    patch.setattr(SparseKVManager, "begin_draft", begin_draft)


def prefix_in_step_missed_in_drafts(patch: pytest.MonkeyPatch) -> None:
    real = SparseKVManager.begin_draft
    patch.setattr(SparseKVManager, "begin_draft", lambda self, batch, _index: real(self, batch, 1))


def no_wait_for_ranks_before_loads(patch: pytest.MonkeyPatch) -> None:
    real = HostRows.await_layer

    def await_layer(self: HostRows, layer: int) -> None:
        real(self, layer)
        if self._barrier is not None:
            self._barrier()

    patch.setattr(HostRows, "await_ranks", lambda _self: None)
    patch.setattr(HostRows, "await_layer", await_layer)


def no_wait_for_ranks_in_a_layer(patch: pytest.MonkeyPatch) -> None:
    def await_layer(self: HostRows, layer: int) -> None:
        event = self._written[layer]
        if event is not None:
            event.wait(self._deadline_s)

    patch.setattr(HostRows, "await_layer", await_layer)


def long_steps(seed: int) -> Setup:
    """Whole prompts in one step: prefixes that are written in the same step are common."""
    return replace(setup_for(seed), token_budget=64, num_blocks=60)


def sessions(seed: int) -> Setup:
    """Sessions that go on after drafts were rejected, with more tokens than a decode has."""
    return replace(setup_for(4 * seed + 1), idle_rate=0.3)


def compact(seed: int) -> Setup:
    return setup_for(seed, "compact")


def published(seed: int) -> Setup:
    """Many requests so short that they decode in their first step."""
    return replace(setup_for(12 * seed + 6, "compact"), ways=16, policy="fifo", slots=64)


def drafting(seed: int) -> Setup:
    """Three draft passes over an MTP layer with a small pool, whole prompts in one step."""
    return replace(setup_for(4 * seed + 2), mtp_layers=1, slots=64, token_budget=64, num_blocks=60)


def single_prefill_layer(seed: int) -> Setup:
    """Loads of layer 0 start at once, while its rows of the step before may still be on their way."""
    return replace(setup_for(seed), pattern="F", mtp_layers=0, hold_ms=0.0)


PLANTED = {
    "writes are not joined": Planted(disabled(HostRows, "join")),
    "slot mapping is not copied": Planted(slots_not_copied),
    "prefixes computed in the step are not noticed": Planted(prefix_in_step_missed),
    "prefixes computed in the step are not noticed in decode": Planted(prefix_in_step_missed_in_decode),
    "prefixes computed in the step are not noticed in prefill": Planted(
        prefix_in_step_missed_in_prefill, setup=long_steps
    ),
    "prefixes computed in the step are not awaited": Planted(disabled(HostRows, "await_layer")),
    "prefixes computed in the step are not noticed after preemption": Planted(
        known_after_release, error=AssertionError
    ),
    "loads are not awaited": Planted(before(PrefillStream, "open", lambda self, *_: self._loaded.clear())),
    "buffer is closed before attention": Planted(buffer_closed_before_attention),
    "partitions are not reset": Planted(disabled(HotPool, "reset_partition")),
    "rows go by batch index": Planted(partitions_by_batch_index),
    "partitions are not released": Planted(disabled(SparseKVManager, "release"), error=PartitionError),
    "rejected drafts stay": Planted(before(ops, "dsa_plan", lambda *args: args[4].high.zero_())),
    "rejected drafts stay after a prefill": Planted(disabled(HotPool, "forget_beyond"), setup=sessions),
    "new rows are not written": Planted(disabled(ops, "write_rows")),
    "misses are not fetched for followers": Planted(followers_not_served),
    "prefetches are not awaited": Planted(prefetches_not_awaited),
    "prefetches of a failed step are not joined": Planted(
        disabled(FollowerPrefetch, "join"), run_failing_program
    ),
    "compact: installs are not joined": Planted(installs_not_joined, setup=compact),
    "compact: selections are reused too early": Planted(
        before(
            CompactDelivery,
            "_take_selection",
            lambda self, *_: self._selection_user.__setitem__(slice(2), [None] * 2),
        ),
        setup=compact,
    ),
    "compact: plans are reused too early": Planted(
        before(CompactDelivery, "_plan", lambda self, *_: [users.clear() for users in self._plan_users]),
        setup=compact,
    ),
    "compact: nothing is installed": Planted(disabled(ops, "dsa_install"), setup=compact),
    "compact: the published plan takes its own token 0 for old": Planted(
        disabled_with(PublishedPlanner, "reads_own_rows", False), setup=published
    ),
    "compact: what a failed step installed counts": Planted(
        installs_of_a_failed_step_count, run_failing_program, setup=compact
    ),
    "draft passes do not wait for each other": Planted(draft_passes_do_not_wait, setup=drafting),
    "prefixes computed in the step are not noticed in draft passes": Planted(
        prefix_in_step_missed_in_drafts, setup=drafting
    ),
    "ranks: loads run ahead of the writer": Planted(
        no_wait_for_ranks_before_loads, partial(run_rank_pair, writer_ms=10), setup=single_prefill_layer
    ),
    "ranks: prefixes computed in the step are awaited by the writer only": Planted(
        no_wait_for_ranks_in_a_layer, run_rank_pair
    ),
    "failed step: what it left is not undone": Planted(
        disabled(SparseKVManager, "_settle"), run_failing_program
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    planted = PLANTED[name]
    planted.plant(monkeypatch)
    for seed in range(60):
        try:
            planted.run(planted.setup(seed), seed)
        except planted.error:
            return
    pytest.fail("not found")
