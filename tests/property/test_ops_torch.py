"""The torch custom ops: schemas that tell the truth, and compiled code that equals the plain functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.plan_cases import STATE, int32
from vllm_kvoffload import ops
from vllm_kvoffload.ops import _C, torch_ops

KV = torch.ops.kvoffload
ROW_BYTES = 24
TOPK = 8


class Case:
    """Two requests, of one and two query tokens, on rows 2 and 0 of 3, with all deliveries' buffers."""

    def __init__(self, seed: int = 0, *, compact: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random_bytes(*shape: int) -> torch.Tensor:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

        self.topk = torch.randint(-1, 62, (3, TOPK), dtype=torch.int32, generator=generator)
        self.starts, self.lengths, self.rows = int32(0, 1, 3), int32(60, 61), int32(2, 0)
        self.token_partitions = int32(2, 0, 0)
        self.host, self.hot = random_bytes(16, 8, ROW_BYTES), random_bytes(3, 32, ROW_BYTES)
        self.table = torch.arange(16, dtype=torch.int32).view(2, 8)
        self.new_rows = random_bytes(3, ROW_BYTES)
        self.mapping = torch.tensor([59, 123, -1])
        self.residency = ops.Residency.allocate(3, 32)  # full, so that a step evicts
        self.residency.tags.copy_(torch.arange(32, dtype=torch.int32).view(16, 2).T)
        self.out = ops.PlanOut(4, 2, TOPK, 2, compact=compact)
        self.selection = random_bytes(4, TOPK, ROW_BYTES)
        self.gathered = random_bytes(3, 2, TOPK, ROW_BYTES)
        self.status = torch.zeros((3, 2, TOPK + 1), dtype=torch.int32)
        self.counts = int32(-7, -7, -7)

    @property
    def state(self) -> list[torch.Tensor]:
        return [getattr(self.residency, name) for name in STATE]

    @property
    def written(self) -> list[torch.Tensor]:
        """Everything that any op writes."""
        pools = [self.host, self.hot, self.selection, self.gathered, self.status, self.counts]
        return [*pools, *self.state, *self.out.buffers]

    def arguments(self) -> dict[str, tuple[Any, ...]]:
        out, starts, rows = self.out, self.starts, self.rows
        misses = out.miss_slots, out.miss_counts
        return {
            "dsa_plan": (
                *(self.topk, starts, self.lengths, rows),
                *(*self.state, self.residency.policy, *out.buffers),
            ),
            "dsa_serve": (self.host, self.hot, self.table, rows, out.miss_ids, *misses),
            "dsa_serve_compact": (
                *(out.kinds, starts, self.lengths, self.host, self.hot),
                *(self.table, rows, self.new_rows, self.selection),
            ),
            "dsa_install": (self.selection, starts, rows, out.miss_positions, *misses, self.hot),
            "gather_selection": (
                *(self.topk, starts, self.lengths, rows, self.host, self.table, self.new_rows),
                *(self.gathered, self.status, self.counts),
            ),
            "write_rows": (self.hot, self.token_partitions, self.new_rows, out.new_slots[:3]),
            "host_write": (self.host, self.new_rows, self.mapping),
        }

    def plan(self) -> None:
        ops.dsa_plan(
            self.topk, self.starts, self.lengths, self.rows, self.residency, self.out, ops.Workspace()
        )


@pytest.mark.parametrize("name", torch_ops.NAMES)
def test_schema(name: str) -> None:
    """torch's own checks: the schema's mutations, the fake implementation, AOT dispatch with it."""
    case = Case()
    if name != "dsa_plan":
        case.plan()
    torch.library.opcheck(getattr(KV, name).default, case.arguments()[name])


@pytest.mark.parametrize("name", torch_ops.NAMES)
def test_declares_what_it_writes(name: str) -> None:
    """Exactly the arguments declared as written change, each of them in this case."""
    case = Case()
    if name != "dsa_plan":
        case.plan()
    op, arguments = getattr(KV, name).default, case.arguments()[name]
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
    op(*arguments)
    changed = {
        argument.name
        for argument, now, was in zip(op._schema.arguments, arguments, before, strict=True)
        if isinstance(now, torch.Tensor) and not torch.equal(now, was)
    }
    assert changed == {argument.name for argument in op._schema.arguments if argument.is_write}


def test_schema_without_compact_delivery() -> None:
    torch.library.opcheck(KV.dsa_plan.default, Case(compact=False).arguments()["dsa_plan"])


def test_a_schema_that_lies_is_found() -> None:
    """The control: an op that writes what it does not declare fails the check above."""

    @torch.library.custom_op("kvoffload_test::lies", mutates_args=())
    def lies(hot: torch.Tensor) -> None:
        hot.zero_()

    with pytest.raises(torch.testing._internal.optests.generate_tests.OpCheckError):
        torch.library.opcheck(torch.ops.kvoffload_test.lies.default, (torch.ones(3),))


def step(case: Case, run: Callable[..., None]) -> tuple[torch.Tensor, ...]:
    """A step of everything, each op's writes read by another and by torch between and after them."""

    def call(name: str) -> None:
        run(name, *case.arguments()[name])

    call("host_write")
    call("dsa_plan")
    slots = case.out.slots * 2
    call("dsa_serve_compact")
    attended = case.selection.to(torch.int32).sum(-1)
    call("dsa_install")
    call("write_rows")
    refilled = case.hot.to(torch.int32)
    call("dsa_serve")
    call("gather_selection")
    read = case.gathered.to(torch.int32).sum() + case.counts.sum()
    case.hot.add_(1)
    return slots, attended, refilled, read, case.hot.to(torch.int32).sum()


def plain(name: str, *arguments: Any) -> None:
    if name == "dsa_plan":
        inputs, state, policy, buffers = arguments[:4], arguments[4:8], arguments[8], arguments[9:]
        residency, out = _C.Residency(*state, policy), _C.PlanOut(*buffers)
        _C.dsa_plan(*inputs, residency, out, ops.Workspace())
    else:
        getattr(ops, name)(*arguments)


def custom(name: str, *arguments: Any) -> None:
    getattr(KV, name)(*arguments)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    case, eager, expected = Case(5), Case(5), Case(5)
    for _ in range(2):  # the second step hits what the first one left
        want = step(expected, plain)
        for got in (step(eager, custom), compiled(case, custom)):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
        for other in (eager, case):
            for got, should in zip(other.written, expected.written, strict=True):
                assert torch.equal(got, should)
    assert int(expected.out.stats[0]) > 0


def test_registered_only_on_demand() -> None:
    """`vllm_kvoffload.ops` stays light."""
    code = "import torch; from vllm_kvoffload import ops; print(hasattr(torch.ops.kvoffload, 'dsa_plan'))"
    code += "; from vllm_kvoffload.ops import torch_ops; print(hasattr(torch.ops.kvoffload, 'dsa_plan'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "True"]


def test_errors_pass_through() -> None:
    with pytest.raises(ValueError, match=r"slots\[0\]: 99"):
        KV.write_rows(Case().hot, int32(0), torch.zeros((1, ROW_BYTES), dtype=torch.uint8), int32(99))
