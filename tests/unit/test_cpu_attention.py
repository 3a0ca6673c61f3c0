"""The CPU platform's sparse attention, against softmax attention written out token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_kvoffload.platforms.cpu.attention import CPUSparseMLAImpl
from vllm_kvoffload.sparse.step import AttendPart

HEADS, LATENT, ROPE, TOPK, SCALE = 3, 8, 4, 5, 0.3
WIDTH = LATENT + ROPE


class Parts:
    """Main KV whose parts are not in the order of the query tokens, with rows of their own each."""

    def __init__(self, tokens: list[list[int]], rows: list[torch.Tensor], topk_rows: torch.Tensor) -> None:
        self.written: list[Any] = []
        self._tokens, self._rows, self._topk_rows = tokens, rows, topk_rows

    def append(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        self.written.append((rows, slot_mapping))

    def parts(self, topk: torch.Tensor, batch: object) -> Iterator[AttendPart]:
        assert topk.shape == self._topk_rows.shape, "one line for each query token"
        assert batch == "batch"
        for tokens, rows in zip(self._tokens, self._rows, strict=True):
            chosen = torch.tensor(tokens)
            yield AttendPart(chosen, rows, self._topk_rows[chosen])


def attention(kv: Parts | None) -> CPUSparseMLAImpl:
    made = CPUSparseMLAImpl(
        HEADS, WIDTH, SCALE, 1, None, None, "auto", None, "decoder", None,
        topk_indices_buffer=torch.full((16, TOPK), -1, dtype=torch.int32), kv_lora_rank=LATENT,
    )  # fmt: skip
    made.kv = kv
    return made


@pytest.mark.parametrize("split", [False, True], ids=["one query tensor", "latent and rope"])
def test_every_token_attends_to_its_own_rows(split: bool) -> None:
    torch.manual_seed(0)
    tokens = [[4, 1], [0, 3], [2]]
    rows = [torch.randn(7, WIDTH) for _ in tokens]
    q = torch.randn(5, HEADS, WIDTH)
    topk_rows = torch.randint(0, 7, (5, TOPK))
    topk_rows[1, 3:] = -1
    topk_rows[2] = -1
    layer: Any = SimpleNamespace()
    metadata: Any = SimpleNamespace(batch="batch")
    given = (q[..., :LATENT], q[..., LATENT:]) if split else q
    out, lse = attention(Parts(tokens, rows, topk_rows)).forward_mqa(given, torch.empty(0), metadata, layer)
    assert lse is None
    assert out.shape == (5, HEADS, LATENT)
    for part, keys in zip(tokens, rows, strict=True):
        for token in part:
            chosen = [keys[row] for row in topk_rows[token].tolist() if row >= 0]
            for head in range(HEADS):
                weights = [math.exp(SCALE * float(q[token, head] @ key)) for key in chosen]
                expected = sum(
                    (
                        weight / sum(weights) * key[:LATENT]
                        for weight, key in zip(weights, chosen, strict=True)
                    ),
                    torch.zeros(LATENT),
                )
                torch.testing.assert_close(out[token, head], expected, atol=1e-5, rtol=1e-4)


def test_new_rows_are_latent_and_rope_without_padding() -> None:
    kv = Parts([], [], torch.empty(0))
    latent, rope, slots = torch.randn(6, LATENT), torch.randn(6, 1, ROPE), torch.tensor([3, 9, 4, 1])
    arguments = (latent, rope, torch.empty(0), slots, "auto", torch.empty(0))
    attention(None).do_kv_cache_update(*arguments)  # profiling
    attention(kv).do_kv_cache_update(*arguments)
    ((rows, where),) = kv.written
    assert torch.equal(rows, torch.cat([latent[:4], rope[:4, 0]], dim=1))
    assert where is slots
