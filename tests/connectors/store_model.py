"""A prefill engine without a model: vLLM's real scheduler, our connector's two halves and the pipeline, over
modelled memory.

A row's value says of which layer it is, and of which tokens up to its own. What is computed over a row that
is not the right one is garbage from that layer on, and so is the token that comes of it. So every row that is
published, every block in vLLM's prefix cache and every token that a client sees tells whether all was right.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvoffload.connectors.ascend_store.planning import buffer_plan, key_space
from vllm_kvoffload.connectors.ascend_store.worker import StoreWorker
from vllm_kvoffload.layerwise.pipeline import LayerMemory, LayerPipeline, Limits, Part
from vllm_kvoffload.runtime import CpuRuntime
from vllm_kvoffload.store import StoreError
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.transfer.base import Region

BLOCK = 4
GARBAGE = 1_000_000
VOCABULARY = 50
MASK = (1 << 62) - 1
ROW = 8
OBJECT_PAGES = 4096


def chain(before: int, token: int) -> int:
    """What stands for a token and all before it."""
    return ((before * 6364136223846793005 + token * 1442695040888963407 + 1) ^ (before >> 29)) & MASK


def chains(tokens: Sequence[int]) -> list[int]:
    made, value = [], 17
    for token in tokens:
        value = chain(value, token)
        made.append(value)
    return made


def row(layer: int, value: int) -> int:
    return (value ^ ((layer + 1) * 0x9E3779B97F4A7C15)) & MASK


@dataclass
class Faults:
    """What the store does wrong now: chances."""

    gone: float = 0.0
    load: float = 0.0
    save: float = 0.0
    lookup: float = 0.0
    publish: float = 0.0
    down: bool = False


class FaultyStore:
    """In front of the real one, in the worker."""

    def __init__(self, store: LocalStore, dice: random.Random) -> None:
        self.store, self.dice, self.faults = store, dice, Faults()
        self.name = store.name

    def _check(self) -> None:
        if self.faults.down:
            raise StoreError("down")

    def open_read(self, keys, lease_s):
        self._check()
        found = self.store.open_read(keys, lease_s)
        lost = [pin for pin in found if pin is not None and self.dice.random() < self.faults.gone]
        self.store.close_read(lost)
        return [None if pin in lost else pin for pin in found]

    def close_read(self, objects):
        self.store.close_read(objects)

    def open_write(self, keys, nbytes):
        self._check()
        return self.store.open_write(keys, nbytes)

    def finish_write(self, objects, ok):
        down = self.faults.down
        good = [fine and not down and self.dice.random() >= self.faults.publish for fine in ok]
        done = self.store.finish_write(objects, good)
        self._check()
        return done

    def copy(self, spans, direction):
        self._check()
        chance = self.faults.load if direction == "load" else self.faults.save
        pages = {int(address) // OBJECT_PAGES for address in spans.object_address}
        if any(self.dice.random() < chance for _ in pages):
            raise StoreError("failed")
        self.store.copy(spans, direction)


@dataclass
class Client:
    """A request as its client sees it."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


_numbers = count()


@lru_cache
def _config(
    checkpoint: Path, policy: str, shared: int | None, independent: Any, budget: int, threshold: int
) -> Any:
    extra: dict[str, Any] = {"backend": "local", "use_layerwise": True, "local_dram_size_GB": 1.0}
    extra["layerwise_num_shared_buffers"] = shared
    extra["layerwise_independent_layers"] = independent if independent == "all" else list(independent)
    return EngineArgs(
        model=str(checkpoint), max_model_len=96, max_num_seqs=6, max_num_batched_tokens=budget,
        enforce_eager=True, dtype="float32", tokenizer_mode="hf", block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24, long_prefill_token_threshold=threshold,
        kv_transfer_config={
            "kv_connector": "AscendStoreConnector", "kv_role": "kv_producer",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": extra,
        },
    ).create_engine_config()  # fmt: skip


