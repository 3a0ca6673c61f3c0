"""Waiting for a layer's KV to come, and its memory to be free, before anything of the layer touches it.

vLLM's own hook comes with the attention op: after the indexer has read its keys, and after the layer's new
rows were written. Where layers share memory both are too late.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from vllm_kvoffload.sparse.paged import PagedKV


def await_layer(name: str) -> None:
    """Waits for the connector, if it is one that needs this. name: of any module of the layer."""
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    if getattr(connector, "loads_before_writes", False) and connector.has_connector_metadata():
        connector.wait_for_layer_load(name)


class AwaitedKV(PagedKV):
    """A paged cache whose memory may be another layer's until the connector says otherwise."""

    def __init__(self, cache: torch.Tensor, layer_name: str) -> None:
        super().__init__(cache)
        self._layer_name = layer_name

    def append(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        await_layer(self._layer_name)
        super().append(rows, slot_mapping)
