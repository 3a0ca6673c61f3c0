"""Parts of the Ascend platform that need no vllm-ascend: runtime, host memory, ways to move rows."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ascend.kernel_stand_ins import LISTS, PLAN, CoreKernels
from tests.ascend.simulated_npu import SimulatedNPU, SimulatedStream, scatter_nd_update, sparse_copy
from vllm_kvoffload import ops
from vllm_kvoffload.layerwise.buffer_plan import BufferOptions, CacheLayer, plan_buffers
from vllm_kvoffload.layerwise.pipeline import (
    LayerMemory,
    LayerPipeline,
    Part,
    PipelineLimits,
    PipelineStep,
    Rows,
)
from vllm_kvoffload.platforms.ascend import memfabric_kernels
from vllm_kvoffload.platforms.ascend import offload as offload_module
from vllm_kvoffload.platforms.ascend.host_memory import MemfabricMemory, SegmentMemory
from vllm_kvoffload.platforms.ascend.kernels import DeviceInts, KernelRows, load_kernels
from vllm_kvoffload.platforms.ascend.offload import open_parts
from vllm_kvoffload.platforms.ascend.operators import KERNELS_ENV
from vllm_kvoffload.platforms.ascend.rows import PortableRows, SparseCopyRows, SplitRows
from vllm_kvoffload.runtime import CPURuntime, TaskFailedError, WaitTimeoutError
from vllm_kvoffload.runtime.base import Runtime
from vllm_kvoffload.runtime.npu import NPURuntime
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SparseOffloadConfig
from vllm_kvoffload.sparse.host_pool import HostPool, HostPoolLayout

LAYOUT = HostPoolLayout(2, 4, 16, (("nope", 64), ("rope", 16)))
ONE_RANK = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
BASICS = ((64, 16), torch.float32, torch.device("cpu", 0), scatter_nd_update)


@pytest.fixture
def npu() -> SimulatedNPU:
    return SimulatedNPU()


@pytest.fixture
def runtime(npu: SimulatedNPU) -> Iterator[NPURuntime]:
    before = threading.active_count()
    made = NPURuntime(npu, 0, CPURuntime(), default_deadline_s=5.0)
    yield made
    made.shutdown()
    assert threading.active_count() == before


def test_a_side_stream_waits_for_the_compute_stream(npu: SimulatedNPU, runtime: NPURuntime) -> None:
    assert isinstance(runtime, Runtime)
    ran = threading.Event()
    npu.busy = True
    stream = runtime.stream("d2h")
    stream.wait_event(runtime.current_stream().record("new rows"))
    stream.submit(ran.set)
    done = stream.record()
    assert not ran.wait(0.1)
    assert not done.query()
    npu.busy = False
    done.wait(5.0)
    assert ran.is_set()
    runtime.synchronize()


def test_a_device_that_never_gets_there_ends_a_wait(npu: SimulatedNPU, runtime: NPURuntime) -> None:
    npu.busy = True
    event = runtime.current_stream().record("step")
    begin = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="step"):
        event.wait(0.1)
    assert time.monotonic() - begin < 2
    stream = runtime.stream("h2d")
    stream.wait_event(event, 0.1)
    with pytest.raises(TaskFailedError, match="WaitTimeoutError"):
        stream.record().wait(5.0)
    stream.recover()
    npu.busy = False
    stream.synchronize()


def test_a_rank_that_saves_nothing_waits_for_the_device_all_the_same(
    npu: SimulatedNPU, runtime: NPURuntime
) -> None:
    """Only rank 0 saves. On the others, too, a buffer is loaded anew only when its layer is computed."""
    moved: list[str] = []
    first = threading.Event()

    class Recorder:
        def copy(self, _spans: Any, direction: str) -> None:
            moved.append(direction)
            first.set()

    layers = [CacheLayer(number, "main", 8) for number in range(2)]
    plan = plan_buffers(layers, BufferOptions(1, ()))
    memory = [LayerMemory(number, (Part(4096, 32, 8, 32 * number),)) for number in range(2)]
    pipeline = LayerPipeline(plan, memory, 4, Recorder(), runtime, PipelineLimits(deadline_s=20.0))  # type: ignore[arg-type]
    pipeline.begin(PipelineStep(("r",), shared_loads=Rows.of([(1 << 20, 1, 0, 4, 0)])))
    pipeline.wait_layer(0)
    assert first.wait(20)
    npu.busy = True
    pipeline.layer_done(0)
    time.sleep(0.2)
    assert moved == ["load"]
    npu.busy = False
    pipeline.wait_layer(1)
    assert moved == ["load", "load"]
    pipeline.layer_done(1)
    assert pipeline.finish() == {}


def test_tasks_run_with_their_stream_current(npu: SimulatedNPU, runtime: NPURuntime) -> None:
    entered: list[Any] = []
    real = npu.stream
    npu.stream = lambda stream: entered.append(stream) or real(stream)  # type: ignore[method-assign,func-returns-value]
    for name in ("d2h", "h2d", "d2h"):
        runtime.stream(name).submit(lambda: None)
        runtime.stream(name).synchronize()
    assert entered[0] is entered[2]
    assert entered[0] is not entered[1]


def test_a_lane_runs_behind_the_compute_stream_and_before_who_joins_it(
    npu: SimulatedNPU, runtime: NPURuntime
) -> None:
    lane, ran = runtime.lane(), []
    first = lane.submit(npu.launch, lambda: ran.append(1))
    lane.submit(npu.launch, lambda: ran.append(2))
    assert npu.current_stream() is npu.main
    assert ran == []  # queued, but not waited for yet
    lane.join(first)
    assert ran == [1]
    runtime.synchronize()
    assert ran == [1, 2]


def test_a_lane_and_the_compute_stream_wait_for_each_other_on_the_device(
    npu: SimulatedNPU, runtime: NPURuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []

    def wait_event(stream: SimulatedStream, event: Any) -> None:
        names = ["compute" if s is npu.main else "lane" for s in (stream, event.stream)]
        order.append(" waits for ".join(names))

    monkeypatch.setattr(SimulatedStream, "wait_event", wait_event)
    lane = runtime.lane()
    event = lane.submit(order.append, "launched")
    lane.join(event)
    assert order == ["lane waits for compute", "launched", "compute waits for lane"]


def test_a_shutdown_lets_lanes_finish_or_says_that_they_are_stuck(npu: SimulatedNPU) -> None:
    runtime, ran = NPURuntime(npu, 0, CPURuntime(), default_deadline_s=5.0), []
    runtime.lane().submit(npu.launch, lambda: ran.append(1))
    npu.busy = True
    with pytest.raises(WaitTimeoutError, match="lane"):
        runtime.synchronize(0.05)
    npu.busy = False
    runtime.shutdown()
    assert ran == [1]


# ----------------------------------------------------------------------------------------------------- memory


class Offload(SimpleNamespace):
    """memfabric_hybrid.offload; addresses that are not aligned."""

    def __init__(self, code: int = 0) -> None:
        super().__init__(
            Scene=SimpleNamespace(SHARED=1),
            OffloadConfig=lambda: SimpleNamespace(store_url=""),
            sparse_copy=sparse_copy,
        )
        self.code, self.ended = code, False

    def initialize(self, config: Any) -> int:
        self.config = config
        return self.code

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        del pin_memory
        return torch.zeros(shape[0], dtype=dtype)

    def uninitialize(self) -> None:
        self.ended = True


def test_memfabric_memory_is_aligned_and_seen_by_every_rank() -> None:
    offload = Offload()
    owner = MemfabricMemory(offload, LAYOUT, ONE_RANK, 3, lambda: None)
    assert (offload.config.device_id, offload.config.rank_id, offload.config.world_size) == (3, 0, 1)
    bases = [layer.addresses[0] for layer in owner.layers]
    assert all(address % (2 << 20) == 0 for layer in owner.layers for address in layer.addresses)
    other = Offload()
    told = iter([offload.config.store_url, bases])
    second = SimpleNamespace(rank_in_group=1, world_size=2, broadcast_object=lambda _, src: next(told))  # noqa: ARG005
    reader = MemfabricMemory(other, LAYOUT, second, 4, lambda: None)
    assert other.config.store_url == offload.config.store_url
    assert other.config.alloc_size == 0
    assert other.config.reserve_size == offload.config.alloc_size >= LAYOUT.total_bytes
    owner.layers[1].parts[1].fill_(7)
    assert (reader.layers[1].parts[1] == 7).all()
    assert not reader.layers[1].parts[0].any()
    owner.close()
    assert offload.ended


def test_pools_of_one_machine_do_not_meet() -> None:
    first, second = Offload(), Offload()
    for offload in (first, second):
        MemfabricMemory(offload, LAYOUT, ONE_RANK, 0, lambda: None)
    assert first.config.store_url != second.config.store_url


@pytest.mark.parametrize("offset", [0, 1 << 40])
def test_kernels_get_the_devices_address_of_memfabrics_memory(
    offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is another on A2. Nothing is known of memory that has none: then its own address must do."""
    offload = Offload()
    offload.get_dva = lambda address: address + offset if offset else 0
    memory = MemfabricMemory(offload, LAYOUT, ONE_RANK, 0, lambda: None)
    for layer in memory.layers:
        assert layer.addresses == tuple(part.data_ptr() + offset for part in layer.parts)
    assert ("no device address" in caplog.text) == (offset == 0)


