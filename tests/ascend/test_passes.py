"""How the Ascend platform begins target and draft passes, from metadata with the fields of vllm-ascend's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode

from vllm_kvoffload.platforms.ascend.offload import AscendOffload, describe_pass


def metadata_of(lengths: list[int], query_lens: list[int], padding: int = 0) -> Any:
    """A layer's metadata in one pass: requests of these lengths, and as many that are padding."""
    starts = [sum(query_lens[:number]) for number in range(len(query_lens) + 1)]
    tokens = starts[-1]
    return SimpleNamespace(
        query_start_loc=torch.tensor(starts + [tokens] * padding, dtype=torch.int32),
        seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
        block_table=torch.arange(len(lengths) + padding, dtype=torch.int32).unsqueeze(1),
        slot_mapping=torch.arange(tokens + padding, dtype=torch.int32),
        num_actual_tokens=tokens,
        num_input_tokens=tokens + padding,
        block_size=16,
    )


def test_every_query_token_sees_what_comes_before_it_and_itself() -> None:
    made = describe_pass(metadata_of([8, 2, 5], [3, 2, 1], padding=2))
    assert made.causal_ends.tolist() == [6, 7, 8, 1, 2, 5]
    assert made.batch.seq_lens.tolist() == [8, 2, 5]
    assert made.batch.query_start_loc.tolist() == [0, 3, 5, 6]
    assert made.batch.slot_mapping.tolist() == list(range(6))
    assert made.batch.block_table.tolist() == [[0], [1], [2]]


def test_every_draft_pass_has_a_batch_of_its_own() -> None:
    begun: list[tuple[int, tuple[str, ...], list[int]]] = []
    offload: Any = object.__new__(AscendOffload)
    offload.manager = SimpleNamespace(
        begin_draft=lambda batch, index: begun.append((index, batch.req_ids, batch.seq_lens.tolist()))
    )
    lengths = ([8, 5], [9, 6], [10])
    context = SimpleNamespace(
        draft_attn_metadatas=[{"mtp": metadata_of(one, [1] * len(one))} for one in lengths]
    )
    for _ in range(len(lengths)):
        with offload.draft_pass(context, ["a", "b"]):
            assert offload.current().batch.seq_lens.tolist() == lengths[len(begun) - 1]
    assert begun == [(0, ("a", "b"), [8, 5]), (1, ("a", "b"), [9, 6]), (2, ("a",), [10])]


class Graphs:
    """Stands for full graphs of at most two input tokens."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def can_run(self, tokens: int) -> bool:
        return tokens <= 2

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        self.steps.append(tokens)
        yield


@pytest.mark.parametrize(
    ("graphs", "tokens", "mode", "expected", "steps"),
    [
        (Graphs, 2, CUDAGraphMode.FULL, CUDAGraphMode.FULL, [2]),
        (Graphs, 3, CUDAGraphMode.FULL, CUDAGraphMode.NONE, []),
        (lambda: None, 2, CUDAGraphMode.FULL, CUDAGraphMode.NONE, []),
        (Graphs, 2, CUDAGraphMode.PIECEWISE, CUDAGraphMode.PIECEWISE, []),
    ],
    ids=["in a graph", "no graph for it", "no graphs", "piecewise"],
)
def test_a_step_that_no_full_graph_can_run_goes_layer_by_layer(
    graphs: Any, tokens: int, mode: CUDAGraphMode, expected: CUDAGraphMode, steps: list[int]
) -> None:
    begun: list[int] = []
    offload: Any = object.__new__(AscendOffload)
    offload.manager = SimpleNamespace(begin_step=lambda batch: begun.append(batch.num_requests))
    offload.graphs = graphs()
    context = SimpleNamespace(
        attn_metadata={"layer": metadata_of([4] * tokens, [1] * tokens)}, cudagraph_runtime_mode=mode
    )
    with offload.target_pass(context, ["a", "b", "c"]):
        assert context.cudagraph_runtime_mode is expected
        assert offload.current() is not None
    assert begun == [tokens]
    assert (offload.graphs.steps if offload.graphs is not None else []) == steps
    assert offload.running is None
