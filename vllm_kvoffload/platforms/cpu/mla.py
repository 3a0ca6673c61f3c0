"""Out-of-tree MLA layer: gives a model's indexer the CPU implementation.

vLLM's own ``Indexer`` quantises to FP8 with a Triton-only kernel. Its weights and their names stay;
only the class of the two instances changes, so that forward, cache spec and backend become ours.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from vllm_kvoffload.platforms.cpu.indexer import CPUIndexer

LAYER = "MultiHeadLatentAttentionWrapper"


class CPUMultiHeadLatentAttention(MultiHeadLatentAttentionWrapper):  # type: ignore[misc]
    """vLLM's MLA layer whose indexer, if it has one, is a :class:`CPUIndexer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.indexer is not None:
            CPUIndexer.adopt(self.indexer)


def register_mla_layer() -> None:
    """Registers the layer once per process."""
    if LAYER not in op_registry_oot:
        PluggableLayer.register_oot(CPUMultiHeadLatentAttention, name=LAYER)
