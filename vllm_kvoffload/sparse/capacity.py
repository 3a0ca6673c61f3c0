"""The capacity formula of the sparse decode offload (I-8): how many KV blocks fit on device and host.

The device holds one indexer block per KV block and, at a fixed cost, the hot pools, their residency
metadata, the plan's output and the prefill buffers. The host holds one main block per KV block. The smaller
of the two limits sets the number of blocks. The scheduler's blocks, the pool sizes and `kvoffload size` all
come from this formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.policies import DEFAULT_PLACEMENT, PLACEMENT_TABLE
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import SECTION, SparseOffloadConfig
from vllm_kvoffload.settings.values import GIB

_TAG_BYTES = 4
_AGE_BYTES = 1
_HAND_BYTES = 1
_HIGH_BYTES = 4
_INDEX_BYTES = 4
_PLAN_STATS_BYTES = 48  # six int64 counters
_CHUNKS = 8  # the published plan lists a query token's misses in this many chunks


class CapacityError(ConfigError):
    """The budgets can't hold even one request of max_model_len."""


@dataclass(frozen=True)
class CapacityInputs:
    """All inputs of the formula.

    device_bytes: A, the device budget for all KV. dram_bytes: host memory for the main KV.
    max_num_seqs: R, partitions of the hot pools. topk_buffer_size: P, slots of a partition. ways: W, slots of
    an id. placement: whether they are in one set.
    prefill_buffers: layer buffers of max_model_len tokens that prefill streams through; 0 with
        `keep_device_kv_cache`.
    keep_device: the whole main KV stays on the device as well (`keep_device_kv_cache`).
    delivery: as in SparseOffloadConfig. published_plan: compact delivery uses the published plan.
    """

    geometry: KVGeometry
    block_size: int
    device_bytes: int
    dram_bytes: int
    max_num_seqs: int
    max_model_len: int
    topk_buffer_size: int
    ways: int = 16
    placement: str = DEFAULT_PLACEMENT
    prefill_buffers: int = 0
    keep_device: bool = False
    delivery: str = "in_place"
    published_plan: bool = False

    @classmethod
    def of(
        cls,
        geometry: KVGeometry,
        offload: SparseOffloadConfig,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device_bytes: int,
        prefill_buffers: int,
    ) -> CapacityInputs:
        """Takes the offload's options from `offload`; the keyword arguments describe the engine."""
        return cls(
            geometry=geometry,
            block_size=block_size,
            device_bytes=device_bytes,
            dram_bytes=offload.dram_bytes,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            topk_buffer_size=offload.topk_buffer_size,
            ways=offload.ways,
            placement=offload.placement,
            prefill_buffers=prefill_buffers,
            keep_device=offload.keep_device_kv_cache,
            delivery=offload.delivery,
            published_plan=offload.plans_as_published,
        )

    @property
    def hot_bytes(self) -> int:
        """The hot pools: R partitions of P slots in each layer with a main KV cache."""
        geometry = self.geometry
        return self.max_num_seqs * self.topk_buffer_size * geometry.main_row_bytes * geometry.num_layers

    @property
    def residency_bytes(self) -> int:
        """Tag and age of every slot, hand of every set, highest length of every row, for each index group."""
        sets = self.topk_buffer_size // PLACEMENT_TABLE[self.placement].set_ways(self.ways)
        partition = self.topk_buffer_size * (_TAG_BYTES + _AGE_BYTES) + sets * _HAND_BYTES + _HIGH_BYTES
        return len(self.geometry.groups) * self.max_num_seqs * partition

    @property
    def plan_bytes(self) -> int:
        """Buffers that a delivery keeps beside the pools.

        In-place: one plan output for all groups (slots of the top-k indices, misses and their slots).
        Compact: two plan outputs, which also hold each row's location, and two selection buffers.
        """
        queries = 1 + self.geometry.num_speculative_tokens
        tokens = self.max_num_seqs * queries
        topk_ids = tokens * self.geometry.index_topk
        if self.delivery == "in_place":
            return self._own_plan_bytes(3 * topk_ids, tokens)
        selection = topk_ids * self.geometry.main_row_bytes
        if not self.published_plan:
            return 2 * (self._own_plan_bytes(6 * topk_ids, tokens) + selection)
        chunk = -(-self.geometry.index_topk // _CHUNKS)
        records = tokens * _CHUNKS * chunk
        entries = 2 * topk_ids + tokens + 6 * records + tokens * _CHUNKS + self.max_num_seqs
        return 2 * (_INDEX_BYTES * entries + selection)

    def _own_plan_bytes(self, ids: int, tokens: int) -> int:
        return _INDEX_BYTES * (ids + tokens + self.max_num_seqs) + _PLAN_STATS_BYTES

    @property
    def staging_bytes(self) -> int:
        """The prefill buffers. Each holds one layer's main KV of max_model_len tokens, in whole blocks."""
        tokens = self.blocks_for(self.max_model_len) * self.block_size
        return self.prefill_buffers * tokens * self.geometry.main_row_bytes

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that don't depend on the number of blocks."""
        return self.hot_bytes + self.residency_bytes + self.plan_bytes + self.staging_bytes

    @property
    def indexer_bytes_per_block(self) -> int:
        """The indexer keys of one block, over all layers that have them."""
        return self.block_size * self.geometry.indexer_bytes_per_token

    @property
    def host_bytes_per_block(self) -> int:
        """The main KV of one block, over all layers."""
        return self.block_size * self.geometry.main_bytes_per_token

    @property
    def device_bytes_per_block(self) -> int:
        """Device bytes of one block."""
        return self.indexer_bytes_per_block + (self.host_bytes_per_block if self.keep_device else 0)

    def blocks_for(self, tokens: int) -> int:
        """Number of whole blocks for this many tokens of one request."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True)
class Budget:
    """Bytes needed on the device (for KV in all) and in host memory."""

    device_bytes: int
    dram_bytes: int

    @property
    def dram_gib(self) -> int:
        """The smallest sufficient `dram_size_per_dp_GB`."""
        return -(-self.dram_bytes // GIB)


@dataclass(frozen=True)
class CapacityPlan:
    """The formula's result. All `_bytes` are totals, except the `_per_block` ones.

    num_blocks: KV blocks including vLLM's null block, which tokens and baseline_tokens exclude.
    limit: the budget that sets num_blocks. baseline_*: for the same device budget without offload.
    """

    hot_bytes: int
    residency_bytes: int
    plan_bytes: int
    staging_bytes: int
    indexer_bytes_per_block: int
    device_bytes_per_block: int
    host_bytes_per_block: int
    block_size: int
    num_blocks: int
    limit: Literal["device", "dram"]
    device_limited_blocks: int
    dram_limited_blocks: int
    baseline_blocks: int
    asymptotic_factor: float

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that don't depend on the number of blocks."""
        return self.hot_bytes + self.residency_bytes + self.plan_bytes + self.staging_bytes

    @property
    def device_bytes(self) -> int:
        """Device bytes in use, at most the budget."""
        return self.fixed_bytes + self.num_blocks * self.device_bytes_per_block

    @property
    def host_bytes(self) -> int:
        """Size of the host pool, at most the budget."""
        return self.num_blocks * self.host_bytes_per_block

    @property
    def logical_bytes(self) -> int:
        """Bytes to report so that vLLM's division by the page bytes of all caches yields num_blocks."""
        return self.num_blocks * (self.indexer_bytes_per_block + self.host_bytes_per_block)

    @property
    def tokens(self) -> int:
        """Tokens that requests can hold."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def baseline_tokens(self) -> int:
        """Tokens that requests could hold without offload."""
        return max(self.baseline_blocks - 1, 0) * self.block_size

    @property
    def factor(self) -> float:
        """Ratio of tokens with offload to tokens without; infinite if none fit without."""
        return self.tokens / self.baseline_tokens if self.baseline_tokens else math.inf


def plan_capacity(inputs: CapacityInputs) -> CapacityPlan:
    """Applies the formula. Raises CapacityError if not even one request of max_model_len fits."""
    _check_inputs(inputs)
    device_limited = max(inputs.device_bytes - inputs.fixed_bytes, 0) // inputs.device_bytes_per_block
    dram_limited = inputs.dram_bytes // inputs.host_bytes_per_block
    least = inputs.blocks_for(inputs.max_model_len) + 1  # vLLM keeps block 0 as its null block
    if device_limited < least:
        raise _device_too_small(inputs)
    if dram_limited < least:
        raise _dram_too_small(inputs, dram_limited)
    return CapacityPlan(
        hot_bytes=inputs.hot_bytes,
        residency_bytes=inputs.residency_bytes,
        plan_bytes=inputs.plan_bytes,
        staging_bytes=inputs.staging_bytes,
        indexer_bytes_per_block=inputs.indexer_bytes_per_block,
        device_bytes_per_block=inputs.device_bytes_per_block,
        host_bytes_per_block=inputs.host_bytes_per_block,
        block_size=inputs.block_size,
        num_blocks=min(device_limited, dram_limited),
        limit="device" if device_limited <= dram_limited else "dram",
        device_limited_blocks=device_limited,
        dram_limited_blocks=dram_limited,
        baseline_blocks=inputs.device_bytes // (inputs.indexer_bytes_per_block + inputs.host_bytes_per_block),
        asymptotic_factor=inputs.geometry.offload_factor,
    )


def required_budget(inputs: CapacityInputs, tokens: int) -> Budget:
    """The smallest budgets that hold `tokens` tokens. The budgets in `inputs` are ignored."""
    blocks = inputs.blocks_for(tokens) + 1
    return Budget(
        device_bytes=inputs.fixed_bytes + blocks * inputs.device_bytes_per_block,
        dram_bytes=blocks * inputs.host_bytes_per_block,
    )


def _check_inputs(inputs: CapacityInputs) -> None:
    for key in ("block_size", "max_num_seqs", "max_model_len", "topk_buffer_size", "ways"):
        if getattr(inputs, key) < 1:
            raise CapacityError(key, getattr(inputs, key), "must be at least 1", f"set {key} to 1 or more")
    if inputs.topk_buffer_size % inputs.ways:
        rule, fix = f"must be divisible by ways {inputs.ways}", "see valid_buffer_sizes"
        raise CapacityError(f"{SECTION}.topk_buffer_size", inputs.topk_buffer_size, rule, fix)


def _device_too_small(inputs: CapacityInputs) -> CapacityError:
    need = required_budget(inputs, inputs.max_model_len).device_bytes
    rule = (
        f"one request of max_model_len {inputs.max_model_len} needs {need} bytes ({_gib(need)}): hot pools "
        f"{_gib(inputs.hot_bytes)} ({SECTION}.topk_buffer_size {inputs.topk_buffer_size} * max_num_seqs "
        f"{inputs.max_num_seqs}), metadata {_gib(inputs.residency_bytes + inputs.plan_bytes)}, "
        f"prefill buffers {_gib(inputs.staging_bytes)} and {_gib(need - inputs.fixed_bytes)} of KV blocks"
    )
    fixes = [f"raise --gpu-memory-utilization or --kv-cache-memory-bytes to give {need} bytes to KV"]
    for name, field in (
        (f"{SECTION}.topk_buffer_size", "topk_buffer_size"),
        ("max_num_seqs", "max_num_seqs"),
        ("max_model_len", "max_model_len"),
    ):
        value = _largest(inputs, field)
        if value:
            fixes.append(f"lower {name} to {value}")
    return CapacityError("kv_cache_memory_bytes", inputs.device_bytes, rule, ", or ".join(fixes))


def _dram_too_small(inputs: CapacityInputs, blocks: int) -> CapacityError:
    need = required_budget(inputs, inputs.max_model_len)
    length = (blocks - 1) * inputs.block_size
    rule = f"one request of max_model_len {inputs.max_model_len} needs {need.dram_bytes} bytes of host memory"
    fix = f"set {SECTION}.dram_size_per_dp_GB to {need.dram_gib}"
    if length > 0:
        fix += f", or lower max_model_len to {length}"
    return CapacityError(f"{SECTION}.dram_size_per_dp_GB", inputs.dram_bytes // GIB, rule, fix)


def _largest(inputs: CapacityInputs, field: str) -> int:
    """The largest valid value of `field` below its current one that fits on the device; 0 if none."""

    def fits(value: int) -> bool:
        change: dict[str, Any] = {field: value}
        trial = replace(inputs, **change)
        return required_budget(trial, trial.max_model_len).device_bytes <= inputs.device_bytes

    if field == "topk_buffer_size":
        least = (1 + inputs.geometry.num_speculative_tokens) * inputs.geometry.index_topk
        size = inputs.topk_buffer_size // 2
        while size >= max(least, inputs.block_size, inputs.ways):
            if fits(size):
                return size
            size //= 2
        return 0
    low, high = 0, int(getattr(inputs, field)) - 1
    while low < high:  # needs grow with either field, so bisection is exact
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gib(number: int) -> str:
    return f"{number / GIB:.2f} GiB"
