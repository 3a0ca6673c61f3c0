"""Options of the sparse decode offload: `sparse_kv_offload_config` of `--additional-config`.

Two stages: `parse_sparse_offload` checks the JSON alone (types, ranges, misspelt keys), and
`validate_sparse_offload` checks the result against the model and the engine. Neither imports torch or vLLM,
so the platform, the CLI and the tests apply the same rules.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from vllm_kvoffload.policies import (
    DEFAULT_PLACEMENT,
    DEFAULT_POLICY,
    PLACEMENT_TABLE,
    PLACEMENTS,
    POLICIES,
)
from vllm_kvoffload.settings.connectors import REMOTE_D2H
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.values import (
    GIB,
    check_bool,
    check_int,
    check_new_path,
    check_one_of,
    refuse_unknown_keys,
)

SECTION = "sparse_kv_offload_config"
"""Key of `--additional-config` that contains all options of the sparse decode offload."""

DELIVERIES = ("in_place", "compact")
WAYS = (16, 32)
DRAFT_METHODS = ("mtp", "ngram")
"""Draft methods without KV caches unknown to the offload."""
UNQUANTISED_CACHE_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


@dataclass(frozen=True)
class SparseOffloadConfig:
    """Options of the sparse decode offload, as given under `sparse_kv_offload_config`.

    enabled: turn the offload on for this engine.
    topk_buffer_size: P, slots (tokens) of one request's hot pool, in each layer: as given, or rounded down to
        a power of two of sets.
    given_buffer_size: as given, where that is another size; else 0.
    dram_size_per_dp_GB: host memory for the main KV of one DP rank, in GiB; its TP ranks share it.
    keep_device_kv_cache: debugging only: keep the whole main KV on the device as well.
    ways: W, slots of the hot pool that a token id can be in.
    placement: "one_set": these are one set of W; "two_sets": they are two sets of W / 2.
    policy: replacement policy of these slots.
    delivery: location of the top-k rows for attention: "in_place" in the hot pool itself, "compact" (slower,
        for comparison with published behaviour) in a copy from which the pool is refilled afterwards.
    prefill_buffers: layer buffers that prefill streams through; a decode engine uses them to recompute.
    trace_path: new file to record top-k ids in (see `kvoffload trace`); "" for none. A DP rank n other than 0
        adds ".dpn" to the name.
    """

    enabled: bool = False
    topk_buffer_size: int = 4096
    dram_size_per_dp_GB: int = 128
    keep_device_kv_cache: bool = False
    ways: int = 16
    placement: str = DEFAULT_PLACEMENT
    policy: str = DEFAULT_POLICY
    delivery: str = "in_place"
    prefill_buffers: int = 2
    trace_path: str = ""
    given_buffer_size: int = 0

    @property
    def rounded(self) -> str:
        """A line for the log if the pools are smaller than asked for, else ""."""
        if not self.given_buffer_size:
            return ""
        key, size = _name("topk_buffer_size"), self.topk_buffer_size
        reason = f"the nearest size below whose sets of {self.ways} ways are a power of two"
        return f"{key} {self.given_buffer_size}: hot pools have {size} slots, {reason}"

    @property
    def dram_bytes(self) -> int:
        """Host memory for the main KV of one DP rank, in bytes."""
        return self.dram_size_per_dp_GB * GIB

    @property
    def plans_as_published(self) -> bool:
        """Whether compact delivery uses the published plan: set-associative FIFO with 16 ways in one set."""
        published = self.policy == "fifo" and self.ways == 16 and self.placement == "one_set"
        return self.delivery == "compact" and published

    @property
    def num_sets(self) -> int:
        """S, sets of a partition: a power of two once `validate_sparse_offload` has accepted the options."""
        return self.topk_buffer_size // PLACEMENT_TABLE[self.placement].set_ways(self.ways)


@dataclass(frozen=True)
class EngineFacts:
    """Engine facts used by the rules, from the VllmConfig (or, in the CLI, from options).

    index_topk: of the text config, None for a model without a sparse indexer.
    kv_role: of the kv-transfer config, None for an engine without one (an aggregated engine).
    kv_cache_dtype: vLLM's `cache_dtype` string.
    micro_batches: whether vLLM divides steps into micro-batches (DBO).
    num_kv_cache_groups: None while vLLM has not made them yet.
    draft_method: of the speculative config, None without one. kv_connector: its name, None without one.
    scheduler_cls: as the user set it, None for vLLM's own.
    """

    index_topk: int | None
    block_size: int
    max_num_seqs: int
    has_compress_ratios: bool = False
    num_speculative_tokens: int = 0
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    dsa_context_parallel: bool = False
    micro_batches: bool = False
    uses_v2_runner: bool = False
    kv_cache_dtype: str = "auto"
    kv_role: str | None = None
    sleep_mode: bool = False
    num_kv_cache_groups: int | None = None
    draft_method: str | None = None
    kv_connector: str | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    enforce_eager: bool = True
    scheduler_cls: object = None

    @property
    def layer_and_context_parallelism(self) -> tuple[tuple[str, int], ...]:
        """Option name and size of each kind of parallelism that divides layers or contexts over ranks."""
        return (
            ("pipeline_parallel_size", self.pipeline_parallel_size),
            ("prefill_context_parallel_size", self.prefill_context_parallel_size),
            ("decode_context_parallel_size", self.decode_context_parallel_size),
        )


# ------------------------------------------------------------------------------------ stage 1: the JSON alone


def parse_sparse_offload(additional_config: Mapping[str, object] | None) -> SparseOffloadConfig:
    """Reads `sparse_kv_offload_config` out of vLLM's `--additional-config`.

    Absent means disabled. Other programs' keys of `additional_config` are ignored. A misspelling of our
    section's name is an error, because the engine would otherwise silently run without offload.
    Raises ConfigError: wrong type, value out of range, unknown key.
    """
    if additional_config is None:
        return SparseOffloadConfig()
    if not isinstance(additional_config, Mapping):
        raise ConfigError(
            "additional_config", additional_config, "must be a JSON object", f'pass {{"{SECTION}": {{...}}}}'
        )
    if SECTION not in additional_config:
        _refuse_misspelt_section(additional_config)
        return SparseOffloadConfig()
    section = additional_config[SECTION]
    if not isinstance(section, Mapping):
        raise ConfigError(
            SECTION, section, "must be a JSON object", 'use {"enabled": true, ...}, or leave the key out'
        )
    refuse_unknown_keys(SECTION, section, (*_CHECKS, *_UPSTREAMS))
    for key, check in _UPSTREAMS.items():
        if key in section:
            check(_name(key), section[key])
    values = {key: _CHECKS[key](_name(key), section[key]) for key in _CHECKS if key in section}
    given = values.get("topk_buffer_size", SparseOffloadConfig.topk_buffer_size)
    usable = usable_buffer_size(given, values.get("ways", SparseOffloadConfig.ways))
    if usable != given:
        values |= {"topk_buffer_size": usable, "given_buffer_size": given}
    return SparseOffloadConfig(**values)


def _name(key: str) -> str:
    return f"{SECTION}.{key}"


def _refuse_misspelt_section(additional_config: Mapping[str, object]) -> None:
    for key in additional_config:
        if difflib.get_close_matches(str(key), [SECTION], n=1, cutoff=0.8):
            rule = f"no such key; did you mean {SECTION!r}?"
            raise ConfigError(str(key), additional_config[key], rule, f"rename it to {SECTION!r}")


def _ways(key: str, value: object) -> int:
    # Two widths only: 16 tags are one cache line (two halves with two sets), 32 tags two.
    number = check_int(key, value, 1)
    if number not in WAYS:
        raise ConfigError(
            key, value, "must be 16 or 32", f"set it to {min(WAYS, key=lambda w: abs(w - number))}"
        )
    return number


def _no_fused_overlap(key: str, value: object) -> None:
    if check_bool(key, value):
        rule = "is vllm-ascend's own; this offload fetches followers' rows ahead, on a stream of its own"
        raise ConfigError(key, value, rule, "set it to false, or leave it out")


def _no_fused_operators(key: str, value: object) -> None:
    if value != "none":
        rule = (
            "is vllm-ascend's own; this offload uses operators of its own, if `kvoffload build-ops` made them"
        )
        raise ConfigError(key, value, rule, 'set it to "none", or leave it out')


_UPSTREAMS: dict[str, Callable[[str, object], None]] = {
    "use_fused_overlap": _no_fused_overlap,
    "fused_op_type": _no_fused_operators,
}
"""Keys of vllm-ascend's section of the same name: accepted where they switch nothing on."""

