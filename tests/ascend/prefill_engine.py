"""A prefill engine in miniature on vLLM's and vllm-ascend's own code, with our store, alone or beside decode.

Real are: requests, their hashes and the scheduler's output, the connectors' both halves as vLLM's factory
makes them, our runner's caches, vLLM's order of the hooks, upstream's attention with its calls of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams, forward_context
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm_ascend.core.kv_cache_interface import AscendMLAAttentionSpec

from tests.ascend import adapter_model
from tests.ascend.adapter_model import (
    BLOCK,
    BLOCKS,
    INDEX_DIM,
    LATENT,
    MAX_LEN,
    ROPE,
    TOPK,
    TYPES,
    Adapter,
    Setup,
    make_step,
)
from tests.ascend.runner_parts import make_runner
from vllm_kvoffload.connectors.ascend_store import connector as store_connector
from vllm_kvoffload.platforms.ascend.connectors import name_modules

ROLE = "kv_producer"
CONFIG = {
    "model_type": "glm_moe_dsa", "num_hidden_layers": len(TYPES), "indexer_types": list(TYPES),
    "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "index_topk": TOPK, "index_head_dim": INDEX_DIM,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
_engine_numbers = itertools.count()


def cache_specs(types: tuple[str, ...] = TYPES, quantised: bool = False) -> dict[str, Any]:
    """vllm-ascend's, of each layer."""
    specs = {}
    for layer, kind in enumerate(types):
        dims = (LATENT, ROPE, INDEX_DIM if kind == "full" else 0)
        specs[f"model.layers.{layer}.self_attn.attn"] = AscendMLAAttentionSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=sum(dims), sparse_head_dim=dims, dtype=torch.float32,
            cache_sparse_li_c8=quantised and kind == "full",
        )  # fmt: skip
    return specs


def cache_config(types: tuple[str, ...] = TYPES, quantised: bool = False) -> KVCacheConfig:
    """Of the model's layers, as vLLM makes it of the specs."""
    specs = cache_specs(types, quantised)
    tensors = [KVCacheTensor(size=spec.page_size_bytes * BLOCKS, shared_by=[n]) for n, spec in specs.items()]
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs))
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=[group])


def store_options(shared: int | None, independent: Any) -> dict[str, Any]:
    """`kv_connector_extra_config` of the store. shared: buffers, None for as many as layers."""
    options = {
        "backend": "local", "use_layerwise": True, "layerwise_independent_layers": independent,
        "local_dram_size_GB": 0.01,
    }  # fmt: skip
    return options if shared is None else {**options, "layerwise_num_shared_buffers": shared}


def engine_config(transfer: KVTransferConfig, drafts: int = 0) -> Any:
    """As much of an engine's configuration as runner and connectors look at."""
    name_modules(transfer)
    speculative = SimpleNamespace(method="mtp", num_speculative_tokens=drafts) if drafts else None
    return SimpleNamespace(
        additional_config={}, kv_transfer_config=transfer, speculative_config=speculative, quant_config=None,
        instance_id=f"test-{next(_engine_numbers)}",
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**CONFIG), dtype=torch.float32, max_model_len=MAX_LEN, model="m",
            revision=None, enforce_eager=True, enable_sleep_mode=False,
        ),
        cache_config=SimpleNamespace(
            block_size=BLOCK, prefix_caching_hash_algo="sha256", cache_dtype="auto"
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=2, disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(
            data_parallel_index=0, data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1,
            prefill_context_parallel_size=1, decode_context_parallel_size=1,
        ),
    )  # fmt: skip


def store_transfer(shared: int | None, independent: Any) -> KVTransferConfig:
    """The store alone."""
    return KVTransferConfig(
        kv_connector="AscendStoreConnector", kv_role=ROLE, engine_id=f"prefill-{next(_engine_numbers)}",
        kv_connector_extra_config=store_options(shared, independent),
    )  # fmt: skip


def joint_transfer(shared: int, independent: Any) -> KVTransferConfig:
    """The store and decode, the store first on purpose."""
    store = {
        "kv_connector": "AscendStoreConnector", "kv_role": ROLE,
        "kv_connector_extra_config": store_options(shared, independent),
    }  # fmt: skip
    remote = {
        "kv_connector": "SfaRemoteD2HConnector", "kv_role": ROLE, "kv_port": 20050,
        "kv_connector_extra_config": {"transfer_backend": "memfabric"},
    }  # fmt: skip
    return KVTransferConfig(
        kv_connector="MultiConnector", kv_role=ROLE, engine_id=f"prefill-{next(_engine_numbers)}",
        kv_connector_extra_config={"connectors": [store, remote]},
    )  # fmt: skip


