"""Our connectors under the names that users give, whatever vllm-ascend registers under them, and when.

Its plugin registers names one by one and fails when one is taken; ours may run before it or after it. So
nothing is registered on Ascend: the configuration gets `kv_connector_module_path`, which vLLM asks before
its registry, and which users may as well give themselves.
"""

from __future__ import annotations

from typing import Any

from vllm_kvoffload.plugin import CONNECTORS as ALL_CONNECTORS

MODULE_PATH = "kv_connector_module_path"
CONNECTORS = {name: ALL_CONNECTORS[name] for name in ("SfaRemoteD2HConnector",)}
"""Those that work on Ascend. `AscendStoreConnector` and `MultiConnector` stay vllm-ascend's own there."""


def name_modules(transfer: Any) -> None:
    """Fills in the module of each of our connectors, within a MultiConnector too. None: nothing to do."""
    if transfer is None:
        return
    if transfer.kv_connector in CONNECTORS and not transfer.kv_connector_module_path:
        transfer.kv_connector_module_path = CONNECTORS[transfer.kv_connector][0]
    for entry in (transfer.kv_connector_extra_config or {}).get("connectors") or []:
        if isinstance(entry, dict) and entry.get("kv_connector") in CONNECTORS and not entry.get(MODULE_PATH):
            entry[MODULE_PATH] = CONNECTORS[entry["kv_connector"]][0]
