"""What the proxy is told at start-up: addresses, deadlines, limits. No I/O."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

WILDCARDS = frozenset({"", "0.0.0.0", "::", "0:0:0:0:0:0:0:0", "*"})


class SettingsError(ValueError):
    """A setting that can't work; says which, and what to do."""


@dataclass(frozen=True, order=True)
class Address:
    """Where an engine listens. ``host`` is a name, an IPv4 or a bare IPv6 address."""

    host: str
    port: int

    @property
    def authority(self) -> str:
        """``host:port`` as URLs and Host headers have it, IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return self.authority


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means "every interface", which nobody can connect to from elsewhere."""
    bare = host.strip("[]")
    if bare in WILDCARDS:
        return True
    try:
        return ipaddress.ip_address(bare).is_unspecified
    except ValueError:
        return False


def check_host(host: str, flag: str) -> str:
    """``host`` without brackets. Raises ``SettingsError`` where it is neither a name nor an address."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(c.isspace() or c in "/@?#" for c in bare):
        raise SettingsError(f"{flag}: {host!r} is no host; give a name or an address without scheme or port")
    numeric = all(part.isdigit() for part in bare.split("."))
    if numeric or ":" in bare:
        try:
            ipaddress.ip_address(bare)
        except ValueError as error:
            raise SettingsError(f"{flag}: {host!r} is not a valid IP address") from error
    return bare


def check_port(port: int, flag: str) -> int:
    """Raises ``SettingsError`` outside 1 to 65535."""
    if not 1 <= port <= 65535:
        raise SettingsError(f"{flag}: {port} is no port; expected 1 to 65535")
    return port


def addresses(hosts: Sequence[str], ports: Sequence[int], role: str) -> tuple[Address, ...]:
    """One address per pair. ``role`` is ``prefiller`` or ``decoder``, as in the flags.

    Raises ``SettingsError`` for lists of unequal length, duplicates and addresses that can't be called.
    """
    hosts_flag, ports_flag = f"--{role}-hosts", f"--{role}-ports"
    if len(hosts) != len(ports):
        raise SettingsError(
            f"{hosts_flag} has {len(hosts)} and {ports_flag} {len(ports)} values; give as many of each"
        )
    found: list[Address] = []
    for host, port in zip(hosts, ports, strict=True):
        if is_wildcard(host):
            raise SettingsError(f"{hosts_flag}: {host!r} can't be called; give the engine's own address")
        address = Address(check_host(host, hosts_flag), check_port(port, ports_flag))
        if address in found:
            raise SettingsError(f"{hosts_flag}: {address} is given twice")
        found.append(address)
    return tuple(found)


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Every wait of the proxy ends by one of these."""

    connect: float = 5.0
    first_output: float = 600.0  # decode's answer or first streamed event: queueing, rendezvous and prefill
    idle: float = 300.0  # between two parts of an answer
    answer: float = 3600.0  # a whole answer that isn't streamed
    prefill: float = 600.0
    request_body: float = 60.0  # between two parts of the client's request
    client_stall: float = 120.0  # a client that doesn't read
    control: float = 5.0  # /v1/models, /tokenize, probes
    drain: float = 600.0


@dataclass(frozen=True)
class ProxySettings:
    """A whole proxy. Build with :func:`proxy_settings`, which checks it."""

    host: str
    port: int
    advertise: Address
    prefillers: tuple[Address, ...]
    decoders: tuple[Address, ...]
    deadlines: Deadlines = Deadlines()
    max_retries: int = 3
    max_recomputes: int = 8
    max_children: int = 1024
    max_body_bytes: int = 64 << 20
    probe_interval: float = 5.0
    admin_token: str | None = None
    admin_port: int | None = None

    @property
    def metaserver(self) -> str:
        """What decode engines are told to post to."""
        return f"http://{self.advertise.authority}/v1/metaserver"


def advertised(host: str, port: int, advertise_host: str | None) -> Address:
    """The address that decode engines are given. Raises ``SettingsError`` for a wildcard."""
    flag = "--host" if advertise_host is None else "--advertise-host"
    chosen = host if advertise_host is None else advertise_host
    if is_wildcard(chosen):
        raise SettingsError(
            f"{flag}: decode engines call the proxy back at this address, and {chosen!r} is none; "
            "set --advertise-host to an address of this machine that they reach"
        )
    return Address(check_host(chosen, flag), port)


def proxy_settings(
    *,
    host: str,
    port: int,
    prefillers: tuple[Address, ...],
    decoders: tuple[Address, ...],
    advertise_host: str | None = None,
    deadlines: Deadlines | None = None,
    max_retries: int = 3,
    probe_interval: float = 5.0,
    admin_token: str | None = None,
    admin_port: int | None = None,
) -> ProxySettings:
    """Checked settings. Raises ``SettingsError``."""
    check_port(port, "--port")
    if not is_wildcard(host):
        host = check_host(host, "--host")
    advertise = advertised(host, port, advertise_host)
    clash = {advertise, Address(host, port)} & ({*prefillers, *decoders})
    if clash:
        raise SettingsError(f"{clash.pop()} is the proxy's own address; an engine can't listen there too")
    shared = set(prefillers) & set(decoders)
    if shared:
        raise SettingsError(f"{shared.pop()} is given as prefiller and as decoder")
    if max_retries < 0:
        raise SettingsError(f"--max-retries: {max_retries} is negative")
    if admin_port is not None:
        check_port(admin_port, "--admin-port")
        if admin_port == port:
            raise SettingsError("--admin-port: must differ from --port; without it, /admin is on --port")
        if not admin_token:
            raise SettingsError("--admin-port: needs a token in KVOFFLOAD_PROXY_ADMIN_TOKEN")
    return ProxySettings(
        host=host,
        port=port,
        advertise=advertise,
        prefillers=prefillers,
        decoders=decoders,
        deadlines=deadlines or Deadlines(),
        max_retries=max_retries,
        probe_interval=probe_interval,
        admin_token=admin_token or None,
        admin_port=admin_port,
    )
