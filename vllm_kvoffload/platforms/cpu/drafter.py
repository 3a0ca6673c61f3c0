"""vLLM's MTP proposer, with a callback to the offload before each draft pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.spec_decode.eagle import EagleProposer

from vllm_kvoffload.platforms.cpu.metadata import SparseMetadata
from vllm_kvoffload.sparse.step import StepBatch


class KVOffloadProposer(EagleProposer):
    """Calls ``before_pass(index, batch)`` once before draft pass ``index`` of a step."""

    before_pass: Callable[[int, StepBatch], None] | None = None

    def build_per_group_and_layer_attn_metadata(
        self, common_attn_metadata: Any, draft_index: int = 0
    ) -> tuple[list[Any], dict[str, Any]]:
        groups, layers = super().build_per_group_and_layer_attn_metadata(common_attn_metadata, draft_index)
        if self.before_pass is not None:
            metadata = next(m for m in layers.values() if isinstance(m, SparseMetadata))
            self.before_pass(draft_index, metadata.batch)
        return groups, layers