class Engine:
    """One engine. `wrong` lists what was not as it must be."""

    def __init__(
        self, checkpoint: Path, seed: int, *, policy: str = "recompute", shared: int | None = 2,
        independent: Any = (0,), num_blocks: int = 24, objects: int = 60, budget: int = 24,
        threshold: int = 0,
    ) -> None:  # fmt: skip
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.clients: dict[str, Client] = {}
        self.config = copy.deepcopy(_config(checkpoint, policy, shared, independent, budget, threshold))
        self.config.kv_transfer_config.engine_id = f"model-{os.getpid()}-{next(_numbers)}"
        self.block_size = self.config.cache_config.block_size
        self.config.cache_config.num_gpu_blocks = num_blocks
        plan = buffer_plan(self.config)
        assert plan is not None
        self.plan, self.num_blocks = plan, num_blocks
        self._make_worker(objects)
        self._make_scheduler()

    def _make_worker(self, objects: int) -> None:
        plan, size = self.plan, self.block_size
        shape = (self.num_blocks, size)
        self.main = [np.full(shape, -1, dtype=np.int64) for _ in plan.slots]
        self.keys = [np.full(shape, -1, dtype=np.int64) for _ in plan.slots]
        memory, offset = [], 0
        for position, layer in enumerate(plan.layers):
            parts = []
            for cache in self.caches(position):
                parts.append(Part(cache.ctypes.data, size * ROW, ROW, offset))
                offset += size * ROW
            memory.append(LayerMemory(layer.index, tuple(parts)))
        self.memory, self.object_bytes = memory, offset
        engine_id = str(self.config.kv_transfer_config.engine_id)
        self.owner = LocalStore(engine_id, objects * OBJECT_PAGES)
        self.owner.register([Region(int(c.ctypes.data), c.nbytes) for c in (*self.main, *self.keys)])
        self.store = FaultyStore(self.owner, self.dice)
        self.runtime = CpuRuntime()
        self.pipeline = LayerPipeline(plan, memory, self.num_blocks, self.store, self.runtime, Limits())
        self.key_space = key_space(self.config)
        self.worker = StoreWorker(
            self.store, self.key_space, self.pipeline, block_size=size, object_bytes=offset, publishes=True,
            shares=plan.has_reuse, agree=lambda lost: lost,
        )  # fmt: skip

    def _make_scheduler(self) -> None:
        spec = MLAAttentionSpec(block_size=self.block_size, num_kv_heads=1, head_size=2, dtype=torch.float32)
        groups = [KVCacheGroupSpec([f"model.layers.{n}" for n in range(len(self.plan.layers))], spec)]
        kinds = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = kinds(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(self.num_blocks, [], groups),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_size,
            hash_block_size=self.block_size,
        )
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(self.block_size, hash_fn)
        self.contents: dict[bytes, list[int]] = {}  # by block hash: the chains of its tokens
        self.requests: dict[str, Request] = {}
        self.values: dict[str, list[int]] = {}

    def caches(self, position: int) -> list[np.ndarray]:
        slot = self.plan.slot_of[position]
        return [self.main[slot], self.keys[slot]][: 2 if self.plan.layers[position].indexer else 1]

    # ------------------------------------------------------------------------------------------- clients

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher)
        self.requests[name] = request
        self.clients[name] = Client(list(prompt), max_tokens)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.clients[name].finish = "abort"
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @property
    def live(self) -> list[str]:
        return [name for name, client in self.clients.items() if not client.finish]

    # --------------------------------------------------------------------------------------------- steps

    def step(self, abort_in_flight: Sequence[str] = ()) -> SchedulerOutput:
        output = self.scheduler.schedule()
        made = self._execute(output)
        for name in abort_in_flight:
            self.abort(name)
        answers = self.scheduler.update_from_output(output, made)
        for answer in (one for outputs in answers.values() for one in outputs.outputs):
            client = self.clients[answer.request_id]
            client.tokens += answer.new_token_ids
            if answer.finish_reason is not None:
                client.finish = str(answer.finish_reason)
            expected = self._expected(client)
            if client.tokens != expected:
                self.wrong.append(f"client of {answer.request_id}: {client.tokens}, expected {expected}")
        self._check_store()
        if not self.plan.has_reuse:
            self._check_prefix_cache()
        return output

    def _expected(self, client: Client) -> list[int]:
        tokens = list(client.prompt)
        for _ in client.tokens:
            tokens.append(chains(tokens)[-1] % VOCABULARY)
        return tokens[len(client.prompt) :]

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        metadata = output.kv_connector_metadata
        self.worker.begin_step(metadata)
        names = list(output.num_scheduled_tokens)
        if names:
            garbage = self._forward(output, names)
        self.worker.end_step()
        self.worker.release(output.finished_req_ids)
        sampled = []
        for name in names:
            request = self.requests[name]
            end = request.num_computed_tokens  # vLLM has advanced it
            if end < request.num_tokens:
                sampled.append([])
            elif name in garbage:
                sampled.append([GARBAGE])
            else:
                sampled.append([chains(request.all_token_ids)[-1] % VOCABULARY])
        invalid = self.worker.take_invalid()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: n for n, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )

    def _forward(self, output: SchedulerOutput, names: Sequence[str]) -> set[str]:
        size, garbage = self.block_size, set()
        work = []
        for name in names:
            request = self.requests[name]
            end = request.num_computed_tokens
            begin = end - output.num_scheduled_tokens[name]
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
            values = chains(request.all_token_ids[:end])
            self.values[name] = values
            for number, block_hash in enumerate(request.block_hashes):
                if (number + 1) * size <= end:
                    self.contents[bytes(block_hash)] = values[number * size : (number + 1) * size]
            work.append((name, np.array(blocks), begin, end, np.array(values, dtype=np.int64)))
        for position, layer in enumerate(self.plan.layers):
            self.pipeline.wait_layer(layer.index)
            for cache in self.caches(position):
                for name, blocks, begin, end, values in work:
                    where = np.arange(begin, end)
                    wanted = self._rows(position, values[begin:end])
                    cache[blocks[where // size], where % size] = -7 if name in garbage else wanted
            for cache in self.caches(position):
                for name, blocks, _, end, values in work:
                    where = np.arange(end)
                    found = cache[blocks[where // size], where % size]
                    if not np.array_equal(found, self._rows(position, values[:end])):
                        garbage.add(name)
            self.pipeline.layer_done(layer.index)
        return garbage

    def _rows(self, position: int, values: Any) -> np.ndarray:
        return np.array([row(position, int(value)) for value in values], dtype=np.int64)

    # -------------------------------------------------------------------------------------------- checks

    def _check_store(self) -> None:
        """What can be read under a block's hash is that block."""
        service = self.owner._service
        pool = service.memory
        for block_hash, values in self.contents.items():
            stored = service._index._ready.get(self.key_space.key(block_hash))
            if stored is None:
                continue
            raw = pool[stored.offset : stored.offset + self.object_bytes].view(np.int64)
            wanted = np.concatenate(
                [self._rows(p, values) for p in range(len(self.memory)) for _ in self.caches(p)]
            )
            if not np.array_equal(raw, wanted):
                self.wrong.append(f"store: {block_hash.hex()[:8]}, of {values}")

    def _check_prefix_cache(self) -> None:
        """So is what vLLM would give to another request."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None:
                continue
            values = self.contents.get(bytes(block.block_hash[:-4]))
            if values is None:
                continue
            for position in range(len(self.memory)):
                for cache in self.caches(position):
                    if not np.array_equal(cache[block.block_id], self._rows(position, values)):
                        self.wrong.append(f"prefix cache: block {block.block_id}, layer {position}")
                        return

    def drain(self, steps: int = 300) -> None:
        """Everything ends, and nothing is left behind."""
        self.store.faults = Faults()
        for _ in range(steps):
            if not self.live:
                break
            self.step()
        for name in self.live:
            self.wrong.append(f"{name} hangs")
        self.step()
        if self.worker.num_pins or self.owner._service._index.clients():
            self.wrong.append(f"open: {self.worker.num_pins}")
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.num_blocks - 1:
            self.wrong.append(f"{free} blocks are free")

    def close(self) -> None:
        self.scheduler.shutdown()
        self.runtime.shutdown()
        self.owner.close()
