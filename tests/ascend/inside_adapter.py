"""Run inside the Ascend environment by test_ascend.py: the adapter on the simulated NPU.

Steps of prefill chunks, decodes and mixtures go through upstream's forward, with the offload and without.
What attention was given and what it returned is written to files, with which test_ascend.py feeds the CPU
platform.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_ascend.worker.worker  # noqa: F401  # the only order in which upstream's modules can be imported

from tests.ascend.adapter_model import (
    STEPS,
    TOPK,
    TYPES,
    Adapter,
    Ranks,
    Setup,
    make_step,
    patch_tables,
)
from tests.ascend.kernel_stand_ins import CoreKernels, TwinKernels
from tests.ascend.simulated_device import NPU, plain, syncs, watched
from tests.ascend.simulated_npu import install
from vllm_kvoffload.platforms.ascend import attention
from vllm_kvoffload.platforms.ascend.rows import PortableRows
from vllm_kvoffload.runtime.npu import DeviceLane
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.sparse.step import PoolSlots

TWIN = os.environ.get("KVOFFLOAD_KERNELS_TWIN", "")
Outputs = list[list[torch.Tensor]]

PORTABLE = Setup("portable")
KERNELS = Setup("portable", kernels=CoreKernels)
COMPACT = Setup("portable", kernels=CoreKernels, delivery="compact")
SETUPS = {
    "portable": PORTABLE,
    "sparse_copy": Setup("sparse_copy"),
    "kernels": KERNELS,
    "kernels and sparse_copy": Setup("sparse_copy", kernels=CoreKernels),
    "compact kernels": COMPACT,
}
ON_NPU = {name: Setup(**{**vars(setup), "device": NPU}) for name, setup in SETUPS.items()}


def changed(setup: Setup, **fields: Any) -> Setup:
    return Setup(**{**vars(setup), **fields})


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Tensors can be on the simulated NPU."""
    yield from watched()  # type: ignore[misc]


@pytest.fixture(autouse=True)
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Queries and weights that the indexer was asked with."""
    log: list[Any] = []
    install(monkeypatch, 32, log)
    patch_tables(monkeypatch)
    return log


def run(setup: Setup, steps: int | None = None) -> tuple[Outputs, Any]:
    """Outputs of all steps, and the totals of the offload."""
    adapter = Adapter(setup)
    try:
        outputs = list(adapter.run_drafting() if setup.drafts else adapter.run_all(steps))
        stats = None
        if adapter.offload is not None:
            for _ in range(2):  # counters of the device are read back one join late
                adapter.manager.delivery.settle(())
            stats = adapter.manager.stats
        if isinstance(getattr(adapter, "kernels", None), TwinKernels):
            assert adapter.kernels.reported == []
        return outputs, stats
    finally:
        adapter.close()


_without: dict[tuple[Any, ...], Outputs] = {}


def upstream(setup: Setup) -> Outputs:
    """Outputs without the offload."""
    key = (setup.dtype, setup.drafts, setup.kinds)
    if key not in _without:
        _without[key] = run(Setup(dtype=setup.dtype, drafts=setup.drafts, kinds=setup.kinds))[0]
    return _without[key]


def differences(found: Outputs, expected: Outputs) -> list[str]:
    return [
        f"step {number}, pass {layer}"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=False))
        for layer, (our, their) in enumerate(zip(ours, theirs, strict=True))
        if not torch.equal(our, their)
    ]


def check(setup: Setup) -> Any:
    found, stats = run(setup)
    assert len(found) == len(upstream(setup))
    assert differences(found, upstream(setup)) == []
    assert stats.hits > 0
    assert stats.misses > 0
    assert stats.fetched_bytes > 0
    return stats


# ------------------------------------------------------------------------------------ the same as upstream


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("name", SETUPS)
def test_same_outputs_as_upstream_without_offload(name: str, seed: int | None) -> None:
    check(changed(SETUPS[name], seed=seed))


@pytest.mark.parametrize("name", ["portable", "kernels", "compact kernels"])
def test_same_outputs_where_indices_end_with_the_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the alignment every step's indices are exactly as many as its longest request has tokens."""
    monkeypatch.setattr(attention, "INDEX_ALIGNMENT", 1)
    widths: set[int] = set()
    view = attention.pool_view

    def watched_view(*args: Any) -> Any:
        made = view(*args)
        widths.add(made.indices.shape[-1])
        return made

    monkeypatch.setattr(attention, "pool_view", watched_view)
    check(SETUPS[name])
    assert len(widths) > 1
    assert max(widths) == TOPK


