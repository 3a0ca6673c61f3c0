"""``prefill``: layers that share buffers, layer 0 independent, the embedded store; baseline: no offload.

For each number of buffers N, and ``all`` for nothing shared (every block is saved all the same):

- ``prefill/buffers/N``: prompt tokens per second of the process's CPU time, store cold. Neighbours on the
  machine don't change that, and copies, which overlap with computation where there is a core for them, count
  in full.
- ``prefill/clock/N``: the same by the clock, which shows how well they overlap: on an idle machine only.
- ``prefill/device_bytes/N``: KV memory of a token; ``/plan``: baseline: the buffer plan's figure.
- ``prefill/moved/N``: bytes from and to the store for a prompt token; baseline: the least possible, that is
  new rows once, and prefixes that a layer lacks once a step.

``prefill/warm/3`` and its ``/clock``: the same prompts again, out of the store; baseline: no offload with
nothing cached.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.registry import Row, higher_is_better, lower_is_better
from vllm_kvoffload.demo.checkpoint import MODELS, build_checkpoint

LENGTHS = (900, 600, 1200, 300)
ROUNDS = 4
BUFFERS = (1, 2, 3, 4, "all")
WARM = 3


def prompts(round_number: int) -> list[list[int]]:
    """Returns different tokens in each round, so that nothing is cached."""
    generator = random.Random(f"round {round_number}")
    return [[generator.randrange(32, 2000) for _ in range(length)] for length in LENGTHS]


@dataclass(frozen=True)
class Speed:
    """Prompt tokens per second: of CPU time, and by the clock."""

    cpu: float
    clock: float

    @staticmethod
    def best(speeds: list[Speed]) -> Speed:
        """The best of each: other load on the machine only ever lowers a value."""
        return Speed(max(speed.cpu for speed in speeds), max(speed.clock for speed in speeds))


@dataclass(frozen=True)
class Measured:
    """An engine. device_bytes: of a token; planned_bytes: the same by the plan; moved, least: bytes for a
    prompt token of the cold rounds. 0 without a store."""

    cold: Speed
    warm: Speed
    device_bytes: float
    planned_bytes: float = 0.0
    moved: float = 0.0
    least: float = 0.0


class Engine:
    """An offline engine. shared: buffers, None for no offload."""

    def __init__(self, checkpoint: Path, shared: int | str | None) -> None:
        from vllm import LLM

        extra: dict[str, Any] = {"backend": "local", "use_layerwise": True, "local_dram_size_GB": 1}
        if shared == "all":
            extra["layerwise_independent_layers"] = "all"
        else:
            extra["layerwise_num_shared_buffers"] = shared
        transfer = {
            "kv_connector": "AscendStoreConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": extra,
        }
        self._llm = LLM(
            str(checkpoint),
            max_model_len=4096,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=128 << 20,
            enforce_eager=True,
            enable_prefix_caching=False,
            **({} if shared is None else {"kv_transfer_config": transfer}),
        )

    def round(self, number: int) -> Speed:
        """Prefills the prompts of one round."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        batch = [{"prompt_token_ids": ids} for ids in prompts(number)]
        cpu, clock = time.process_time(), time.perf_counter()
        self._llm.generate(batch, params, use_tqdm=False)  # type: ignore[arg-type]
        cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
        return Speed(sum(LENGTHS) / cpu, sum(LENGTHS) / clock)

    def device_bytes(self) -> float:
        """Bytes of KV memory per token that fits, from the caches as allocated."""
        core: Any = self._llm.llm_engine.engine_core
        caches = core.engine_core.model_executor.driver_worker.worker.model_runner.kv_caches
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches}
        config = self._llm.llm_engine.vllm_config.cache_config
        return sum(storages.values()) / (config.num_gpu_blocks * config.block_size)

    def planned_bytes(self) -> float:
        """The same according to the plan."""
        from vllm_kvoffload.engine import EngineSettings

        plan = EngineSettings.of(self._llm.llm_engine.vllm_config).buffers
        assert plan is not None
        return plan.physical_bytes

    def totals(self) -> tuple[int, int]:
        """Returns the bytes moved so far, and the minimum."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        moved = get_kv_transfer_group().worker.pipeline.stats
        return (
            moved.loaded_bytes + moved.saved_bytes,
            moved.needed_load_bytes + moved.needed_save_bytes,
        )

    def close(self) -> None:
        """Shuts the engine down."""
        from vllm.distributed import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def measure(checkpoint: Path, shared: int | str | None, rounds: int = ROUNDS) -> Measured:
    """Runs an engine: a warm-up round, cold rounds and, with a store, the first prompts again."""
    engine = Engine(checkpoint, shared)
    try:
        engine.round(-1)
        if shared is None:
            cold = Speed.best([engine.round(number) for number in range(rounds)])
            return Measured(cold, cold, engine.device_bytes())
        moved, least = engine.totals()
        cold = Speed.best([engine.round(number) for number in range(rounds)])
        moved, least = (now - before for now, before in zip(engine.totals(), (moved, least), strict=True))
        warm = Speed.best([engine.round(number) for number in range(rounds)])
        tokens = rounds * sum(LENGTHS)
        sizes = engine.device_bytes(), engine.planned_bytes()
        return Measured(cold, warm, *sizes, moved / tokens, least / tokens)
    finally:
        engine.close()


def run() -> Iterator[Row]:
    """All rows; some minutes."""
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("OMP_WAIT_POLICY", "passive"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = build_checkpoint(Path(folder) / "glm", MODELS["glm"])
        before = measure(checkpoint, None, ROUNDS // 2)
        found = {shared: measure(checkpoint, shared) for shared in BUFFERS}
        after = measure(checkpoint, None, ROUNDS // 2)
    plain = Speed.best([before.cold, after.cold])
    for shared, one in found.items():
        yield higher_is_better(f"prefill/buffers/{shared}", one.cold.cpu, "tokens/CPU s", plain.cpu)
        yield higher_is_better(f"prefill/clock/{shared}", one.cold.clock, "tokens/s", plain.clock)
        size = f"prefill/device_bytes/{shared}"
        yield lower_is_better(size, one.device_bytes, "B/token", before.device_bytes)
        yield lower_is_better(f"{size}/plan", one.device_bytes, "B/token", one.planned_bytes)
        yield lower_is_better(f"prefill/moved/{shared}", one.moved, "B/token", one.least)
    warm = found[WARM].warm
    yield higher_is_better(f"prefill/warm/{WARM}", warm.cpu, "tokens/CPU s", plain.cpu)
    yield higher_is_better(f"prefill/warm/{WARM}/clock", warm.clock, "tokens/s", plain.clock)
