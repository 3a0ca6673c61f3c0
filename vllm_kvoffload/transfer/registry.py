"""The transfer engines, by their `transfer_backend` name."""

from __future__ import annotations

from typing import Literal

from vllm_kvoffload.settings.remote_d2h import TRANSFER_BACKENDS
from vllm_kvoffload.transfer.base import TransferEngine, TransferUnavailableError

Role = Literal["prefill", "decode"]


def make_engine(
    name: str, *, role: Role, host: str, device_id: int, protocol: str = "sdma"
) -> TransferEngine:
    """Makes an engine, importing its package on demand.

    Args:
        name: one of TRANSFER_BACKENDS. role: of this process. host: this machine's address as peers see it.
        device_id: accelerator of this process. protocol: of MemFabric's reads, one of PROTOCOLS.

    Raises:
        TransferUnavailableError: unknown name, or the engine can't run here.
    """
    if name == "nixl":
        from vllm_kvoffload.transfer.nixl import NixlEngine

        return NixlEngine(role, host)
    if name == "memfabric":
        from vllm_kvoffload.transfer.memfabric import MemfabricEngine

        return MemfabricEngine(role=role, host=host, device_id=device_id, protocol=protocol)
    raise TransferUnavailableError(f"transfer engine {name!r} is none of {', '.join(TRANSFER_BACKENDS)}")