def test_attention_gets_no_more_indices_than_the_longest_context_has_tokens() -> None:
    slots = torch.full((2, 2048), -1, dtype=torch.int32)
    slots[0, :40] = torch.arange(40) * 100
    pool = PoolSlots(slots, torch.tensor([1, 0], dtype=torch.int32), 4096)
    view = attention.pool_view(pool, 128, 40)
    assert torch.equal(view.indices, slots[:, None, :64])
    assert view.indices.is_contiguous()
    assert view.key_lengths.tolist() == [4096, 4096]  # a slot may lie anywhere
    assert all(attention.pool_view(pool, 128, n).indices.shape[-1] == 2048 for n in (None, 2047, 10**6))


@pytest.mark.parametrize("name", ON_NPU)
def test_same_outputs_with_memory_that_is_a_devices(name: str) -> None:
    stats = check(ON_NPU[name])
    expected = run(SETUPS["portable"])[1]
    assert (stats.hits, stats.misses, stats.fetched_bytes) == (
        expected.hits,
        expected.misses,
        expected.fetched_bytes,
    )


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("drafts", [1, 3])
def test_same_outputs_with_drafts(name: str, drafts: int) -> None:
    """Also of the MTP layer's passes. Rejected drafts differ from step to step."""
    check(changed(SETUPS[name], drafts=drafts, slots=128, seed=7))


@pytest.mark.parametrize("name", SETUPS)
def test_same_outputs_in_bf16(name: str) -> None:
    check(changed(SETUPS[name], dtype=torch.bfloat16, drafts=1))


@pytest.mark.parametrize("name", SETUPS)
def test_same_outputs_where_every_layer_chooses(name: str) -> None:
    """Plans follow one another without a follower in between, as with DeepSeek-V3.2."""
    check(changed(SETUPS[name], kinds=("full",) * len(TYPES)))


@pytest.mark.parametrize("name", SETUPS)
def test_same_outputs_with_a_prefix_that_is_written_in_the_same_step(name: str) -> None:
    """A new request decodes at once, over blocks that another one's prefill fills in this very step."""
    adapters = [Adapter(Setup()), Adapter(changed(SETUPS[name], seed=11))]
    made = make_step({"a": (0, 40), "b": (32, 1)})
    made["blocks"][1, :2] = made["blocks"][0, :2]
    outputs = [adapter.run(made) for adapter in adapters]
    assert adapters[1].manager.step.decode_prefix_in_step
    assert differences([outputs[1]], [outputs[0]]) == []
    for adapter in adapters:
        adapter.close()


@pytest.mark.skipif(not TWIN, reason="no library of the kernels for the CPU twin")
@pytest.mark.parametrize("delivery", ["in_place", "compact"])
@pytest.mark.parametrize("drafts", [0, 1])
def test_same_outputs_with_the_kernels_themselves(delivery: str, drafts: int) -> None:
    """The AscendC kernels on the CPU twin, which must have nothing to report."""
    check(
        Setup(
            "portable",
            device=NPU,
            delivery=delivery,
            drafts=drafts,
            slots=1024,
            kernels=partial(TwinKernels, library=TWIN),
            dtype=torch.bfloat16,
        )
    )


@pytest.mark.skipif(not TWIN, reason="no library of the kernels for the CPU twin")
def test_sizes_that_the_kernels_can_not_do_are_refused_at_start() -> None:
    """64 slots are 4 sets of 16; the kernel wants 64 sets."""
    with pytest.raises(ConfigError, match=r"KVOFFLOAD_ASCEND_OPS.*at least 64 per partition, got 4.*Fix: "):
        Adapter(Setup("portable", device=NPU, kernels=partial(TwinKernels, library=TWIN)))


# ---------------------------------------------------------------------------------------------- TP ranks


def run_ranks(
    setup: Setup, size: int, steps: int | None = None, ended: Callable[[], object] = lambda: None
) -> list[Outputs]:
    """All ranks of a model, each in a thread. With the offload they share rank 0's host pool. ended: called
    when they have run, before they are closed.
    """
    ranks = Ranks(size)
    first = Adapter(setup, 0, ranks)
    host = first.host if setup.movement else None
    adapters = [first, *(Adapter(setup, rank, ranks, host) for rank in range(1, size))]
    results: list[Any] = [None] * size

    def work(rank: int) -> None:
        adapter = adapters[rank]
        try:
            results[rank] = list(adapter.run_drafting() if setup.drafts else adapter.run_all(steps))
        except BaseException as error:
            results[rank] = error
            ranks._barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ended()
    for adapter in adapters:
        adapter.close()
    errors = [result for result in results if isinstance(result, BaseException)]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))  # that is the other's
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("name", SETUPS)
def test_two_ranks_give_what_two_ranks_give_upstream(name: str) -> None:
    setup = changed(SETUPS[name], drafts=1, seed=3)
    expected = run_ranks(Setup(drafts=1), 2)
    found = run_ranks(setup, 2)
    for ours, theirs in zip(found, expected, strict=True):
        assert differences(ours, theirs) == []
    assert differences(found[0], found[1]) == []