class PrefillEngine:
    """One rank with its scheduler. Requests "a" and "b" have blocks of their own (`make_step`)."""

    def __init__(self, monkeypatch: Any, transfer: KVTransferConfig, drafts: int = 0) -> None:
        self._patch, self.drafts = monkeypatch, drafts
        group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None)
        monkeypatch.setattr(store_connector, "get_tp_group", lambda: group)
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.BlockHash(b"0" * 32), raising=False)
        setup = Setup(drafts=drafts)
        self.config, caches = engine_config(transfer, drafts), cache_config(setup.types)
        self.adapter = Adapter(setup)
        runner = make_runner(self.config, caches)
        self.layers = self.config.compilation_config.static_forward_context
        for layer, impl in zip(self.layers.values(), self.adapter.impls, strict=True):
            layer.impl = impl
            impl.is_kv_producer = True
        self.entries = runner.initialize_kv_cache_tensors(caches)
        self.adapter.caches = [layer.kv_cache for layer in self.layers.values()]
        made = [
            KVConnectorFactory.create_connector(self.config, role, caches)
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)
        ]
        self.worker: Any = made[0]
        self.scheduler: Any = made[1]
        self.worker.register_kv_caches(self.entries)
        self.requests: dict[str, Request] = {}
        self._new: set[str] = set()
        self._given: dict[str, int] = {}
        self._computed: dict[str, int] = {}
        self._finished: set[str] = set()
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)

    def add(self, name: str, tokens: list[int], req_id: str = "", params: Any = None) -> int:
        """A request comes, and is given its blocks; tokens that the store has of it."""
        sampling = SamplingParams(max_tokens=1000, extra_args={"kv_transfer_params": params})
        request = Request(req_id or name, tokens, sampling, None, block_hasher=self._hasher)
        found, later = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert not later
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(([],)), found)
        self.requests[name] = request
        self._new.add(name)
        self._given[name], self._computed[name] = 0, found
        return int(found)

    def finish(self, name: str) -> None:
        """A request is over."""
        request = self.requests.pop(name)
        self.scheduler.request_finished_all_groups(request, ([],))
        self._finished.add(request.request_id)

    def output(self, queries: dict[str, int]) -> SchedulerOutput:
        """Builds vLLM's scheduler output for a step with the given number of tokens per request."""
        new, cached = [], CachedRequestData.make_empty()
        drafted: dict[str, list[int]] = {}
        for name, count in queries.items():
            request, computed = self.requests[name], self._computed[name]
            drafts = self.drafts if computed and count == 1 + self.drafts else 0
            if drafts:
                drafted[request.request_id] = [0] * drafts
            while request.num_tokens < computed + count - drafts:
                request.append_output_token_ids(100 + request.num_tokens)
            table = make_step({name: (computed, count)})["blocks"][0].tolist()
            end = -(-(computed + count) // BLOCK)
            blocks = table[self._given[name] : end]
            self._given[name] = max(end, self._given[name])
            if name in self._new:
                self._new.remove(name)
                new.append(
                    NewRequestData(
                        request.request_id, request.prompt_token_ids, [], request.sampling_params, None,
                        (blocks,), computed, None,
                    )
                )  # fmt: skip
                continue
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append((blocks,) if blocks else None)
            cached.num_computed_tokens.append(computed)
        finished, self._finished = self._finished, set()
        scheduled = {self.requests[name].request_id: count for name, count in queries.items()}
        return SchedulerOutput(
            scheduled_new_reqs=new, scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(queries.values()), scheduled_spec_decode_tokens=drafted,
            scheduled_encoder_inputs={}, num_common_prefix_blocks=[0], finished_req_ids=finished,
            free_encoder_mm_hashes=[],
        )  # fmt: skip

    def step(self, queries: dict[str, int], pad: int = 0, rejected: Sequence[int] = ()) -> list[torch.Tensor]:
        """Returns outputs of all layers; lost requests are in `lost`. rejected: drafts per request."""
        output = self.output(queries)
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        made = make_step({name: (self._computed[name], count) for name, count in queries.items()})
        self._patch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.worker)
        context = SimpleNamespace(attn_metadata={"layers": object()})
        self._patch.setattr(forward_context, "_forward_context", context)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        drafting = bool(self.drafts)
        with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output, drafting) as result:
            outputs = self.adapter.run(made, pad)
        if drafting:
            outputs += self.adapter.draft(made, rejected, pad)
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        self.lost = result.invalid_block_ids
        for name, count, gone in zip(queries, queries.values(), rejected or [0] * len(queries), strict=True):
            self._computed[name] += count - gone
        return outputs

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def step_queries(number: int) -> dict[str, int]:
    """How much of each request a step of the model's program computes."""
    return {name: queries for name, (_, queries) in adapter_model.STEPS[number].items()}


def prompt(name: str) -> list[int]:
    """The prompt of a request of that program: its chunks but the decodes."""
    return [ord(name) * 1000 + n for n in range({"a": 63, "b": 25}[name])]
