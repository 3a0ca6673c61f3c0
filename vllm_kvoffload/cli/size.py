"""`kvoffload size`: KV bytes of a model, and its capacity with and without offload.

The report is plain data (the output of `--json`); printing adds no logic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_kvoffload.geometry import KVGeometry
from vllm_kvoffload.layerwise.buffer_plan import geometry_layers, plan_buffers
from vllm_kvoffload.policies import DEFAULT_PLACEMENT, DEFAULT_POLICY
from vllm_kvoffload.settings.errors import ConfigError
from vllm_kvoffload.settings.offload import EngineFacts, parse_sparse_offload, validate_sparse_offload
from vllm_kvoffload.settings.store import parse_buffer_options
from vllm_kvoffload.settings.values import GIB
from vllm_kvoffload.sparse.capacity import (
    Budget,
    CapacityError,
    CapacityInputs,
    CapacityPlan,
    plan_capacity,
    required_budget,
)


@dataclass(frozen=True)
class SizeRequest:
    """Options of `kvoffload size`; see its help. prefill_buffers is 0 on a pure decode engine."""

    model: Path
    device_gb: float | None = None
    dram_gb: int = 128
    topk_buffer_size: int = 4096
    ways: int = 16
    placement: str = DEFAULT_PLACEMENT
    policy: str = DEFAULT_POLICY
    delivery: str = "in_place"
    max_num_seqs: int = 64
    max_model_len: int | None = None
    block_size: int = 128
    layout: str = "ascend"
    indexer_layout: str | None = None
    dtype: str | None = None
    num_speculative_tokens: int = 0
    prefill_buffers: int = 0
    keep_device: bool = False
    tokens: int | None = None
    shared_buffers: int | None = None
    independent_layers: str | None = None


def size_report(request: SizeRequest) -> dict[str, Any]:
    """Builds the command's report, JSON-compatible. Raises ConfigError for options that an engine rejects
    too."""
    hf_config = load_hf_config(request.model)
    geometry = KVGeometry.from_hf_config(
        hf_config,
        layout=request.layout,
        dtype=request.dtype,
        indexer_layout=request.indexer_layout,
        num_speculative_tokens=request.num_speculative_tokens,
    )
    length = request.max_model_len
    if length is None:
        length = _model_limit(hf_config)
    inputs = _capacity_inputs(request, geometry, length)
    report = {
        "assumed": {
            "layout": request.layout,
            "dtype": request.dtype or "the checkpoint's",
            "block_size": request.block_size,
            "max_num_seqs": request.max_num_seqs,
            "topk_buffer_size": request.topk_buffer_size,
            "prefill": "in this engine" if request.prefill_buffers else "elsewhere",
        },
        "geometry": _geometry_report(geometry),
        "at_max_model_len": _request_report(geometry, length),
        "fixed_device_bytes": {
            "hot_pools": inputs.hot_bytes,
            "residency": inputs.residency_bytes,
            "plan": inputs.plan_bytes,
            "prefill_buffers": inputs.staging_bytes,
            "total": inputs.fixed_bytes,
        },
        "needed": [_budget_report(inputs, tokens) for tokens in (length, request.tokens) if tokens],
        "capacity": None,
        "layer_buffers": _buffers_report(request, geometry),
    }
    if request.device_gb is not None:
        budget = replace(inputs, device_bytes=int(request.device_gb * GIB))
        try:
            report["capacity"] = _capacity_report(plan_capacity(budget), budget)
        except CapacityError as error:
            if error.key != "kv_cache_memory_bytes":
                raise
            needed = math.ceil(required_budget(budget, length).device_bytes / GIB * 10) / 10
            fix = (
                f"give --device-gb {needed:g}, or lower --max-num-seqs, --max-model-len or --topk-buffer-size"
            )
            raise ConfigError("device_gb", request.device_gb, error.rule, fix) from error
    return report


def load_hf_config(model: Path) -> dict[str, Any]:
    """Reads config.json from a model folder, or a file of that format. Raises ConfigError."""
    path = model / "config.json" if model.is_dir() else model
    fix = "give a model folder with a config.json, or such a file"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("model", str(model), f"can't read {path.name}: {error.strerror}", fix) from error
    except ValueError as error:
        raise ConfigError("model", str(model), f"{path.name} is not JSON: {error}", fix) from error
    if not isinstance(config, dict):
        raise ConfigError("model", str(model), f"{path.name} is not a JSON object", fix)
    return config


def _model_limit(hf_config: Mapping[str, Any]) -> int:
    limit = hf_config.get("max_position_embeddings")
    if limit is None:
        limit = (hf_config.get("text_config") or {}).get("max_position_embeddings")
    if not isinstance(limit, int) or limit < 1:
        rule = "not given, and the model's config has no max_position_embeddings"
        raise ConfigError("max_model_len", None, rule, "give --max-model-len")
    return limit


def _capacity_inputs(request: SizeRequest, geometry: KVGeometry, length: int) -> CapacityInputs:
    options = {
        "enabled": True,
        "topk_buffer_size": request.topk_buffer_size,
        "dram_size_per_dp_GB": request.dram_gb,
        "keep_device_kv_cache": request.keep_device,
        "ways": request.ways,
        "placement": request.placement,
        "policy": request.policy,
        "delivery": request.delivery,
        **({"prefill_buffers": request.prefill_buffers} if request.prefill_buffers else {}),
    }
    config = parse_sparse_offload({"sparse_kv_offload_config": options})
    facts = EngineFacts(
        index_topk=geometry.index_topk,
        block_size=request.block_size,
        max_num_seqs=request.max_num_seqs,
        num_speculative_tokens=request.num_speculative_tokens,
    )
    validate_sparse_offload(config, facts)
    if length < 1:
        raise ConfigError("max_model_len", length, "must be at least 1", "give --max-model-len 1 or more")
    return CapacityInputs.of(
        geometry,
        config,
        block_size=request.block_size,
        max_num_seqs=request.max_num_seqs,
        max_model_len=length,
        device_bytes=0,
        prefill_buffers=request.prefill_buffers,
    )


def _buffers_report(request: SizeRequest, geometry: KVGeometry) -> dict[str, Any] | None:
    """Reports prefill's shared buffers, None unless requested."""
    if request.shared_buffers is None and request.independent_layers is None:
        return None
    independent: Any = request.independent_layers
    if independent is not None and independent.lower() != "all":
        try:
            independent = json.loads(f"[{independent.strip('[]')}]")
        except ValueError:
            independent = request.independent_layers
    options = parse_buffer_options(request.shared_buffers, independent)
    plan = plan_buffers(geometry_layers(geometry), options)
    block, device = request.block_size, request.device_gb
    return {
        "slots": [[plan.layers[p].index for p in owners] for owners in plan.slots],
        "caches": plan.num_caches,
        "buffers": plan.num_buffers,
        "device_bytes_per_token": plan.physical_bytes,
        "bytes_per_token": plan.logical_bytes,
        "factor": plan.factor,
        "tokens": None if device is None else int(device * GIB) // (plan.physical_bytes * block) * block,
    }