def hold_writes(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No step waits for host writes, which come when the event is set."""
    written, write = threading.Event(), PortableRows.host_write

    def late(*args: Any) -> None:
        assert written.wait(120)
        write(*args)

    monkeypatch.setattr(PortableRows, "host_write", late)
    monkeypatch.setattr("vllm_kvoffload.sparse.host_rows.HostRows.join", lambda _: None)
    return written


def test_control_a_rank_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for rank 0's writes another rank reads rows that aren't there yet."""
    written = hold_writes(monkeypatch)
    monkeypatch.setattr("vllm_kvoffload.sparse.host_rows.HostRows.await_own_writes", lambda *_: None)
    found = run_ranks(PORTABLE, 2, 6, written.set)
    assert differences(found[1], run_ranks(Setup(), 2, 6)[1])


# ------------------------------------------------------------------------------------------ waits of the host


def waits_by_layer(setup: Setup) -> tuple[list[list[str]], list[str]]:
    """For every pure decode step: where the host waited within layers; and while it was prepared."""
    adapter, within, before = Adapter(setup), [], []
    seen: list[tuple[str, list[str]]] = []
    adapter.watch = lambda where: seen.append((where, syncs.take()))
    for step in STEPS:
        made = make_step(step)
        seen.clear()
        syncs.take()
        adapter.run(made)
        if all(queries == 1 for _, queries in step.values()):
            before += seen[0][1]
            within.append([f"{where}: {what}" for where, waits in seen[1:] for what in waits])
    adapter.close()
    assert len(within) > 10
    return within, before


@pytest.mark.parametrize("name", ["kernels", "kernels and sparse_copy", "compact kernels"])
def test_with_the_kernels_no_layer_waits_for_the_device(name: str) -> None:
    within, before = waits_by_layer(ON_NPU[name])
    assert within == [[]] * len(within)
    # Lengths, blocks and slots come from the device, the positions' ends go there: once a step.
    assert len(before) <= 4 * len(within)


def test_control_plans_on_the_host_wait_in_every_owner_layer() -> None:
    within, _ = waits_by_layer(ON_NPU["portable"])
    owners = [layer for layer, kind in enumerate(TYPES) if kind == "full"]
    for step in within:
        assert all(any(wait == f"layer {layer}: cpu" for wait in step) for layer in owners)


def test_a_plan_is_made_once_in_a_group_and_followers_are_fetched_ahead() -> None:
    adapter = Adapter(ON_NPU["kernels"])
    for step in STEPS[:3]:
        adapter.run(make_step(step))
    adapter.kernels.calls.clear()
    adapter.run(make_step(STEPS[3]))
    owner = ["dsa_plan", "dsa_serve_rows", "dsa_serve_rows"]  # own rows, then the follower's misses
    adapter.manager.host_rows.join()
    calls, write = adapter.kernels.calls, "host_write_rows"  # by a thread, at any point
    assert calls.count(write) == len(TYPES)
    assert [call for call in calls if call != write] == [*owner, "dsa_serve_rows"] * 2
    adapter.close()


def test_control_a_kernel_that_leaves_out_a_row_of_the_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    write = CoreKernels._host_write

    def shorter(kernels: Any, host: Any, reports: Any, new_rows: Any, slots: Any) -> None:
        write(kernels, host, reports, new_rows, slots.index_fill(0, torch.tensor([0]), -1))

    expected = upstream(PORTABLE)
    monkeypatch.setattr(CoreKernels, "_host_write", shorter)
    assert differences(run(KERNELS)[0], expected)


@pytest.mark.parametrize("name", ["kernels", "compact kernels"])
def test_control_a_lane_that_nobody_joins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = upstream(PORTABLE)
    monkeypatch.setattr(DeviceLane, "join", lambda *_: None)
    assert differences(run(ON_NPU[name], 12)[0], expected)


def test_rows_that_the_kernels_refuse_are_an_error() -> None:
    adapter = Adapter(KERNELS)
    serve = adapter.kernels._serve

    def refusing(host: Any, reports: Any, *rest: Any) -> None:
        serve(host, reports, *rest)
        reports[0, 1] = 1

    adapter.kernels._serve = refusing
    with pytest.raises(RuntimeError, match=r"left \d+ rows alone"):
        list(adapter.run_all())
    adapter.close()


@pytest.mark.parametrize("name", ["portable", "kernels", "compact kernels"])
def test_a_step_that_failed_half_way_can_run_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: Any) -> None:
        raise OSError("planted")

    expected = upstream(PORTABLE)
    adapter = Adapter(ON_NPU[name])
    for number, step in enumerate(STEPS[:10]):
        made = make_step(step)
        if number in (4, 7):  # attention of layer 2 fails: layer 0's group is done, layer 2 has planned
            with monkeypatch.context() as broken:
                broken.setattr(adapter.impls[2], "_attend", attend)
                with pytest.raises(OSError, match="planted"):
                    adapter.run(made, pad=number % 3)
            adapter.manager.release([])  # before a row changes hands, nothing may be on its way to it
            assert all(not lane._stream.kernels for lane in adapter.runtime._lanes)
        assert differences([adapter.run(made, pad=number % 3)], [expected[number]]) == []
    adapter.close()