def test_long_reads_are_cut_to_what_memfabrics_kernel_can_hold() -> None:
    """Latent and rope of 128 tokens are more than that in the models that are served."""
    widths, blocks = (1024, 128), 40
    parts = [torch.randint(0, 255, (blocks, 128, width), dtype=torch.uint8) for width in widths]
    host = SplitRows(parts, [part.data_ptr() for part in parts])
    moves = SparseCopyRows(widths, torch.bfloat16, torch.device("cpu", 0), scatter_nd_update, sparse_copy)
    order, count = torch.randperm(blocks, dtype=torch.int32), 39 * 128 + 79
    target = moves.zeros(blocks * 128)
    moves.host_read(host, order, count, target)
    for part, rows in zip(parts, target.parts, strict=True):
        assert torch.equal(rows[:count], part[order.long()].flatten(0, 1)[:count])
        assert not rows[count:].any()


def test_memfabric_that_does_not_start_says_so() -> None:
    with pytest.raises(ConfigError, match=r"returned 5.*huge pages"):
        MemfabricMemory(Offload(code=5), LAYOUT, ONE_RANK, 0, lambda: None)


def test_a_segment_is_mapped_and_unmapped() -> None:
    mapped: dict[int, int] = {}

    def register(address: int, nbytes: int) -> int:
        mapped[address] = nbytes
        return address + (1 << 40)

    memory = SegmentMemory(HostPool.create(LAYOUT), register, mapped.pop)
    for layer in memory.layers:
        for part, address in zip(layer.parts, layer.addresses, strict=True):
            assert address == part.data_ptr() + (1 << 40)
    assert mapped
    memory.close()
    assert not mapped