def _geometry_report(geometry: KVGeometry) -> dict[str, Any]:
    return {
        "summary": geometry.describe(),
        "indexer_types": geometry.index_topk_pattern,
        "indexer_types_source": geometry.types_source,
        "target_layers": geometry.num_target_layers,
        "mtp_layers": geometry.num_mtp_layers,
        "full_layers": geometry.indexer_types.count("full"),
        "shared_layers": geometry.indexer_types.count("shared"),
        "index_groups": len(geometry.groups),
        "index_topk": geometry.index_topk,
        "main_components": {c.name: c.row_bytes for c in geometry.main_components},
        "indexer_components": {c.name: c.row_bytes for c in geometry.indexer_components},
        "main_row_bytes": geometry.main_row_bytes,
        "indexer_row_bytes": geometry.indexer_row_bytes,
        "main_bytes_per_token": geometry.main_bytes_per_token,
        "indexer_bytes_per_token": geometry.indexer_bytes_per_token,
        "offload_factor": geometry.offload_factor,
    }


def _request_report(geometry: KVGeometry, length: int) -> dict[str, int]:
    main, indexer = geometry.transfer_bytes(length)
    return {
        "tokens": length,
        "main_bytes": main,
        "indexer_bytes": indexer,
        "indexer_read_bytes_per_step": geometry.indexer_read_bytes(length),
        "logits_bytes_per_query": geometry.logits_buffer_bytes(1, length),
    }


def _budget_report(inputs: CapacityInputs, tokens: int) -> dict[str, int]:
    need: Budget = required_budget(inputs, tokens)
    return {
        "tokens": tokens,
        "device_bytes": need.device_bytes,
        "dram_bytes": need.dram_bytes,
        "dram_size_per_dp_GB": need.dram_gib,
    }