_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "enabled": check_bool,
    "topk_buffer_size": partial(check_int, low=1),
    "dram_size_per_dp_GB": partial(check_int, low=1),
    "keep_device_kv_cache": check_bool,
    "ways": _ways,
    "placement": partial(check_one_of, choices=PLACEMENTS, default=DEFAULT_PLACEMENT),
    "policy": partial(check_one_of, choices=POLICIES, default=DEFAULT_POLICY),
    "delivery": partial(check_one_of, choices=DELIVERIES, default="in_place"),
    "prefill_buffers": partial(check_int, low=2, high=8),
    "trace_path": check_new_path,
}


# -------------------------------------------------------------------------------- stage 2: against the engine


def validate_sparse_offload(config: SparseOffloadConfig, facts: EngineFacts) -> None:
    """Checks enabled options against the model and the engine; disabled options are always accepted.

    Raises ConfigError for the first rule broken, coarsest first: model, role, parallelism, engine, pool.
    """
    if not config.enabled:
        return
    _check_model(facts)
    _check_role(facts)
    check_parallelism(facts, SECTION)
    _check_engine(facts)
    check_hot_pool(config, facts)


def validate_partners(facts: EngineFacts) -> None:
    """Rejects draft methods and connectors that the enabled offload doesn't support. Raises ConfigError."""
    if facts.draft_method is not None and facts.draft_method not in DRAFT_METHODS:
        rule = f"with the offload, drafts come from {' or '.join(DRAFT_METHODS)}"
        fix = 'use {"method": "mtp", ...}, or leave --speculative-config out'
        raise ConfigError("speculative_config.method", facts.draft_method, rule, fix)
    if facts.kv_connector not in (None, REMOTE_D2H):
        rule = f"with the offload, KV comes by {REMOTE_D2H} only"
        fix = f"name {REMOTE_D2H}, or leave --kv-transfer-config out"
        raise ConfigError("kv_transfer_config.kv_connector", facts.kv_connector, rule, fix)


