"""Every private name of vLLM and vllm-ascend used by the Ascend platform, checked before use.

A table: location, expected shape, and reason. A release that changed an entry is rejected at start-up by
name instead of failing in a forward pass; the contract tests check the table against the release.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Literal

from vllm_kvoffload.platforms.refusal import refuse
from vllm_kvoffload.settings.errors import ConfigError

DISTRIBUTION = "vllm-ascend"
OLDEST, TOO_NEW = (0, 23, 0), (0, 24)
RELEASE = "0.23.0.post1"
"""The release that the package was written against and is tested with."""

Where = Literal["platform", "worker"]


@dataclass(frozen=True)
class Symbol:
    """A name. `parameters`: required parameters of a function in order, without self and cls; None if it
    is not called or overridden. `fields`: of a dataclass, or attributes of a class.

    `where`: checked when the platform is adopted, or in the worker, where all of vllm-ascend can be
    imported.
    """

    module: str
    name: str
    reason: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()
    where: Where = "worker"

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


_SFA = "vllm_ascend.attention.sfa_v1"
_RUNNER = "vllm_ascend.worker.model_runner_v1"
_WORKER = "vllm_ascend.worker.worker"

SYMBOLS = (
    Symbol(
        "vllm_ascend.platform", "NPUPlatform.check_and_update_config",
        "our checks, worker and connectors are chosen after it", ("vllm_config",), where="platform",
    ),
    Symbol(
        "vllm_ascend.platform", "NPUPlatform.get_attn_backend_cls",
        "our backend instead of AscendSFABackend",
        ("selected_backend", "attn_selector_config", "num_heads"), where="platform",
    ),
    Symbol(
        "vllm_ascend.platform", "NPUPlatform.apply_config_platform_defaults",
        "our connectors get their modules before vLLM looks for their classes", ("vllm_config",),
        where="platform",
    ),
    Symbol(
        "vllm.distributed.kv_transfer.kv_connector.factory", "KVConnectorFactory.get_connector_class",
        "asks for the module path before the registry", ("kv_transfer_config",), where="platform",
    ),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler._handle_invalid_blocks",
           "what a step computed over lost KV is dropped", ("invalid_block_ids", "num_scheduled_tokens")),
    Symbol("vllm.config", "get_current_vllm_config_or_none", "whether the model built is offloaded", (),
           where="platform"),
    Symbol(_WORKER, "NPUWorker.init_device", "makes the model runner", ()),
    Symbol(_WORKER, "NPUModelRunner", "the name by which init_device finds the runner's class"),
    Symbol(_WORKER, "NPUWorker.load_model", "the built model is compared with the geometry after it", ()),
    Symbol(_WORKER, "NPUWorker.determine_available_memory", "reports what the capacity formula found", ()),
    Symbol(_WORKER, "NPUWorker.get_kv_cache_spec", "page sizes are compared with the geometry", ()),
    Symbol(_RUNNER, "NPUModelRunner.initialize_kv_cache_tensors",
           "host pool and hot pools instead of main cache tensors", ("kv_cache_config",)),
    Symbol(_RUNNER, "NPUModelRunner._get_layer_kv_cache_specs", "the specs of a group by layer",
           ("kv_cache_config",)),
    Symbol(_RUNNER, "NPUModelRunner._allocate_int8_cache_tensor", "aligned indexer caches",
           ("numel", "alignment")),
    Symbol(_RUNNER, "NPUModelRunner._allocate_sparse_c8_indexer_tensors", "quantised indexer caches",
           ("dsa_k_tensor_size", "dsa_k_scale_tensor_size", "alignment", "scale_dtype")),
    Symbol(_RUNNER, "NPUModelRunner._update_states", "rows of finished requests are released",
           ("scheduler_output",)),
    Symbol(_RUNNER, "NPUModelRunner._model_forward", "runs the target model once in every step, which begins "
           "before it", ("num_tokens_padded",)),
    Symbol(_RUNNER, "NPUModelRunner._dummy_run", "its requests don't exist; full graphs are captured in it",
           ("num_tokens",)),
    Symbol("vllm_ascend.spec_decode.llm_base_proposer", "AscendSpecDecodeBaseProposer._run_merged_draft",
           "calls the drafter's `model` once in every draft pass"),
    Symbol("vllm_ascend.ascend_forward_context", "set_ascend_forward_context",
           "lists the metadata of all draft passes in the context",
           ("attn_metadata", "vllm_config", "draft_attn_metadatas")),
    Symbol("vllm_ascend.compilation.acl_graph", "ACLGraphWrapper.__call__",
           "replays in mode FULL, and runs the layers in mode NONE"),
    Symbol("vllm.forward_context", "get_forward_context", "the step's mode and metadata", ()),
    Symbol("vllm.forward_context", "ForwardContext", "the step's mode and metadata",
           fields=("cudagraph_runtime_mode", "attn_metadata")),
    Symbol(_RUNNER, "NPUModelRunner.execute_model", "counters are published after it",
           ("scheduler_output",)),
    Symbol(_RUNNER, "NPUModelRunner.sample_tokens", "counters are published after it", ("grammar_output",)),
    Symbol("vllm.v1.worker.utils", "bind_kv_cache", "binds cache tuples to layers",
           ("kv_caches", "forward_context", "runner_kv_caches")),
    Symbol("vllm.model_executor.models.utils", "extract_layer_index", "layer numbers of cache names",
           ("layer_name",)),
    Symbol("vllm_ascend.core.kv_cache_interface", "AscendMLAAttentionSpec", "sizes of indexer caches",
           fields=("sparse_head_dim", "cache_sparse_li_c8", "cache_sparse_sfa_c8", "c8_k_cache_dtype",
                   "c8_k_scale_cache_dtype", "page_size_bytes")),
    Symbol(_SFA, "AscendSFABackend.get_impl_cls", "our implementation", ()),
    Symbol(_SFA, "AscendSFABackend.get_builder_cls", "our metadata builder", ()),
    Symbol(_SFA, "AscendSFAMetadata", "a pass's batch is derived from it",
           fields=("slot_mapping", "cum_query_lens", "seq_lens", "block_table", "block_size",
                   "num_actual_tokens", "num_input_tokens", "attn_state")),
    Symbol(_SFA, "AscendSFAMetadataBuilder.__init__", "takes our metadata class",
           ("kv_cache_spec", "layer_names", "vllm_config", "device", "metadata_cls",
            "supports_dcp_with_varlen")),
    Symbol(_SFA, "AscendSFAMetadataBuilder._build", "adds what the host needs, for drafts too",
           ("common_attn_metadata", "draft_index")),
    Symbol(_SFA, "AscendSFAImpl.process_weights_after_loading", "fused preprocessing is switched off first",
           ("act_dtype",)),
    Symbol(_SFA, "AscendSFAImpl.forward", "outputs zeros in dummy runs",
           ("layer_name", "hidden_states", "kv_cache", "attn_metadata", "need_gather_q_kv", "output")),
    Symbol(_SFA, "AscendSFAImpl.exec_kv", "new rows go to the offload instead of a paged cache",
           ("kv_no_split", "cos", "sin", "kv_cache", "slots", "attn_metadata")),
    Symbol(_SFA, "AscendSFAImpl.rope_single", "interleaved rope of the new rows", ("x", "cos", "sin")),
    Symbol(_SFA, "AscendSFAImpl._execute_sparse_flash_attention_process",
           "reads hot pool or prefill buffer",
           ("ql_nope", "q_pe", "kv_cache", "topk_indices", "attn_metadata", "actual_seq_lengths_query",
            "actual_seq_lengths_key")),
    Symbol(_SFA, "_has_shared_indexer_layers", "reads indexer_types, which our platform completes",
           ("configs",)),
    Symbol("vllm_ascend.device.device_op", "DeviceOperator.execute_sparse_flash_attention_process",
           "the attention operator with a block table of ours",
           ("sfa_impl", "ql_nope", "q_pe", "kv_cache", "topk_indices", "attn_metadata",
            "actual_seq_lengths_query", "actual_seq_lengths_key", "block_table")),
    Symbol("vllm_ascend.attention.utils", "wait_for_kv_layer_from_connector",
           "attention waits for a layer's memory and prefix before it writes", ("layer_name",)),
    Symbol("vllm_ascend.attention.utils", "maybe_save_kv_layer_to_connector",
           "attention says that a layer is done", ("layer_name", "kv_cache_layer")),
    Symbol("vllm_ascend.attention.utils", "notify_kv_cache_written",
           "attention says that a layer's rows are written", ("layer_name",)),
    Symbol("vllm.v1.worker.kv_connector_model_runner_mixin",
           "KVConnectorModelRunnerMixin._get_kv_connector_output",
           "loads begin before the forward pass, and what was lost is asked for after it",
           ("scheduler_output", "wait_for_save", "defer_finalize")),
    Symbol("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
           "MultiConnector._get_connector_classes_and_configs", "parts get their modules, too",
           ("vllm_config",)),
    Symbol("vllm_ascend.attention.utils", "AscendCommonAttentionMetadata", "what the host needs of a pass",
           fields=("query_start_loc_cpu", "num_reqs", "positions")),
    Symbol("torch_npu.npu", "Stream.wait_event", "a stream of the kernels waits for the compute stream",
           ("event",)),
    Symbol("torch_npu.npu", "Event.record", "and the other way round", ("stream",)),
    Symbol("torch_npu.npu", "Event.query", "whether counters have come back", ()),
    Symbol("torch_npu", "npu_rms_norm", "norm of the latent"),
    Symbol("torch_npu", "npu_interleave_rope", "rope of the new rows"),
    Symbol("torch_npu", "npu_scatter_nd_update_", "rows into their slots"),
)  # fmt: skip


def find_problem(symbol: Symbol) -> str:
    """Returns the problem with a symbol in this environment, "" if there is none."""
    try:
        found: Any = import_module(symbol.module)
    except Exception as error:
        return f"{symbol.module} can't be imported: {error}"
    for part in symbol.name.split("."):
        owner, found = found, getattr(found, part, None)
        if found is None or not _is_own(symbol, owner, part):
            return f"{symbol.path} is missing"
    missing = [name for name in symbol.fields if not _has_field(found, name)]
    if missing:
        return f"{symbol.path} has no {', '.join(missing)}"
    return _signature_problem(symbol, found) if symbol.parameters is not None else ""


def _is_own(symbol: Symbol, owner: Any, name: str) -> bool:
    """Whether the class itself defines the method: one inherited from vLLM is not the expected one."""
    if not inspect.isclass(owner):
        return True
    definer = next(kind for kind in owner.__mro__ if name in vars(kind))
    return definer.__module__.split(".")[0] == symbol.module.split(".")[0]


def _has_field(kind: Any, name: str) -> bool:
    return name in getattr(kind, "__dataclass_fields__", {}) or hasattr(kind, name)


def _signature_problem(symbol: Symbol, function: Callable[..., Any]) -> str:
    """Our parameters must come first in this order; further ones need defaults, since we do not pass them."""
    assert symbol.parameters is not None
    listed = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    names = [p.name for p in listed]
    ours = [name for name in names if name in symbol.parameters]
    shown = f"{symbol.path}({', '.join(names)})"
    if ours != list(symbol.parameters):
        return f"{shown}: expected the parameters ({', '.join(symbol.parameters)})"
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in listed:
        optional = parameter.default is not inspect.Parameter.empty or parameter.kind in variadic
        if parameter.name not in symbol.parameters and not optional:
            return f"{shown}: {parameter.name} is new and required"
    return ""


def problems(symbols: Sequence[Symbol] = SYMBOLS, where: Where | None = None) -> list[str]:
    """Lists the table's problems in this environment; ``where`` limits it to one part."""
    chosen = (symbol for symbol in symbols if where is None or symbol.where == where)
    return [problem for symbol in chosen if (problem := find_problem(symbol))]