def _capacity_report(plan: CapacityPlan, inputs: CapacityInputs) -> dict[str, Any]:
    return {
        "device_budget_bytes": inputs.device_bytes,
        "dram_budget_bytes": inputs.dram_bytes,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "num_blocks": plan.num_blocks,
        "block_size": plan.block_size,
        "tokens": plan.tokens,
        "limit": plan.limit,
        "device_limited_blocks": plan.device_limited_blocks,
        "dram_limited_blocks": plan.dram_limited_blocks,
        "baseline_blocks": plan.baseline_blocks,
        "baseline_tokens": plan.baseline_tokens,
        # JSON has no infinity
        "factor": plan.factor if math.isfinite(plan.factor) else None,
        "asymptotic_factor": plan.asymptotic_factor,
    }


# --------------------------------------------------------------------------------------------------- printing


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Prints `size_report`'s result as tables."""
    geometry, request = report["geometry"], report["at_max_model_len"]
    console.print(geometry["summary"], soft_wrap=True, highlight=False, markup=False)
    assumed = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report["assumed"].items())
    console.print(f"For {assumed}; see --help.", soft_wrap=True, highlight=False, markup=False)
    console.print(_bytes_table(geometry, request))
    console.print(_rows("Fixed device costs", {k: _size(v) for k, v in report["fixed_device_bytes"].items()}))
    for need in report["needed"]:
        console.print(
            f"{need['tokens']:,} tokens need {_size(need['device_bytes'])} of device memory and "
            f"dram_size_per_dp_GB {need['dram_size_per_dp_GB']}",
            soft_wrap=True,
            highlight=False,
        )
    if report["capacity"] is not None:
        console.print(_capacity_table(report["capacity"]))
    if report["layer_buffers"] is not None:
        console.print(_buffers_table(report["layer_buffers"]))


def _bytes_table(geometry: Mapping[str, Any], request: Mapping[str, int]) -> Table:
    table = Table("", "main KV", "indexer", title="Bytes", title_justify="left")
    parts = (geometry["main_components"], geometry["indexer_components"])
    table.add_row("token and layer", *(" + ".join(f"{k} {v}" for k, v in part.items()) for part in parts))
    table.add_row(
        "token", f"{geometry['main_bytes_per_token']:,}", f"{geometry['indexer_bytes_per_token']:,}"
    )
    name = f"request of {request['tokens']:,} tokens"
    table.add_row(name, _size(request["main_bytes"]), _size(request["indexer_bytes"]))
    table.add_row("read per step", "", _size(request["indexer_read_bytes_per_step"]))
    table.add_row("logits per query", "", _size(request["logits_bytes_per_query"]))
    return table


def _capacity_table(capacity: Mapping[str, Any]) -> Table:
    factor = capacity["factor"]
    limit = {"device": "device memory", "dram": "host memory (dram_size_per_dp_GB)"}[capacity["limit"]]
    return _rows(
        "Capacity",
        {
            "device memory for KV": _size(capacity["device_budget_bytes"]),
            "tokens without offload": f"{capacity['baseline_tokens']:,}",
            "tokens with offload": f"{capacity['tokens']:,} in {capacity['num_blocks']:,} blocks",
            "factor": f"{factor:.2f}" if factor is not None else "nothing fits without offload",
            "factor of large memory": f"{capacity['asymptotic_factor']:.2f}",
            "limited by": limit,
            "blocks each limit allows": (
                f"device {capacity['device_limited_blocks']:,}, host {capacity['dram_limited_blocks']:,}"
            ),
            "host pool": _size(capacity["host_bytes"]),
        },
    )


def _buffers_table(buffers: Mapping[str, Any]) -> Table:
    shared = [owners for owners in buffers["slots"] if len(owners) > 1]
    rows = {
        "layers with memory of their own": ", ".join(str(o[0]) for o in buffers["slots"] if len(o) == 1)
        or "none",
        **{f"shared buffer {n}": ", ".join(map(str, owners)) for n, owners in enumerate(shared)},
        "caches in buffers": f"{buffers['caches']} in {buffers['buffers']}",
        "bytes of a token": f"{buffers['bytes_per_token']:,}",
        "of these on the device": f"{buffers['device_bytes_per_token']:,}",
        "factor": f"{buffers['factor']:.2f}",
    }
    if buffers["tokens"] is not None:
        rows["tokens"] = f"{buffers['tokens']:,}"
    return _rows("Layer buffers of prefill", rows)


def _rows(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), value)
    return table


def _size(number: int) -> str:
    if number < 1 << 20:
        return f"{number:,} B"
    return f"{number / GIB:.2f} GiB" if number >= GIB else f"{number / (1 << 20):.1f} MiB"
