"""Whether an environment works: python -m npu_emulator.check."""

from __future__ import annotations


def main() -> None:
    import torch
    import torch_npu

    assert torch_npu.npu.is_available()
    torch_npu.npu.set_device(0)
    torch.manual_seed(0)
    a, w = torch.randn(8, 16), torch.randn(16, 32)
    assert torch.equal((a.to("npu") @ w.to("npu")).softmax(-1).cpu(), (a @ w).softmax(-1))
    from importlib.metadata import version

    names = ("torch_npu", "vllm", "vllm_ascend")
    print(
        "the emulated NPU works:", ", ".join(f"{name} {version(name)}" for name in names), torch_npu.__name__
    )


if __name__ == "__main__":
    main()
