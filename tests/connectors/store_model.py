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
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kvoffload.connectors.ascend_store.planning import key_space
from vllm_kvoffload.connectors.ascend_store.worker import StoreWorker
from vllm_kvoffload.engine import EngineSettings
from vllm_kvoffload.layerwise.buffer_plan import BufferPlan
from vllm_kvoffload.layerwise.pipeline import LayerMemory, LayerPipeline, Part, PipelineLimits
from vllm_kvoffload.runtime import CPURuntime
from vllm_kvoffload.store import StoreError
from vllm_kvoffload.store.local import LocalStore
from vllm_kvoffload.transfer.base import Region

BLOCK = 4
GARBAGE = 1_000_000
VOCABULARY = 50
MASK = (1 << 62) - 1
ROW = 8
OBJECT_PAGES = 4096
DEADLINE_S = 60.0


def chain(before: int, token: int) -> int:
    """A value that represents a token and all tokens before it."""
    return ((before * 6364136223846793005 + token * 1442695040888963407 + 1) ^ (before >> 29)) & MASK


def chains(tokens: Sequence[int]) -> list[int]:
    made, value = [], 17
    for token in tokens:
        value = chain(value, token)
        made.append(value)
    return made


def following(tokens: Sequence[int]) -> int:
    """The token that the model samples."""
    return chains(tokens)[-1] % VOCABULARY


def row(layer: int, value: int) -> int:
    return (value ^ ((layer + 1) * 0x9E3779B97F4A7C15)) & MASK


@dataclass
class Faults:
    """Probabilities of the store's current faults."""

    gone: float = 0.0
    load: float = 0.0
    save: float = 0.0
    lookup: float = 0.0
    publish: float = 0.0
    down: bool = False
    hang: float = 0.0


class FaultyStore:
    """In front of the real one, in the worker."""

    def __init__(self, store: LocalStore, dice: random.Random) -> None:
        self.store, self.dice, self.faults = store, dice, Faults()
        self.name = store.name
        self.hanging: list[tuple[threading.Event, threading.Event]] = []

    def let_go(self) -> None:
        """Copies that hang move their bytes now."""
        while self.hanging:
            go, over = self.hanging.pop()
            go.set()
            assert over.wait(DEADLINE_S)

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
        if self.dice.random() < self.faults.hang:
            go, over = threading.Event(), threading.Event()
            self.hanging.append((go, over))
            assert go.wait(DEADLINE_S)
            try:
                self.store.copy(spans, direction)
            finally:
                over.set()
            return
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


@dataclass
class Work:
    """A request's part of a step: tokens [begin, end). values: of tokens [0, end)."""

    name: str
    blocks: np.ndarray
    begin: int
    end: int
    values: np.ndarray


