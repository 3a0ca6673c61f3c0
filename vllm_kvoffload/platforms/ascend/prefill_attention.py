"""Sparse attention of vllm-ascend over caches whose memory is shared by layers.

Upstream's forward waits for the connector before it writes a layer's rows, except in the MLAPO path.
"""

from __future__ import annotations

import torch
from vllm_ascend.attention.sfa_v1 import AscendSFABackend, AscendSFAImpl


class SharedBufferSFAImpl(AscendSFAImpl):
    """Upstream's attention without MLAPO, which writes a layer's rows before it waits for the memory."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        # MLAPO also drops the weights of the other path, so it must be disabled first.
        self.enable_mlapo = False
        super().process_weights_after_loading(act_dtype)


class SharedBufferSFABackend(AscendSFABackend):
    """Upstream's backend with our class."""

    @staticmethod
    def get_impl_cls() -> type[SharedBufferSFAImpl]:
        return SharedBufferSFAImpl
