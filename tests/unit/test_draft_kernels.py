"""The CPU platform's changes to vLLM's sampling, as far as single kernels show them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """As a worker registers them."""
    from vllm.platforms import current_platform

    from vllm_kvoffload.platforms.cpu.sampling import register_expand_kernel

    current_platform.register_triton_kernel_overrides()
    register_expand_kernel()


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 7]), st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.int32, torch.int64, torch.float64]),
)
def test_each_draft_gets_the_value_of_its_request(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    scale = 0.25 if dtype.is_floating_point else 1
    values = torch.tensor([value * scale for value, _ in rows], dtype=dtype)
    ends = torch.tensor([count for _, count in rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, ends, int(ends[-1]), replace_from=0, replace_to=1)
    expected = [value * scale if value else 1 for value, count in rows for _ in range(count)]
    assert expanded.dtype == dtype
    assert expanded.tolist() == expected
