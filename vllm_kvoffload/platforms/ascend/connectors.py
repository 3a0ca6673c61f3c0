"""Resolves the connector names in a configuration to our classes, whatever vllm-ascend registers.

Its plugin registers names one by one and fails when one is taken, and may run before or after ours. So
nothing is registered on Ascend: the configuration gets `kv_connector_module_path`, which vLLM checks
before its registry and which users may also set themselves.

vllm-ascend has its own `AscendStoreConnector` and `MultiConnector`. Ours replace them if the options need
a feature that only ours have: layers that share buffers, or the embedded store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_kvoffload.platforms.requested import needs_our_store
from vllm_kvoffload.settings.connectors import EXTRA, MODULE_PATH, MODULES, STORE


def name_modules(transfer: Any) -> None:
    """Sets the module path of each of our connectors, also inside a MultiConnector. None: nothing to do."""
    if transfer is None:
        return
    extra = transfer.kv_connector_extra_config or {}
    for part in _parts(extra):
        if not part.get(MODULE_PATH) and _wanted(part.get("kv_connector"), _options(part)):
            part[MODULE_PATH] = MODULES[part["kv_connector"]]
    if not transfer.kv_connector_module_path and _wanted(transfer.kv_connector, extra):
        transfer.kv_connector_module_path = MODULES[transfer.kv_connector]


def _wanted(name: str | None, extra: Mapping[str, Any]) -> bool:
    """Whether a name without a module path means our class. Parts of a MultiConnector have their own."""
    if name == STORE:
        return needs_our_store(extra)
    if name == "MultiConnector":
        stores = [part for part in _parts(extra) if part.get("kv_connector") == STORE]
        return any(part.get(MODULE_PATH) == MODULES[STORE] for part in stores)
    return name in MODULES


def _parts(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = extra.get("connectors")
    return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []


def _options(part: Mapping[str, Any]) -> Mapping[str, Any]:
    options = part.get(EXTRA)
    return options if isinstance(options, Mapping) else {}
