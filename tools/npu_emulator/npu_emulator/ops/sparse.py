"""Sparse attention: the lightning indexer, attention to chosen tokens, and writes of MLA rows."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_emulator.ops import operator
from npu_emulator.ops.dense import interleave_rope, rms_norm, scatter_nd_update_