def parts(
    monkeypatch: pytest.MonkeyPatch,
    *,
    memfabric: bool,
    kernels: bool,
    pulls: bool = False,
    problem: ConfigError | None = None,
) -> Any:
    def load_offload() -> Any:
        if problem is not None:
            raise problem
        if not memfabric:
            raise ImportError("No module named 'memfabric_hybrid'")
        return Offload()

    built = CoreKernels(SimulatedNPU())
    monkeypatch.setattr(offload_module, "load_offload", load_offload)
    monkeypatch.setattr(offload_module, "load_kernels", lambda: built if kernels else None)
    config = SparseOffloadConfig(enabled=True, dram_size_per_dp_GB=1)
    return open_parts(
        LAYOUT, config, ONE_RANK, None, device=BASICS[2], dtype=BASICS[1], scatter=BASICS[3], pulls=pulls
    )


@pytest.mark.parametrize(
    ("memfabric", "kernels", "memory", "movement"),
    [
        (True, True, MemfabricMemory, SparseCopyRows),
        (True, False, MemfabricMemory, SparseCopyRows),
        (False, True, SegmentMemory, KernelRows),
        (False, False, SegmentMemory, PortableRows),
    ],
)
def test_the_best_that_there_is(
    memfabric: bool,
    kernels: bool,
    memory: type,
    movement: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    found, row_ops, built = parts(monkeypatch, memfabric=memfabric, kernels=kernels)
    assert type(found) is memory
    assert type(row_ops) is movement
    assert (built is not None) == kernels
    said = " ".join(record.getMessage() for record in caplog.records)
    assert ("plans are made on the host" in said) == (memfabric and not kernels)
    assert ("rows are moved by torch, slowly" in said) == (not memfabric and not kernels)
    found.close()


def test_decode_can_not_do_without_memfabric(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"transfer_backend='memfabric'.*install MemFabric"):
        parts(monkeypatch, memfabric=False, kernels=True, pulls=True)


def without_kernels(
    monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, *, size: int | None
) -> ConfigError | None:
    """What is said of a package in this folder, whose library has this size; None: there is no file."""
    (folder / "lib").mkdir()
    (folder / "__init__.py").touch()
    if size is not None:
        (folder / "lib" / memfabric_kernels.LIBRARY).write_bytes(bytes(size))
    spec = SimpleNamespace(origin=str(folder / "__init__.py"))
    monkeypatch.setattr(memfabric_kernels, "find_spec", lambda _: spec)
    monkeypatch.setattr(memfabric_kernels.metadata, "version", lambda _: version)
    return memfabric_kernels.kernels_problem()


def test_memfabric_has_no_kernels_for_a2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = SimpleNamespace(__device_type__="A2")
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend._build_info", info)
    line = str(without_kernels(monkeypatch, tmp_path, "1.3.0", size=0))
    assert "there are none for A2. Fix: let decode run on A3" in line
    info.__device_type__ = "A3"
    assert "mfcli kernel install" in str(memfabric_kernels.kernels_problem())


@pytest.mark.parametrize(
    ("version", "size", "fix"),
    [
        ("1.3.0", 0, "Fix: run mfcli kernel install"),
        ("1.2.1", None, "Fix: run mfcli kernel install"),
        ("1.2.0", None, "Fix: run pip install --no-deps memfabric-hybrid==1.3.0"),
        ("1.2.0", 9, "Fix: run pip install --no-deps memfabric-hybrid==1.3.0"),  # which doesn't look there
        ("1.3.0", 9, ""),
    ],
)
def test_memfabric_without_its_kernels(
    version: str, size: int | None, fix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    monkeypatch.delenv(memfabric_kernels.EXTEND, raising=False)
    problem = without_kernels(monkeypatch, tmp_path, version, size=size)
    if not fix:
        assert problem is None
        return
    assert problem is not None
    assert f"memfabric_hybrid='{version}': its copy kernels" in str(problem)
    assert fix in str(problem)
    assert "mfcli kernel install" in str(problem)
    with pytest.raises(ConfigError, match="mfcli kernel install"):
        parts(monkeypatch, memfabric=True, kernels=True, pulls=True, problem=problem)
    for kernels, movement in ((True, KernelRows), (False, PortableRows)):
        memory, row_ops, _ = parts(monkeypatch, memfabric=True, kernels=kernels, problem=problem)
        assert isinstance(memory, SegmentMemory)
        assert type(row_ops) is movement
        memory.close()
    assert "the host pool is a shared-memory segment" in caplog.text
    if version == "1.2.0":
        (tmp_path / "built").mkdir()
        (tmp_path / "built" / memfabric_kernels.LIBRARY).write_text("built")
        monkeypatch.setenv(memfabric_kernels.EXTEND, str(tmp_path / "built"))
        assert memfabric_kernels.kernels_problem() is None


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv(KERNELS_ENV, raising=False)
    assert load_kernels() is None
    for path, says in ((tmp_path / "none.so", "no such file"), (tmp_path / "text.so", "does not load")):
        (tmp_path / "text.so").write_text("no library")
        monkeypatch.setenv(KERNELS_ENV, str(path))
        with pytest.raises(ConfigError, match=f"{KERNELS_ENV}.*{says}"):
            load_kernels()


# ----------------------------------------------------------------------------------------------- moving rows


def row_ops(movement: str) -> PortableRows:
    if movement == "sparse_copy":
        return SparseCopyRows(*BASICS, sparse_copy)
    if movement == "kernels":
        return KernelRows(*BASICS, CoreKernels(SimulatedNPU()))
    return PortableRows(*BASICS)


def host_rows() -> SplitRows:
    made = [torch.zeros((4, 16, n), dtype=torch.uint8).random_(1, 255) for n in (64, 16)]
    return SplitRows(made, [part.data_ptr() for part in made])


@pytest.mark.parametrize("movement", ["portable", "sparse_copy", "kernels"])
def test_rows_arrive(movement: str) -> None:
    moves, host = row_ops(movement), host_rows()
    before = [part.clone() for part in host.parts]
    new = SplitRows([torch.zeros((3, n), dtype=torch.uint8).random_(1, 255) for n in (64, 16)])
    moves.host_write(host, new, torch.tensor([5, -1, 40]))
    for part, old, fresh in zip(host.parts, before, new.parts, strict=True):
        old.view(64, -1)[[5, 40]] = fresh[[0, 2]]
        assert torch.equal(part, old)
    buffer = moves.zeros(32)
    moves.host_read(host, torch.tensor([2, 0], dtype=torch.int32), 20, buffer)
    for part, rows in zip(host.parts, buffer.parts, strict=True):
        assert torch.equal(rows[:20], part[[2, 0]].flatten(0, 1)[:20])
        assert not rows[20:].any()
    plan = ops.PlanOut(2, 2, 16, 1)
    plan.miss_counts.copy_(torch.tensor([2, 1]))
    plan.miss_ids[:, :2] = torch.tensor([[17, 3], [1, 9]])
    plan.miss_slots[:, :2] = torch.tensor([[6, 30], [2, 4]])
    tables, hot = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32), moves.zeros(3, 32)
    moved = moves.serve(host, hot, tables, torch.tensor([2, -1], dtype=torch.int32), plan)
    assert moved == 2 * 80
    for part, pool in zip(host.parts, hot.parts, strict=True):
        assert torch.equal(pool[2, 6], part[1, 1])
        assert torch.equal(pool[2, 30], part[3, 3])
        assert int(pool.any(-1).sum()) == 2
    moves.write_rows(hot, torch.tensor([0, 1, 1]), new, torch.tensor([7, -1, 8]))
    for pool, fresh in zip(hot.parts, new.parts, strict=True):
        assert torch.equal(pool[0, 7], fresh[0])
        assert torch.equal(pool[1, 8], fresh[2])


def test_addresses_are_checked_before_a_copy() -> None:
    moves, host = row_ops("sparse_copy"), host_rows()
    new = SplitRows([torch.zeros((1, n), dtype=torch.uint8) for n in (64, 16)])
    for writer in (moves, row_ops("kernels")):
        with pytest.raises(ValueError, match="slot_mapping: 64"):
            writer.host_write(host, new, torch.tensor([64]))
    with pytest.raises(ValueError, match="blocks: 4"):
        moves.host_read(host, torch.tensor([4]), 3, moves.zeros(16))
    plan = ops.PlanOut(1, 1, 16, 1)
    plan.miss_counts[0], plan.miss_ids[0, 0], plan.miss_slots[0, 0] = 1, 5, 0
    with pytest.raises(ValueError, match="host row"):
        moves.serve(host, moves.zeros(1, 32), torch.tensor([[9]]), torch.tensor([0]), plan)


def test_a_failing_copy_is_an_error() -> None:
    moves = SparseCopyRows(*BASICS, lambda *_: 7)
    new = SplitRows([torch.zeros((1, n), dtype=torch.uint8) for n in (64, 16)])
    with pytest.raises(RuntimeError, match="sparse_copy returned 7"):
        moves.host_write(host_rows(), new, torch.tensor([0]))


# ---------------------------------------------------------------------------------------------- on the device


def test_the_kernels_stand_in_takes_what_the_binding_takes() -> None:
    source = (Path(__file__).parents[2] / "csrc" / "ascendc" / "torch" / "ops.cpp").read_text()
    declared = "".join(re.findall(r'"([^"]*)"', source[source.index("TORCH_LIBRARY_FRAGMENT") :]))
    fronts = {
        "dsa_serve_rows": ["host", "host_blocks", "block_size", "hot", "new_rows"],
        "dsa_serve_compact_rows": ["host", "host_blocks", "block_size", "hot", "new_rows", "selection"],
        "dsa_install_rows": ["selection", "hot"],
        "host_write_rows": ["host", "host_blocks", "block_size", "new_rows"],
    }
    for name, front in fronts.items():
        (arguments,) = re.findall(rf"{name}\((.*?)\) ->", declared.replace("(a!)", ""))
        assert [part.split()[-1] for part in arguments.split(",")] == front + LISTS[name]
    plan = [argument.name for argument in torch.ops.kvoffload.dsa_plan.default._schema.arguments]
    assert plan == [*PLAN[:8], "policy", *PLAN[8:]]


def test_integers_go_over_in_one_transfer_to_where_they_always_are(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    real = torch.Tensor.copy_

    def copy(target: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        moved.append(source.numel())
        return real(target, source, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    ints = DeviceInts([3, 40, 8, 20], torch.device("cpu"))
    empty = torch.tensor([], dtype=torch.int32)
    steps = [
        [torch.arange(3), torch.arange(40).view(4, 10), empty, torch.tensor([7])],
        [torch.arange(2), torch.arange(10).view(1, 10), torch.arange(8), torch.arange(20)],
    ]
    places = []
    for given in steps:
        found = ints.put(given)
        for sent, got in zip(given, found, strict=True):
            assert got.dtype == torch.int32
            assert got.tolist() == sent.tolist()
            assert got.data_ptr() % 64 == 0 or not got.numel()
        places.append([got.data_ptr() for got in found if got is not found[2]])
    assert places[0] == places[1]
    assert moved == [16 + 48 + 16 + 1, 16 + 48 + 16 + 20]