def symbols_problem(where: Where) -> ConfigError | None:
    """Why a vllm-ascend that lacks a symbol can't be used, None if all are there."""
    found = problems(where=where)
    if not found:
        return None
    rule = f"it is not the release this package knows: {'; '.join(found[:3])}"
    return ConfigError(DISTRIBUTION, _installed(), rule, f"install {DISTRIBUTION}=={RELEASE}")


def version_problem(installed: str | None = None) -> ConfigError | None:
    """Why a vllm-ascend of another minor release can't be used, None for one that can."""
    version = installed or _installed()
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers >= OLDEST and numbers[:2] < TOO_NEW:
        return None
    side = "old" if numbers < OLDEST else "new"
    rule = f"too {side}: this package works with 0.23 from {'.'.join(map(str, OLDEST))} on"
    # Releases from 0.26 on have an offload with options of the same names.
    other = "" if numbers < OLDEST else "; to use vllm-ascend's own offload, uninstall vllm-kvoffload"
    return ConfigError(DISTRIBUTION, version, rule, f"install {DISTRIBUTION}=={RELEASE}{other}")


def check_symbols(where: Where) -> None:
    """Rejects a vllm-ascend that lacks a symbol. Raises StartupRefusedError naming it."""
    problem = symbols_problem(where)
    if problem is not None:
        refuse(problem)


def _installed() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0"
