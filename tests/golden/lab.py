"""Runs workloads with and without offload: one engine at a time, used again where it can be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.golden.engine import BeforeStep, EngineUnderTest, Outcome, Trace, worst_difference
from tests.golden.workloads import WORKLOADS
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

TINY = "glm-tiny"
OFFLOAD: dict[str, Any] = {"topk_buffer_size": 128}
"""Options of a test that doesn't care: the hot pool holds twice the top-k of the tiny models."""


@dataclass(frozen=True)
class Result:
    """Outputs of a workload's requests, and the scheduler's actions."""

    outcomes: list[Outcome]
    trace: Trace


class Lab:
    """Owner of the checkpoints, of the engine that runs, and of the results without offload.

    A model is a name of MODELS, with "+PATTERN" appended for a variant of other layers, and "-bf16" for
    bfloat16.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engine: EngineUnderTest | None = None
        self._key = ""
        self._references: dict[tuple[str, str], Result] = {}

    def checkpoint(self, model: str) -> Path:
        """The model's checkpoint, built at its first use."""
        name, _, dtype = model.partition("-bf16")
        assert not dtype, model
        plain, _, pattern = name.partition("+")
        spec = MODELS[plain]
        if pattern:
            spec = replace(spec, layer_pattern=pattern)
        if model != name:
            spec = replace(spec, dtype="bfloat16")
        return build_checkpoint(self._directory / model, spec)

    def engine(
        self, model: str = TINY, offload: dict[str, Any] | None = None, **options: Any
    ) -> EngineUnderTest:
        """The engine with these options. It stays alive until another one is asked for."""
        key = _key(model, offload, options)
        if self._engine is None or self._key != key:
            self.close()
            extra: dict[str, Any] = {"dtype": "bfloat16"} if model.endswith("-bf16") else {}
            if not model.startswith(TINY):
                extra["kv_cache_memory_bytes"] = 96 << 20
            self._engine = EngineUnderTest(self.checkpoint(model), offload, **{**extra, **options})
            self._key = key
        return self._engine

    def run(
        self,
        workload: str,
        model: str = TINY,
        offload: dict[str, Any] | None = None,
        before_step: BeforeStep | None = None,
        **options: Any,
    ) -> Result:
        """Runs a named workload. An engine on which it failed is not used again."""
        described = WORKLOADS[workload]
        engine = self.engine(model, offload, **{**described.options, **options})
        try:
            outcomes = engine.run(described.jobs, before_step)
        except BaseException:
            self.close()
            raise
        return Result(outcomes, engine.trace)

    def reference(self, workload: str, model: str = TINY, **options: Any) -> Result:
        """The result of a named workload without offload, remembered."""
        merged = {**WORKLOADS[workload].options, **options}
        key = _key(model, None, merged)
        if (workload, key) not in self._references:
            # The engine is up: also run what else can run on it, so that it need not start again.
            alike = [name for name, other in WORKLOADS.items() if other.options == merged]
            for name in alike if model == TINY and not options else [workload]:
                self._references[name, key] = self.run(name, model, **options)
        return self._references[workload, key]

    def compare(
        self, workload: str, model: str = TINY, offload: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Result, float]:
        """A workload with offload, and its worst log-probability difference from the run without.

        Both must have had the same schedule: only then equal results are to be expected to the bit.
        """
        reference = self.reference(workload, model, **options)
        result = self.run(workload, model, OFFLOAD if offload is None else offload, **options)
        assert result.trace.schedule == reference.trace.schedule
        assert result.trace.preempted == reference.trace.preempted
        return result, worst_difference(result.outcomes, reference.outcomes)

    def compare_all(
        self, workloads: Sequence[str], model: str, offload: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, tuple[Result, float]]:
        """`compare` for several workloads on two engines in all."""
        for workload in workloads:
            self.reference(workload, model, **options)
        return {workload: self.compare(workload, model, offload, **options) for workload in workloads}

    def close(self) -> None:
        """Shuts the running engine down."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def _key(model: str, offload: dict[str, Any] | None, options: dict[str, Any]) -> str:
    return json.dumps([model, offload, options], sort_keys=True)
