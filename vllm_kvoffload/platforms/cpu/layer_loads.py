"""Waits until a layer's KV is loaded and its memory is free, before the layer reads or writes it.

vLLM's own hook runs in the attention op, after the indexer has read its keys and the layer's new rows were
written. With shared layer memory that is too late.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from vllm_kvoffload.sparse.paged import PagedKV


def await_layer(name: str) -> None:
    """Waits for the connector if it requires this. name: of any module of the layer."""
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    if getattr(connector, "loads_before_writes", False) and connector.has_connector_metadata():
        connector.wait_for_layer_load(name)


class AwaitedKV(PagedKV):
    """A paged cache whose memory may hold another layer until the connector reports otherwise."""

    def __init__(self, cache: torch.Tensor, layer_name: str) -> None:
        super().__init__(cache)
        self._layer_name = layer_name

    def append(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        await_layer(self._layer_name)
        super().append(rows, slot_mapping)