def _check_model(facts: EngineFacts) -> None:
    key = _name("enabled")
    if facts.index_topk is None:
        rule = "the model has no index_topk: without a sparse indexer every step reads all of the KV"
        raise ConfigError(
            key, True, rule, f"set {key} to false, or serve a DSA model (DeepSeek-V3.2, GLM-5.x)"
        )
    if facts.has_compress_ratios:
        rule = "the model has compress_ratios; compressed KV caches are not supported"
        raise ConfigError(key, True, rule, f"set {key} to false for this model")
    if facts.num_kv_cache_groups is not None and facts.num_kv_cache_groups != 1:
        rule = (
            f"the model has {facts.num_kv_cache_groups} KV cache groups; a hybrid KV cache is not supported"
        )
        raise ConfigError(key, True, rule, f"set {key} to false for this model")


def _check_role(facts: EngineFacts) -> None:
    key = _name("enabled")
    if facts.kv_role == "kv_producer":
        rule = "a prefill engine (kv_role=kv_producer) can't use the sparse decode offload"
        fix = (
            f"remove {SECTION} from the prefill engine, and set it on the decode engine (kv_role=kv_consumer)"
        )
        raise ConfigError(key, True, rule, fix)
    if facts.kv_role not in (None, "kv_consumer"):
        rule = f"kv_role={facts.kv_role} is a producer too; it must be kv_consumer, or no KV transfer at all"
        raise ConfigError(key, True, rule, "set kv_role to kv_consumer, or drop --kv-transfer-config")


