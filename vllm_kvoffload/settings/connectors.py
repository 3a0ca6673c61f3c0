"""The connectors of this package by their `kv_connector` names, alone or in a multi connector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.settings.errors import ConfigError

EXTRA = "kv_connector_extra_config"
MODULE_PATH = "kv_connector_module_path"

REMOTE_D2H = "SfaRemoteD2HConnector"
STORE = "AscendStoreConnector"
MULTI = "KVOffloadMultiConnector"
MULTI_CONNECTORS = ("MultiConnector", MULTI)

MODULES = {
    REMOTE_D2H: "vllm_kvoffload.connectors.sfa_remote_d2h.connector",
    STORE: "vllm_kvoffload.connectors.ascend_store.connector",
    MULTI: "vllm_kvoffload.connectors.multi",
    "MultiConnector": "vllm_kvoffload.connectors.multi",
}
"""Maps connector names to the modules of this package that define them."""

UPSTREAM_NAMES = (STORE, "MultiConnector")
"""Names also used by vllm-ascend, where only the module path identifies the class."""


@dataclass(frozen=True)
class ConnectorPart:
    """A configured connector: the engine's only one, or one of a multi connector.

    name, role: `kv_connector` and `kv_role`. options: its `kv_connector_extra_config`. module: its
    `kv_connector_module_path`.
    """

    name: str | None
    role: str | None
    options: Mapping[str, Any]
    module: str | None = None

    def is_ours(self, *, registered: bool) -> bool:
        """Whether this is a class of this package.

        registered: vLLM's registry contains our classes under their names, as on CPU; otherwise a name also
        used by vllm-ascend refers to our class only with our module path.
        """
        if self.name not in MODULES:
            return False
        return registered or self.name not in UPSTREAM_NAMES or self.module == MODULES[self.name]


def connector_parts(transfer: Any) -> tuple[ConnectorPart, ...]:
    """The connectors of vLLM's KVTransferConfig, with multi connectors expanded. Empty for None.

    Raises ConfigError: a multi connector of ours without a list of parts, or with parts of other roles.
    """
    if transfer is None:
        return ()
    whole = ConnectorPart(
        transfer.kv_connector,
        transfer.kv_role,
        transfer.kv_connector_extra_config or {},
        getattr(transfer, MODULE_PATH, None),
    )
    return tuple(nested_parts(whole))


def nested_parts(whole: ConnectorPart) -> Iterable[ConnectorPart]:
    """The parts of a connector, see `connector_parts`."""
    if whole.name not in MULTI_CONNECTORS:
        return [whole]
    given = whole.options.get("connectors")
    key = f"{EXTRA}.connectors"
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(p, Mapping) for p in given):
        raise ConfigError(key, given, "must be a list of kv-transfer configs", "see docs/prefill.md")
    if {part.get("kv_connector") for part in given} & {STORE, REMOTE_D2H}:
        for part in given:
            if part.get("kv_role") != whole.role:
                rule = f"its parts have the role of the engine, {whole.role}"
                raise ConfigError(f"{key}.kv_role", part.get("kv_role"), rule, f"set it to {whole.role}")
    return [
        ConnectorPart(
            part.get("kv_connector"), part.get("kv_role"), part.get(EXTRA) or {}, part.get(MODULE_PATH)
        )
        for part in given
    ]
