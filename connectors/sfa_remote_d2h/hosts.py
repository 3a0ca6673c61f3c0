"""Which hosts an engine talks to when a request names them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm_kvoffload.config import ConfigError
from vllm_kvoffload.foreign_text import shown
from vllm_kvoffload.hostnames import HostError, canonical_host, ip_address

LOOPBACK = ("localhost", "127.0.0.0/8", "::1")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True)
class HostList:
    """Hosts that may be talked to. key: the option that says so, for messages.

    names: of hosts and single addresses, canonical. networks: any address in them, but no name of one.
    """

    key: str
    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()
    everything: bool = False

    @classmethod
    def parse(cls, key: str, value: Any) -> HostList:
        """Of an option: names, addresses and networks, or ["*"]. Raises ConfigError."""
        if not isinstance(value, (list, tuple)) or not value:
            rule = "must be a list of host names, addresses or networks"
            fix = (
                'write ["10.0.0.0/8", "node1.example"], ["*"] for any host, or leave it out for this machine'
            )
            raise ConfigError(key, value, rule, fix)
        if list(value) == ["*"]:
            return cls(key, everything=True)
        names: set[str] = set()
        networks: list[Network] = []
        for entry in value:
            try:
                _add(entry, names, networks)
            except ValueError as error:
                rule = f"{shown(entry)} is neither a host name nor an address nor a network"
                fix = 'write entries as in ["node1.example", "10.0.0.5", "10.0.0.0/8"], or ["*"] for any host'
                raise ConfigError(key, value, rule, fix) from error
        return cls(key, frozenset(names), tuple(networks))

    @classmethod
    def told(cls, key: str, hosts: Iterable[object]) -> HostList:
        """The default: this machine, and the engine's own configuration; what is no host is left out."""
        names: set[str] = set()
        networks: list[Network] = []
        for entry in (*LOOPBACK, *hosts):
            try:
                _add(entry, names, networks)
            except ValueError:
                continue
        return cls(key, frozenset(names), tuple(networks))

    def check(self, host: object) -> str:
        """The canonical host; raises HostError for none, and for one that is not listed."""
        name = canonical_host(host)
        if self.everything or name in self.names:
            return name
        address = ip_address(name)
        if address is not None and any(address in network for network in self.networks):
            return name
        raise HostError(f"host {name} is not in {self.key}: set that option of this engine if it may be used")


def _add(entry: object, names: set[str], networks: list[Network]) -> None:
    """Raises ValueError."""
    if isinstance(entry, str) and "/" in entry:
        networks.append(ipaddress.ip_network(entry, strict=False))
    else:
        names.add(canonical_host(entry))
