"""Requests with a seed whose prompt takes several steps.

vLLM samples for every request of a step, even for one whose prompt isn't complete, and discards that token. So
that it costs no random numbers, vLLM then winds the request's generator back by an offset: a CPU generator has
none, and one such request ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class SeededCPUModelRunner(CPUModelRunner):
    """vLLM's CPU runner, where a discarded token draws nothing from its request's generator.

    A seed then gives the same tokens however the prompt is cut, also when a preempted request comes back.
    """

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # vLLM decorates it
        with self._generators_of_discarded_set_aside():
            return super().sample_tokens(*args, **kwargs)

    @contextmanager
    def _generators_of_discarded_set_aside(self) -> Iterator[None]:
        """Takes them out of the batch: a row without a generator draws from torch's default one.

        The sampler and the rejection sampler read the same dict. Rows don't move before the next step.
        """
        batch = self.input_batch
        generators: dict[int, torch.Generator] = batch.generators
        discarded = self.discard_request_mask.np[: batch.num_reqs]
        aside = {row: generators.pop(row) for row in list(generators) if discarded[row]}
        try:
            yield
        finally:
            generators.update(aside)


class SeededCPUWorker(CPUWorker):
    """vLLM's CPU worker with :class:`SeededCPUModelRunner`."""

    def init_device(self) -> None:
        super().init_device()  # type: ignore[no-untyped-call]
        if type(self.model_runner) is CPUModelRunner:  # else a runner that is written without the fault
            self.model_runner = SeededCPUModelRunner(self.vllm_config, torch.device("cpu"))
