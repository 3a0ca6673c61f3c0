"""An NPU in software: the unmodified torch_npu, vLLM and vllm-ascend on a machine without one.

``hooks`` starts it in every process of an environment made by ``install.py``.
"""

from __future__ import annotations
