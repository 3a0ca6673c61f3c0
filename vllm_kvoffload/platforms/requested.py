"""Whether an engine's configuration asks for this package: by its section, or by one of its connectors.

An engine that asks for neither must start as if the package were not installed, so this is decided without
validating anything. Does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kvoffload.settings.connectors import EXTRA, MODULE_PATH, MULTI, REMOTE_D2H, STORE
from vllm_kvoffload.settings.offload import SECTION

PACKAGE = "vllm_kvoffload."
ONLY_OURS = ("layerwise_num_shared_buffers", "layerwise_independent_layers", "local_dram_size_GB")


def request_of(vllm_config: Any, *, store_is_shared: bool) -> str:
    """Returns what asks for this package, as the user spells it; "" if nothing does.

    store_is_shared: vllm-ascend's classes are registered too, so that `AscendStoreConnector` is ours only
    with our module path or options that only ours has.
    """
    additional = getattr(vllm_config, "additional_config", None)
    section = additional.get(SECTION) if isinstance(additional, Mapping) else None
    if section is not None and not (isinstance(section, Mapping) and section.get("enabled") in (None, False)):
        return f"additional_config.{SECTION}"
    for name, module, options in _connectors(getattr(vllm_config, "kv_transfer_config", None)):
        if module:
            if module.startswith(PACKAGE):
                return f"kv_connector_module_path {module}"
            continue
        our_store = name == STORE and (not store_is_shared or needs_our_store(options))
        if our_store or name in (REMOTE_D2H, MULTI):
            return f"kv_connector {name}"
    return ""


def needs_our_store(options: Mapping[str, Any]) -> bool:
    """Whether the store's options need what only ours has: layers that share buffers, the embedded store."""
    return any(key in options for key in ONLY_OURS) or str(options.get("backend")).lower() == "local"


def _connectors(transfer: Any) -> Iterator[tuple[Any, str, Mapping[str, Any]]]:
    """Name, module path and options of a configured connector, and of the parts of a multi connector."""
    if transfer is None:
        return
    extra = _mapping(getattr(transfer, EXTRA, None))
    yield getattr(transfer, "kv_connector", None), str(getattr(transfer, MODULE_PATH, None) or ""), extra
    parts = extra.get("connectors")
    for part in parts if isinstance(parts, (list, tuple)) else ():
        found = _mapping(part)
        yield found.get("kv_connector"), str(found.get(MODULE_PATH) or ""), _mapping(found.get(EXTRA))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