# ----------------------------------------------------------------------------------------------- controls


@pytest.mark.parametrize("name", SETUPS)
def test_control_a_wrong_host_row(name: str) -> None:
    expected = upstream(PORTABLE)
    adapter = Adapter(SETUPS[name])
    different = False
    for found, right in zip(adapter.run_all(), expected, strict=True):
        adapter.manager.host_rows.join()
        adapter.caches[1][1].view(-1)[:] += 1.0  # rope parts of layer 1, in host memory
        different |= bool(differences([found], [right]))
    assert different
    adapter.close()


def test_control_a_wait_that_does_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the join of host writes a decode reads rows that aren't there yet."""
    expected, written = upstream(PORTABLE), hold_writes(monkeypatch)
    adapter = Adapter(PORTABLE)
    found = list(adapter.run_all(6))
    written.set()
    adapter.close()
    assert differences(found, expected)


# ---------------------------------------------------------------------------------- for the CPU platform


def recorded(adapter: Adapter, indexed: list[Any]) -> list[dict[str, Any]]:
    """All that attention is given by the layers in all passes of a run."""
    records: list[dict[str, Any]] = []
    keys: list[torch.Tensor] = []

    def watch_layer(layer: int, impl: Any) -> None:
        attend, before, kv = (
            impl._execute_sparse_flash_attention_process,
            impl.indexer_select_pre_process,
            impl.kv,
        )

        def watched_attend(q: torch.Tensor, rope: torch.Tensor, *rest: Any) -> Any:
            out = attend(q, rope, *rest)
            assert adapter.offload is not None
            assert adapter.offload.running is not None
            used = len(adapter.offload.running.causal_ends)
            given = records[-1]["layers"][-1]
            given.update(q=plain(torch.cat([q, rope], -1))[:used].clone(), out=plain(out)[:used].clone())
            if indexed:
                given.update(index_q=indexed[-1][0], weights=indexed[-1][1], key=plain(keys[-1]).squeeze(1))
                indexed.clear()
            return out

        def watched_before(*args: Any, **kwargs: Any) -> Any:
            keys.append(before(*args, **kwargs)[0])
            return keys[-1], None

        class WatchedKV:
            parts = kv.parts

            def append(self, rows: Any, slots: torch.Tensor) -> None:
                copies = torch.cat([plain(part).clone() for part in rows.parts], -1)
                records[-1]["layers"].append({"layer": layer, "rows": copies})
                kv.append(rows, slots)

        impl._execute_sparse_flash_attention_process = watched_attend
        impl.indexer_select_pre_process, impl.kv = watched_before, WatchedKV()

    for layer, impl in enumerate(adapter.impls):
        watch_layer(layer, impl)
    forward: Callable[..., Any] = adapter._forward

    def watched_forward(layers: range, hidden: torch.Tensor, metadata: dict[str, Any], count: int) -> Any:
        assert adapter.offload is not None
        assert adapter.offload.running is not None
        batch = adapter.offload.running.batch
        records.append({"starts": batch.query_start_loc, "lengths": batch.seq_lens, "layers": []})
        records[-1].update(blocks=batch.block_table.clone(), slots=batch.slot_mapping.clone())
        return forward(layers, hidden, metadata, count)

    adapter._forward = watched_forward  # type: ignore[method-assign]
    return records


RECORDED = {
    "portable": changed(PORTABLE, seed=5),
    "kernels": ON_NPU["kernels"],
    "compact": ON_NPU["compact kernels"],
    "drafts": changed(ON_NPU["kernels"], drafts=2, slots=128),
    "bf16": changed(ON_NPU["kernels"], dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", RECORDED)
def test_records_for_the_cpu_platform(name: str, indexed: list[Any]) -> None:
    setup = RECORDED[name]
    adapter = Adapter(setup)
    records = recorded(adapter, indexed)
    for _ in adapter.run_drafting() if setup.drafts else adapter.run_all():
        pass
    adapter.close()
    targets = [record for record in records if len(record["layers"]) == len(TYPES)]
    assert len(records) == len(targets) * (1 + setup.drafts)
    torch.save(records, Path(os.environ["KVOFFLOAD_RECORDS"]) / f"{name}.pt")