class Rank:
    """A worker: its caches, its client of the store, its pipeline."""

    def __init__(
        self, plan: BufferPlan, num_blocks: int, store: FaultyStore, limits: PipelineLimits, **options: Any
    ) -> None:  # fmt: skip
        self.plan, self.store = plan, store
        shape = (num_blocks, BLOCK)
        self.main = [np.full(shape, -1, dtype=np.int64) for _ in plan.slots]
        self.keys = [np.full(shape, -1, dtype=np.int64) for _ in plan.slots]
        memory, offset = [], 0
        for position, layer in enumerate(plan.layers):
            parts = []
            for cache in self.caches(position):
                parts.append(Part(cache.ctypes.data, BLOCK * ROW, ROW, offset))
                offset += BLOCK * ROW
            memory.append(LayerMemory(layer.index, tuple(parts)))
        self.object_bytes = offset
        store.store.register([Region(int(c.ctypes.data), c.nbytes) for c in (*self.main, *self.keys)])
        self.runtime = CPURuntime()
        self.pipeline = LayerPipeline(plan, memory, num_blocks, store, self.runtime, limits)
        self.worker = StoreWorker(
            store, pipeline=self.pipeline, block_size=BLOCK, object_bytes=offset, shares=plan.has_reuse,
            **options,
        )  # fmt: skip

    def caches(self, position: int) -> list[np.ndarray]:
        slot = self.plan.slot_of[position]
        return [self.main[slot], self.keys[slot]][: 2 if self.plan.layers[position].indexer else 1]

    def compute(self, position: int, work: Sequence[Work], garbage: set[str], late: bool) -> set[str]:
        """A layer. garbage: requests whose input is; returns those whose output is. late: copies that hang
        end at the worst moment."""
        found: set[str] = set()
        for one in work:
            where = np.arange(one.begin, one.end)
            wanted = -7 if one.name in garbage else rows(position, one.values[one.begin :])
            for cached in self.caches(position):
                cached[one.blocks[where // BLOCK], where % BLOCK] = wanted
        if late:
            self.store.let_go()
        for one in work:
            where = np.arange(one.end)
            wanted = rows(position, one.values)
            for cached in self.caches(position):
                if not np.array_equal(cached[one.blocks[where // BLOCK], where % BLOCK], wanted):
                    found.add(one.name)
        return found


def rows(position: int, values: Any) -> np.ndarray:
    return np.array([row(position, int(value)) for value in values], dtype=np.int64)


_numbers = count()


@lru_cache
def _config(
    checkpoint: Path, policy: str, shared: int, independent: Any, budget: int, threshold: int, drafts: int
) -> Any:
    extra: dict[str, Any] = {"backend": "local", "use_layerwise": True, "local_dram_size_GB": 1.0}
    extra["layerwise_num_shared_buffers"] = shared
    extra["layerwise_independent_layers"] = independent if independent == "all" else list(independent)
    ngram = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 2}
    return EngineArgs(
        model=str(checkpoint), max_model_len=96, max_num_seqs=6, max_num_batched_tokens=budget,
        enforce_eager=True, dtype="float32", tokenizer_mode="hf", block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24, long_prefill_token_threshold=threshold,
        speculative_config=ngram if drafts else None,
        kv_transfer_config={
            "kv_connector": "AscendStoreConnector", "kv_role": "kv_producer",
            "kv_load_failure_policy": policy, "kv_connector_extra_config": extra,
        },
    ).create_engine_config()  # fmt: skip


class Engine:
    """One engine. `wrong` lists violated expectations.

    objects: that the store has room for. drafts: for each step of a request. deadline_s: of a copy.
    """

    def __init__(
        self, checkpoint: Path, seed: int, *, policy: str = "recompute", shared: int = 2,
        independent: Any = (0,), num_blocks: int = 24, objects: int = 60, budget: int = 24,
        threshold: int = 0, drafts: int = 0, ranks: int = 1, deadline_s: float = 30.0,
    ) -> None:  # fmt: skip
        self.dice = random.Random(seed)
        self.wrong: list[str] = []
        self.clients: dict[str, Client] = {}
        config = _config(checkpoint, policy, shared, independent, budget, threshold, drafts)
        self.config = copy.deepcopy(config)
        self.config.kv_transfer_config.engine_id = f"model-{os.getpid()}-{next(_numbers)}"
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.settings = EngineSettings.of(self.config)
        plan = self.settings.buffers
        assert plan is not None
        self.plan, self.num_blocks, self.drafts = plan, num_blocks, drafts
        self._make_ranks(ranks, objects, PipelineLimits(deadline_s=deadline_s))
        self._make_scheduler()

    def _make_ranks(self, count: int, objects: int, limits: PipelineLimits) -> None:
        engine_id = str(self.config.kv_transfer_config.engine_id)
        self.key_space = key_space(self.config, self.settings)
        self.owner = LocalStore(engine_id, objects * OBJECT_PAGES)
        self.losses: list[dict[str, Any]] = [{} for _ in range(count)]
        self._met = threading.Barrier(count)
        self._threads = ThreadPoolExecutor(count)
        self.ranks = []
        for number in range(count):
            store = FaultyStore(
                LocalStore(engine_id) if number else self.owner, random.Random(self.dice.random())
            )
            options = {"keys": self.key_space, "publishes": not number, "agree": self._agree(number)}
            self.ranks.append(Rank(self.plan, self.num_blocks, store, limits, **options))

    def _agree(self, rank: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def agree(lost: dict[str, Any]) -> dict[str, Any]:
            self.losses[rank] = lost
            self._met.wait(DEADLINE_S)
            found = [entry for part in self.losses for entry in part.items()]
            self._met.wait(DEADLINE_S)
            return dict(sorted(found, key=lambda entry: entry[1][1]))

        return agree

    def _make_scheduler(self) -> None:
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=2, dtype=torch.float32)
        groups = [KVCacheGroupSpec([f"model.layers.{n}" for n in range(len(self.plan.layers))], spec)]
        kinds = self.config.scheduler_config.get_scheduler_cls()
        self.scheduler = kinds(
            vllm_config=self.config,
            kv_cache_config=KVCacheConfig(self.num_blocks, [], groups),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK, hash_fn)
        self.contents: dict[bytes, list[int]] = {}  # by block hash: the values of its tokens
        self.requests: dict[str, Request] = {}

    def set_faults(self, faults: Faults) -> None:
        """On every rank."""
        for rank in self.ranks:
            rank.store.faults = faults

    # ------------------------------------------------------------------------------------------- clients

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, None)
        request = Request(name, list(prompt), params, None, block_hasher=self.hasher)
        self.requests[name] = request
        self.clients[name] = Client(list(prompt), max_tokens)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        if not self.clients[name].finish:
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
        if self.drafts:
            names = [name for name in output.num_scheduled_tokens if name in self.live]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [self._guess(n) for n in names]))
        self._check_store()
        if not self.plan.has_reuse:
            self._check_prefix_cache()
        return output

    def _expected(self, client: Client) -> list[int]:
        tokens = list(client.prompt)
        for _ in client.tokens:
            tokens.append(following(tokens))
        return tokens[len(client.prompt) :]

    def _guess(self, name: str) -> list[int]:
        tokens = list(self.requests[name].all_token_ids)
        for _ in range(self.drafts):
            tokens.append(following(tokens) if self.dice.random() < 0.6 else self.dice.randrange(VOCABULARY))
        return tokens[-self.drafts :]

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for rank in self.ranks:
            rank.worker.begin_step(output.kv_connector_metadata)
        names = list(output.num_scheduled_tokens)
        garbage = self._forward([self._work(output, name) for name in names]) if names else set()
        list(self._threads.map(lambda rank: rank.worker.end_step(), self.ranks))
        invalid: set[int] = set()
        for rank in self.ranks:
            rank.worker.release(output.finished_req_ids)
            invalid |= rank.worker.take_invalid()
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: n for n, name in enumerate(names)},
            sampled_token_ids=[self._sample(output, name, name in garbage) for name in names],
            kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
        )

    def _sample(self, output: SchedulerOutput, name: str, garbage: bool) -> list[int]:
        request = self.requests[name]
        if request.num_computed_tokens < request.num_tokens:  # vLLM has advanced it
            return []
        if garbage:
            return [GARBAGE]
        tokens = list(request.all_token_ids)
        for draft in output.scheduled_spec_decode_tokens.get(name, ()):
            tokens.append(following(tokens))
            if tokens[-1] != draft:
                return tokens[request.num_tokens :]
        return [*tokens[request.num_tokens :], following(tokens)]

    def _work(self, output: SchedulerOutput, name: str) -> Work:
        request = self.requests[name]
        end = request.num_computed_tokens
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        drafts = output.scheduled_spec_decode_tokens.get(name, ())
        values = chains([*request.all_token_ids, *drafts][:end])
        for number, block_hash in enumerate(request.block_hashes):
            if (number + 1) * BLOCK <= end:
                self.contents[bytes(block_hash)] = values[number * BLOCK : (number + 1) * BLOCK]
        begin = end - output.num_scheduled_tokens[name]
        return Work(name, np.array(blocks), begin, end, np.array(values, dtype=np.int64))

    def _forward(self, work: Sequence[Work]) -> set[str]:
        """Requests whose tokens are garbage."""
        garbage: set[str] = set()
        for position, layer in enumerate(self.plan.layers):
            for rank in self.ranks:
                rank.pipeline.wait_layer(layer.index)
            late = self.dice.random() < 0.1
            # A rank's results reach the others before the next layer.
            garbage = garbage.union(*[rank.compute(position, work, garbage, late) for rank in self.ranks])
            for rank in self.ranks:
                rank.pipeline.layer_done(layer.index)
        return garbage

    # -------------------------------------------------------------------------------------------- checks

    def _check_store(self) -> None:
        """A block readable under a hash must be that block."""
        service = self.owner._service
        pool, first = service.memory, self.ranks[0]
        generation = self.scheduler.connector._scheduler._generation
        for block_hash, values in self.contents.items():
            stored = service._index._ready.get(self.key_space.key(block_hash, generation))
            if stored is None:
                continue
            raw = pool[stored.offset : stored.offset + first.object_bytes].view(np.int64)
            wanted = [rows(p, values) for p in range(len(self.plan.layers)) for _ in first.caches(p)]
            if not np.array_equal(raw, np.concatenate(wanted)):
                self.wrong.append(f"store: {block_hash.hex()[:8]}, of {values}")

    def _check_prefix_cache(self) -> None:
        """So must a block that vLLM would share with another request."""
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            values = self.contents.get(bytes(block.block_hash[:-4])) if block.block_hash else None
            for rank in self.ranks if values is not None else ():
                for position in range(len(self.plan.layers)):
                    wanted = rows(position, values)
                    if any(not np.array_equal(c[block.block_id], wanted) for c in rank.caches(position)):
                        self.wrong.append(f"prefix cache: block {block.block_id}, layer {position}")
                        return

    def drain(self, steps: int = 300) -> None:
        """Everything ends, and nothing is left behind."""
        self.set_faults(Faults())
        for rank in self.ranks:
            rank.store.let_go()
            rank.pipeline._limits = PipelineLimits()  # a busy machine is no fault
        for _ in range(steps):
            if not self.live:
                break
            self.step()
        self.wrong += [f"{name} hangs" for name in self.live]
        self.step()
        if self.owner._service._index.clients() or any(rank.worker.num_pins for rank in self.ranks):
            self.wrong.append("objects are open")
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if free != self.num_blocks - 1:
            self.wrong.append(f"{free} blocks are free")

    def close(self) -> None:
        self.scheduler.shutdown()
        self._threads.shutdown()
        for rank in self.ranks:
            rank.store.let_go()
            rank.runtime.shutdown()
        for rank in reversed(self.ranks):
            rank.store.store.close()
