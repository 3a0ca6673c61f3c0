"""Restricts UCX's network devices, so that an engine listens only on the address given to its peers.

By default UCX opens a TCP listener on every interface of the machine. `UCX_NET_DEVICES` limits the
interfaces; it does not affect shared memory, which processes of one machine continue to use.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_kvoffload.log import get_logger

VARIABLE = "UCX_NET_DEVICES"

logger = get_logger(__name__)


def interface_of(host: str) -> str | None:
    """Name of the interface that has an address; None if no interface of this machine has it."""
    import psutil  # type: ignore[import-untyped]  # vLLM brings it

    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)} if host else set()
        wanted = {ipaddress.ip_address(str(address).partition("%")[0]) for address in found}
    except (OSError, ValueError, UnicodeError):
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            # All of 127.0.0.0/8 is the loopback interface's.
            if address in wanted or (address.is_loopback and any(one.is_loopback for one in wanted)):
                return str(name).partition(":")[0]  # an alias belongs to the device before the colon
    return None


def ucx_devices(host: str, root: Path = Path("/")) -> str | None:
    """Value of UCX_NET_DEVICES for an engine at `host`; None if no interface has its address.

    All RDMA devices stay in use: their endpoints are not TCP ports, and they may be on a separate network.
    """
    interface = interface_of(host)
    if interface is None:
        return None
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return ",".join([interface, *(f"{port.parent.parent.name}:{port.name}" for port in ports)])


@contextmanager
def listening_at(host: str) -> Iterator[str]:
    """Restricts UCX contexts created in the `with` body to the devices of `host`; yields the device names.

    Yields "" and changes nothing if the user has set UCX_NET_DEVICES, or (with a warning) no interface has
    the address.
    """
    if VARIABLE in os.environ:
        yield ""
        return
    devices = ucx_devices(host)
    if devices is None:
        logger.warning(
            "NIXL listens on all interfaces of this machine: none of them has the address %r. To choose, set "
            "%s, or VLLM_HOST_IP to one of the machine's addresses",
            host,
            VARIABLE,
        )
        yield ""
        return
    os.environ[VARIABLE] = devices
    try:
        yield devices
    finally:
        del os.environ[VARIABLE]
