"""Works around three faults of vLLM 0.32 in sampling with a temperature on CPU.

- vLLM samples for every request of a step, even for one whose prompt is incomplete, and discards that
  token. To undo the draw, vLLM rewinds the request's generator by an offset. A CPU generator has none, so
  one request with a seed and a long prompt crashes the engine.
- With drafts, a step without any draft still enters the rejection sampler, whose top-k crashes the engine
  because there is no row.
- With drafts, each request's parameters (temperature, top-k, top-p) are expanded for its drafts into a
  copy of another dtype, which is dropped: drafts are judged by uninitialised memory, or crash the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

EXPAND_KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand_kernel(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    *_: object,
) -> None:
    """Expands a value per request to its tokens: vLLM's kernel in plain torch, for any dtype.

    output: (tokens,). values: (requests,), where `replace_from` is replaced by `replace_to`. ends:
    (requests,), cumulative number of tokens up to and including each request.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def register_expand_kernel() -> None:
    """Replaces the third fault's kernel in this process, which runs a DSA model. Idempotent."""
    if HAS_TRITON:
        return
    from vllm.triton_utils.dispatcher import register_kernels

    register_kernels({EXPAND_KERNEL: expand_kernel})


class SoundCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner without these faults.

    A discarded token draws nothing from its request's generator, so a seed gives the same tokens however
    the prompt is split into chunks, also after a preemption.
    """

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # vLLM decorates it
        with self._generators_of_discarded_set_aside():
            return super().sample_tokens(*args, **kwargs)

    @contextmanager
    def _generators_of_discarded_set_aside(self) -> Iterator[None]:
        """Removes these generators from the batch: a row without one draws from torch's default generator.

        The sampler and the rejection sampler read the same dict. Rows do not move before the next step.
        """
        batch = self.input_batch
        generators: dict[int, torch.Generator] = batch.generators
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        aside = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            yield
        finally:
            generators.update(aside)

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        drafts = spec_decode_metadata is not None and any(spec_decode_metadata.num_draft_tokens)
        return super()._sample(logits, spec_decode_metadata if drafts else None)