def check_parallelism(facts: EngineFacts, what: str) -> None:
    """Rejects what divides layers, contexts or steps; what: section or connector. Raises ConfigError."""
    for option, size in facts.layer_and_context_parallelism:
        if size != 1:
            fix = f"set --{option.replace('_', '-')} 1 and use tensor or data parallelism"
            raise ConfigError(option, size, f"must be 1 with {what}", fix)
    if facts.dsa_context_parallel:
        fix = "set additional_config.enable_dsa_cp to false"
        raise ConfigError("dsa_context_parallel", True, f"must be off with {what}", fix)
    if facts.micro_batches:
        refuse_micro_batches(what)


def refuse_micro_batches(what: str) -> NoReturn:
    """Raises ConfigError."""
    rule = f"{what} follows a step's layers in one order, and micro-batches run them in turns"
    raise ConfigError("enable_dbo", True, rule, "leave --enable-dbo and --ubatch-size out")


def _check_engine(facts: EngineFacts) -> None:
    if facts.uses_v2_runner:
        rule = f"{SECTION} needs model runner V1"
        raise ConfigError("VLLM_USE_V2_MODEL_RUNNER", True, rule, "set VLLM_USE_V2_MODEL_RUNNER=0")
    if facts.kv_cache_dtype not in UNQUANTISED_CACHE_DTYPES:
        rule = f"the main KV cache must be in the model's 16 or 32 bit type with {SECTION}"
        raise ConfigError("kv_cache_dtype", facts.kv_cache_dtype, rule, "set --kv-cache-dtype auto")
    if facts.sleep_mode:
        rule = f"sleep mode frees device memory that the hot pools of {SECTION} live in"
        raise ConfigError("enable_sleep_mode", True, rule, "drop --enable-sleep-mode")
    if facts.max_num_seqs < 1:
        raise ConfigError(
            "max_num_seqs", facts.max_num_seqs, "must be at least 1", "set --max-num-seqs 1 or more"
        )
    if facts.block_size < 1 or facts.block_size & (facts.block_size - 1):
        # The number of slots of a hot pool is a power of two, so only such block sizes divide it.
        suggestion = 1 << max(facts.block_size.bit_length() - 1, 4) if facts.block_size > 0 else 128
        rule = f"must be a power of two with {SECTION}"
        raise ConfigError("block_size", facts.block_size, rule, f"set --block-size {suggestion}")


def check_hot_pool(config: SparseOffloadConfig, facts: EngineFacts) -> None:
    """The rules of the hot pool's size: big enough for one step (I-4), whole blocks, a power of two of sets.

    Raises ConfigError on `topk_buffer_size`, with the nearest values that satisfy all three.
    """
    size, ways, topk = config.topk_buffer_size, config.ways, facts.index_topk or 0
    queries = 1 + facts.num_speculative_tokens
    need = queries * topk
    if size < need:
        rule = f"must be at least {need} = (1 + {queries - 1} speculative tokens) * index_topk {topk}"
    elif size % facts.block_size:
        rule = f"must be divisible by block_size {facts.block_size}"
    elif size % ways or not _is_power_of_two(size // ways):
        rule = f"topk_buffer_size / ways ({ways}) must be a power of two"
    else:
        return
    valid = valid_buffer_sizes(size, ways, max(need, facts.block_size))
    given = config.given_buffer_size or size
    if config.given_buffer_size:
        rule = f"gives hot pools of {size} slots (a power of two of sets), which {rule}"
    raise ConfigError(_name("topk_buffer_size"), given, rule, f"set it to {' or '.join(map(str, valid))}")


ROUNDED_UNIT = 128
"""Multiples of this many tokens, vllm-ascend's block, are rounded; other sizes are typing errors."""


def usable_buffer_size(size: int, ways: int) -> int:
    """The greatest valid size up to `size`, which may be any multiple of a block, as vllm-ascend's sizes
    6144 or 20480 are; `size` itself where it is no such multiple, for the rules to refuse."""
    if size % ROUNDED_UNIT or size < ways:
        return size
    return int(ways << ((size // ways).bit_length() - 1))


def valid_buffer_sizes(size: int, ways: int, least: int) -> list[int]:
    """Valid hot-pool sizes of at least `least` tokens nearest to `size`: one below and one above, if any."""
    above = ways
    while above < max(size, least):
        above *= 2
    if above == size:
        return [size]
    below = above // 2
    return [below, above] if below >= max(least, ways) else [above]


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
