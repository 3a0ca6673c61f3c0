"""Our connectors under the names that users give, whatever vllm-ascend registers under them, and when.

Its plugin registers names one by one and fails when one is taken; ours may run before it or after it. So
nothing is registered on Ascend: the configuration gets `kv_connector_module_path`, which vLLM asks before
its registry, and which users may as well give themselves.

vllm-ascend has an `AscendStoreConnector` and a `MultiConnector` of its own. Ours stand in for them where
something is asked for that only ours can do: layers that share buffers, or the embedded store.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_kvoffload.connectors.ascend_store.config import CONNECTOR as STORE
from vllm_kvoffload.connectors.ascend_store.config import MULTI_CONNECTORS
from vllm_kvoffload.plugin import CONNECTORS as ALL_CONNECTORS

MODULE_PATH = "kv_connector_module_path"
MODULES = {
    **{name: module for name, (module, _) in ALL_CONNECTORS.items()},
    "MultiConnector": ALL_CONNECTORS["KVOffloadMultiConnector"][0],
}
"""Names, and the module in which a class of ours has that name."""

SHARED_NAMES = (STORE, "MultiConnector")
"""Those that vllm-ascend has classes of, too."""

ONLY_OURS = ("layerwise_num_shared_buffers", "layerwise_independent_layers", "local_dram_size_GB")


def name_modules(transfer: Any) -> None:
    """Fills in the module of each of our connectors, within a MultiConnector too. None: nothing to do."""
    if transfer is None:
        return
    extra = transfer.kv_connector_extra_config or {}
    for part in _parts(extra):
        if not part.get(MODULE_PATH) and _wanted(part.get("kv_connector"), _options(part)):
            part[MODULE_PATH] = MODULES[part["kv_connector"]]
    if not transfer.kv_connector_module_path and _wanted(transfer.kv_connector, extra):
        transfer.kv_connector_module_path = MODULES[transfer.kv_connector]


def _wanted(name: str | None, extra: Mapping[str, Any]) -> bool:
    """Whether a name without a module means a class of ours. The parts of a MultiConnector have theirs."""
    if name == STORE:
        return any(key in extra for key in ONLY_OURS) or str(extra.get("backend")).lower() == "local"
    if name == "MultiConnector":
        return any(_is_ours(part) for part in _parts(extra) if part.get("kv_connector") == STORE)
    return name in MODULES


def uses(transfer: Any, name: str) -> bool:
    """Whether the connector of that name is ours, alone or within a MultiConnector. After `name_modules`."""
    if transfer is None:
        return False
    if transfer.kv_connector in MULTI_CONNECTORS:
        parts = _parts(transfer.kv_connector_extra_config or {})
        return any(part.get("kv_connector") == name and _is_ours(part) for part in parts)
    whole = {"kv_connector": transfer.kv_connector, MODULE_PATH: transfer.kv_connector_module_path}
    return bool(transfer.kv_connector == name and _is_ours(whole))


def _is_ours(part: Mapping[str, Any]) -> bool:
    name = part.get("kv_connector")
    return name in MODULES and (name not in SHARED_NAMES or part.get(MODULE_PATH) == MODULES[name])


def _parts(extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = extra.get("connectors")
    return [part for part in found if isinstance(part, dict)] if isinstance(found, list) else []


def _options(part: Mapping[str, Any]) -> Mapping[str, Any]:
    options = part.get("kv_connector_extra_config")
    return options if isinstance(options, Mapping) else {}
