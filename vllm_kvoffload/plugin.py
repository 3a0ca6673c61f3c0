"""Entry points: register the platform, connectors and layers with vLLM.

``cpu_platform`` runs while vLLM resolves its platform, ``register_general`` in every vLLM process
before a model is built. Neither imports vLLM at module level: entry points are loaded early. Both run in
every engine of the environment, so they change nothing for engines that do not ask for this package.
"""

from __future__ import annotations

from importlib import metadata

from vllm_kvoffload.platforms.foreign import cpu_problem, platform_problem, watch
from vllm_kvoffload.settings.connectors import MODULES, MULTI, REMOTE_D2H, STORE

CPU_PLATFORM = "vllm_kvoffload.platforms.cpu.platform.KVOffloadCPUPlatform"


def cpu_platform() -> str | None:
    """Returns the class path of the CPU reference platform, None if this vLLM is not the CPU build that it
    is made for, or if the C++ core does not load."""
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None
    return CPU_PLATFORM if "cpu" in version and cpu_problem(version) is None else None


def register_general() -> None:
    """Prepares the active platform for engines that ask for this package. Idempotent."""
    from vllm.platforms import current_platform

    from vllm_kvoffload.platforms.ascend.hooks import adopt_platform, is_npu_platform

    if is_npu_platform(current_platform):
        adopt_platform(current_platform)  # there, connectors are resolved by module path, not registered
    elif f"{type(current_platform).__module__}.{type(current_platform).__qualname__}" == CPU_PLATFORM:
        _register_cpu()
    else:
        watch(current_platform, lambda: platform_problem(current_platform), store_is_shared=False)


def _register_cpu() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from vllm_kvoffload.platforms.cpu.spin import shorten_spinning_if_chosen

    for name in (REMOTE_D2H, STORE, MULTI):
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, MODULES[name], name)
    shorten_spinning_if_chosen()
